"""TileLang's tile operations as typed records: what each reads and writes, which elements meet, what combines them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvm import ir, tirx

from .nodes import is_const

_DEPTHS = {"local.fragment": 2, "local": 2, "shared": 1, "shared.dyn": 1, "shared.tmem": 1}  # as TileLang has them


@dataclass(frozen=True)
class Region:
    """A box of a buffer: `buffer[mins[0] : mins[0] + extents[0], ...]`."""

    buffer: tirx.Buffer
    mins: tuple[tirx.PrimExpr, ...]
    extents: tuple[tirx.PrimExpr, ...]

    @property
    def long_dims(self) -> tuple[int, ...]:
        """The dims whose extent is not the constant 1: the ones that tile operations pair up in order."""
        return tuple(d for d, extent in enumerate(self.extents) if not is_const(extent, 1))

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the buffer."""
        return all(is_const(low, 0) for low in self.mins) and ir.structural_equal([*self.extents], [*self.buffer.shape])


def deeper(src: Region, dst: Region) -> Region:
    """Whose extents both sides of a copy have: TileLang takes those of the one that is deeper in the memory
    hierarchy."""
    return src if _depth(src) >= _depth(dst) else dst


def _depth(region: Region) -> int:
    return _DEPTHS.get(region.buffer.scope(), 0)


@dataclass(frozen=True)
class Element:
    """A loop over elements: over how many, and which dim it walks of the region `n` of `(dst, *sources)`: `dims[n]`."""

    extent: tirx.PrimExpr
    dims: Mapping[int, int]


class Unmatched(Exception):
    """A tile operation whose regions do not pair up, or that no element loops describe."""


#: Whether two extents are certainly equal.
Equal = Callable[[tirx.PrimExpr, tirx.PrimExpr], bool]


class TileOp(ABC):
    """What every tile operation says of itself: `dst[...] = dst[...] op f(sources[...])`, element by element.

    sources    the regions that it reads, in the order of the call's arguments; the region `dst` comes after them
    value      the expression that it reads instead, if any
    reduction  what combines with what is there; None where that is overwritten
    clears     `dst` is set to the neutral element first
    product    what is combined are the products of the sources' elements
    in_order   the dim, of all its regions, along which it goes element by element: nothing walks part of it
    flops      floating-point operations per element"""

    dst: Region
    value: Region | tirx.PrimExpr | None
    reduction: str | None
    clears: bool
    product = False
    in_order: int | None = None
    flops = 0

    @property
    def sources(self) -> tuple[Region, ...]:
        return ()

    @abstractmethod
    def elements(self, equal: Equal) -> list[Element]:
        """The loops that walk its regions. Raises Unmatched where the regions do not pair up, or that is not known."""


class _OfOneSource(TileOp, ABC):
    src: Region

    @property
    def sources(self) -> tuple[Region, ...]:
        return (self.src,)


@dataclass(frozen=True)
class Copy(_OfOneSource):
    """`dst[...] = cast(src[...])`. Dims of extent 1 are dropped on both sides, the others pair up in order. What lies
    outside `src`'s buffer reads as 0; what lies outside `dst`'s buffer is not written."""

    src: Region
    dst: Region
    value = reduction = None
    clears = False

    def elements(self, equal: Equal) -> list[Element]:
        return _paired(self.src, self.dst, equal)


@dataclass(frozen=True)
class Fill(TileOp):
    """`dst[...] = value`."""

    dst: Region
    value: tirx.PrimExpr
    reduction = None
    clears = False

    def elements(self, equal: Equal) -> list[Element]:
        return _everywhere(self.dst)


@dataclass(frozen=True)
class Gemm(TileOp):
    """`c[m, n] += cast(a[m, k]) * cast(b[k, n])` over the last two dims of each region (leading extents are 1);
    `a` is stored (k, m) if `trans_a`, `b` is stored (n, k) if `trans_b`. `clears` sets `c` to zero first."""

    a: Region
    b: Region
    dst: Region
    trans_a: bool
    trans_b: bool
    clears: bool
    value = None
    reduction = "sum"
    product = True
    flops = 2

    @property
    def sources(self) -> tuple[Region, ...]:
        return (self.a, self.b)

    def elements(self, equal: Equal) -> list[Element]:
        c, a, b = (len(region.extents) for region in (self.dst, *self.sources))
        m, k = (a - 1, a - 2) if self.trans_a else (a - 2, a - 1)
        over, n = (b - 1, b - 2) if self.trans_b else (b - 2, b - 1)
        rows, columns = self.dst.extents[-2:]
        return [
            Element(rows, {0: c - 2, 1: m}),
            Element(columns, {0: c - 1, 2: n}),
            Element(self.a.extents[k], {1: k, 2: over}),
        ]


