"""TileLang's tile operations as typed records: how calls say each, what it reads and writes, which elements meet, what
combines them. A record that is in `TILE_OPS` is all that rules and lowering have to know of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tvm import tirx

from .effects import op_name
from .nodes import is_const
from .regions import Region

_ELEMENT_ATOMICS = {
    "tl.atomic_add_elem_op": "sum",
    "tl.atomic_max_elem_op": "max",
    "tl.atomic_min_elem_op": "min",
    "tl.atomic_or_elem_op": "bitor",
}
_TILE_ATOMICS = {"tl.tileop.atomicadd": "sum", "tl.tileop.atomicmax": "max", "tl.tileop.atomicmin": "min"}


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

    calls      the names of TileLang's calls that say it
    sources    the regions that it reads, in the order of the call's arguments; the region `dst` comes after them
    value      the expression that it reads instead, if any
    reduction  what combines with what is there; None where that is overwritten
    clears     `dst` is set to the neutral element first
    product    what is combined are the products of the sources' elements
    in_order   the dim, of all its regions, along which it goes element by element: nothing walks part of it
    flops      floating-point operations per element"""

    calls: ClassVar[Sequence[str]]
    dst: Region
    value: Region | tirx.PrimExpr | None
    reduction: str | None
    clears: bool
    product = False
    in_order: int | None = None
    flops = 0

    @classmethod
    @abstractmethod
    def read(cls, name: str, args: Sequence[tirx.PrimExpr]) -> TileOp | None:
        """The operation that a call of one of `calls` says; None where that is not known here."""

    @property
    def sources(self) -> tuple[Region, ...]:
        return ()

    @abstractmethod
    def elements(self, equal: Equal) -> list[Element]:
        """The loops that walk its regions. Raises Unmatched where the regions do not pair up, or that is not known."""


@dataclass(frozen=True)
class _OfOneSource(TileOp, ABC):
    """Its calls have the source first, then `dst`; what else they have is said by `read`."""

    src: Region
    dst: Region

    @classmethod
    def read(cls, name: str, args: Sequence[tirx.PrimExpr]) -> TileOp:
        return cls(Region.of(args[0]), Region.of(args[1]))

    @property
    def sources(self) -> tuple[Region, ...]:
        return (self.src,)


@dataclass(frozen=True)
class Copy(_OfOneSource):
    """`dst[...] = cast(src[...])`. Dims of extent 1 are dropped on both sides, the others pair up in order. What lies
    outside `src`'s buffer reads as 0; what lies outside `dst`'s buffer is not written."""

    value = reduction = None
    clears = False
    calls = ("tl.tileop.copy", "tl.tileop.async_copy", "tl.tileop.tma_copy")

    def elements(self, equal: Equal) -> list[Element]:
        return _paired(self.src, self.dst, equal)


@dataclass(frozen=True)
class Fill(TileOp):
    """`dst[...] = value`."""

    dst: Region
    value: tirx.PrimExpr
    reduction = None
    clears = False
    calls = ("tl.tileop.fill",)

    @classmethod
    def read(cls, name: str, args: Sequence[tirx.PrimExpr]) -> Fill:
        return cls(Region.of(args[0]), args[1])

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
    calls = ("tl.tileop.gemm", "tl.tileop.wgmma_gemm", "tl.tileop.tcgen05_gemm")

    @classmethod
    def read(cls, name: str, args: Sequence[tirx.PrimExpr]) -> Gemm | None:
        if not isinstance(args[9], tirx.IntImm):
            return None
        a, b, c = map(Region.of, args[:3])
        return cls(a, b, c, _flag(args[3]), _flag(args[4]), _flag(args[9]))

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

    reduction: str
    dim: int
    clears: bool
    value = None
    flops = 1
    calls = ("tl.tileop.reduce",)

    @classmethod
    def read(cls, name: str, args: Sequence[tirx.PrimExpr]) -> Reduce:
        return cls(Region.of(args[0]), Region.of(args[1]), _text(args[2]), int(args[3]), _flag(args[4]))

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
    calls = (*_TILE_ATOMICS, *_ELEMENT_ATOMICS)

    @classmethod
    def read(cls, name: str, args: Sequence[tirx.PrimExpr]) -> Atomic:
        return (
            cls(Region.at(args[0]), args[1], _ELEMENT_ATOMICS[name])
            if name in _ELEMENT_ATOMICS
            else cls(Region.of(args[1]), _region_or_value(args[0]), _TILE_ATOMICS[name])
        )

    @property
    def sources(self) -> tuple[Region, ...]:
        return (self.value,) if isinstance(self.value, Region) else ()

    def elements(self, equal: Equal) -> list[Element]:
        return _paired(self.value, self.dst, equal) if isinstance(self.value, Region) else _everywhere(self.dst)


@dataclass(frozen=True)
class Scan(_OfOneSource):
    """Cumulative `reduction` (sum, max) of `src` along `dim` into `dst`; from the far end if `reverse`."""

    reduction: str
    dim: int
    reverse: bool
    value = None
    clears = False
    calls = ("tl.tileop.cumsum", "tl.tileop.cummax")

    @classmethod
    def read(cls, name: str, args: Sequence[tirx.PrimExpr]) -> Scan:
        return cls(
            Region.of(args[0]), Region.of(args[1]), name.removeprefix("tl.tileop.cum"), int(args[2]), _flag(args[3])
        )

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

    value = reduction = None
    clears = False
    calls = ("tl.tileop.transpose",)

    def elements(self, equal: Equal) -> list[Element]:
        *outer, rows, columns = range(len(self.src.extents))
        return _paired(self.src, self.dst, equal, (*outer, columns, rows))


_KINDS: tuple[type[TileOp], ...] = (Copy, Fill, Gemm, Reduce, Atomic, Scan, Transpose)
#: By the names of calls, which operation they say.
TILE_OPS = {name: kind for kind in _KINDS for name in kind.calls}


def _region_or_value(arg: tirx.PrimExpr) -> Region | tirx.PrimExpr:
    return Region.of(arg) if op_name(arg) == "tl.region" else arg


def _flag(arg: object) -> bool:
    return bool(int(arg)) if isinstance(arg, tirx.IntImm) else bool(arg)


def _text(arg: object) -> str:
    return arg.value if isinstance(arg, tirx.StringImm) else str(arg)


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