@dataclass(frozen=True)
class Reduce(_OfOneSource):
    """Reduce `src` over `dim` into `dst` (that dim is dropped in `dst`, or has extent 1) by one of base.reductions.
    `clears`: `dst` starts at the neutral element, else at its content."""

    src: Region
    dst: Region
    reduction: str
    dim: int
    clears: bool
    value = None
    flops = 1

    def elements(self, equal: Equal) -> list[Element]:
        extents = self.src.extents
        kept = [d for d in range(len(extents)) if d != self.dim]
        if len(self.dst.extents) == len(extents):
            place = {d: d for d in kept}
        elif len(self.dst.extents) == len(kept):
            place = {d: position for position, d in enumerate(kept)}
        elif all(is_const(extents[d], 1) for d in kept):
            place = {}
        else:
            raise Unmatched(f"T.reduce of {self.src.buffer.name} into {self.dst.buffer.name}")
        return [Element(e, {1: d} | ({0: place[d]} if d in place else {})) for d, e in enumerate(extents)]


@dataclass(frozen=True)
class Atomic(TileOp):
    """`dst[...] = dst[...] op value`, atomically: `value` is a Region that pairs with `dst` as in a copy, or an
    expression that goes to every element of `dst`."""

    dst: Region
    value: Region | tirx.PrimExpr
    reduction: str
    clears = False
    flops = 1

    @property
    def sources(self) -> tuple[Region, ...]:
        return (self.value,) if isinstance(self.value, Region) else ()

    def elements(self, equal: Equal) -> list[Element]:
        return _paired(self.value, self.dst, equal) if isinstance(self.value, Region) else _everywhere(self.dst)


@dataclass(frozen=True)
class Scan(_OfOneSource):
    """Cumulative `reduction` (sum, max) of `src` along `dim` into `dst`; from the far end if `reverse`."""

    src: Region
    dst: Region
    reduction: str
    dim: int
    reverse: bool
    value = None
    clears = False

    @property
    def in_order(self) -> int:  # type: ignore[override]
        return self.dim

    def elements(self, equal: Equal) -> list[Element]:
        src, dst = self.src.extents, self.dst.extents
        if len(src) != len(dst) or not all(map(equal, src, dst)):
            raise Unmatched(f"T.scan of {self.src.buffer.name} into {self.dst.buffer.name}")
        return [Element(extent, {0: d, 1: d}) for d, extent in enumerate(src) if d != self.dim]


@dataclass(frozen=True)
class Transpose(_OfOneSource):
    """`dst[j, i] = src[i, j]` over the last two dims."""

    src: Region
    dst: Region
    value = reduction = None
    clears = False

    def elements(self, equal: Equal) -> list[Element]:
        *outer, rows, columns = range(len(self.src.extents))
        return _paired(self.src, self.dst, equal, (*outer, columns, rows))


def _paired(src: Region, dst: Region, equal: Equal, order: Sequence[int] | None = None) -> list[Element]:
    """The dims of both that are no single index pair up, the source's in `order`."""
    from_dims = [d for d in order or range(len(src.extents)) if d in src.long_dims]
    if len(from_dims) != len(dst.long_dims):
        raise Unmatched(f"{src.buffer.name} and {dst.buffer.name} have regions of different rank")
    for a, b in zip(from_dims, dst.long_dims, strict=True):
        if not equal(src.extents[a], dst.extents[b]):
            what = f"{src.buffer.name} dim {a} ({src.extents[a]}) and {dst.buffer.name} dim {b} ({dst.extents[b]})"
            raise Unmatched(f"{what} differ")
    return [Element(src.extents[a], {0: b, 1: a}) for a, b in zip(from_dims, dst.long_dims, strict=True)]


def _everywhere(dst: Region) -> list[Element]:
    return [Element(dst.extents[d], {0: d}) for d in dst.long_dims]
