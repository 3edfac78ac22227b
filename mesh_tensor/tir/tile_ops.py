"""TileLang tile operations as typed records.

TileLang keeps `T.copy`, `T.gemm`, ... as opaque calls until its own lowering. Everything that has to understand them
(the sharding rule, the CPU re-targeting, the interpreter) reads them through :func:`parse_tile_op`, so the layout of
the calls' arguments is known in this file only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.base.errors import refuse

from .effects import op_name
from .nodes import is_const, nodes

_ELEMENT_ATOMICS = {
    "tl.atomic_add_elem_op": "sum",
    "tl.atomic_max_elem_op": "max",
    "tl.atomic_min_elem_op": "min",
    "tl.atomic_or_elem_op": "bitor",
}
_PREVIOUS = {
    "tl.atomic_add_ret_elem_op": "sum",
    "tl.atomic_max_ret_elem_op": "max",
    "tl.atomic_min_ret_elem_op": "min",
}
_TILE_ATOMICS = {
    "tl.tileop.atomicadd": "sum",
    "tl.tileop.atomicmax": "max",
    "tl.tileop.atomicmin": "min",
}
_DEPTHS = {"local.fragment": 2, "local": 2, "shared": 1, "shared.dyn": 1, "shared.tmem": 1}  # as TileLang has them
_COPIES = ("tl.tileop.copy", "tl.tileop.async_copy", "tl.tileop.tma_copy")
_THROUGH = "copy through a buffer of this program, or through a parameter"
_BY_ROWS = "T.copy each row: `T.copy(X[rows[i], 0], block[i, 0:n])`, or `T.copy(block[i, 0:n], X[rows[i], 0])`"
#: What annotations ask for that regions don't say: their keys, what that is, the way out.
_BEYOND = (
    (("dst_block", "cluster_mask"), "a copy to other blocks of a cluster", _THROUGH),
    (("is_gather4", "is_scatter4"), "a copy of rows that are named one by one", _BY_ROWS),
    (("use_2cta",), "a product of two blocks of a cluster", "T.gemm of what this program has"),
)


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
        """The loops that walk its regions.

        Raises:
            Unmatched: the regions do not pair up, or that is not known."""


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


def parse_tile_op(stmt: tirx.Stmt) -> TileOp | None:
    """The tile operation that the statement `T.evaluate(call)` is, or None if it is none that is known here.

    Raises:
        MeshTensorError: its arguments are not what TileLang gives it.
    """
    if not isinstance(stmt, tirx.Evaluate) or not isinstance(stmt.value, tirx.Call):
        return None
    call = stmt.value
    try:
        return _parsed(call, op_name(call))
    except (AttributeError, IndexError, TypeError) as error:
        why = f"its arguments are not those that TileLang gives it ({error})"
        refuse(f"{op_name(call)} is malformed", why=why, fix="write it with tilelang.language")


def _parsed(call: tirx.Call, name: str) -> TileOp | None:
    args = call.args
    if name in _COPIES:
        return Copy(region(args[0]), region(args[1]))
    if name == "tl.tileop.fill":
        return Fill(region(args[0]), args[1])
    if name == "tl.tileop.gemm" and isinstance(args[9], tirx.IntImm):
        return Gemm(region(args[0]), region(args[1]), region(args[2]), _flag(args[3]), _flag(args[4]), _flag(args[9]))
    if name == "tl.tileop.reduce":
        return Reduce(region(args[0]), region(args[1]), _text(args[2]), int(args[3]), _flag(args[4]))
    if name in _TILE_ATOMICS:
        return Atomic(region(args[1]), _region_or_value(args[0]), _TILE_ATOMICS[name])
    if name in _ELEMENT_ATOMICS:
        return Atomic(_pointee(args[0]), args[1], _ELEMENT_ATOMICS[name])
    if name in ("tl.tileop.cumsum", "tl.tileop.cummax"):
        op = "sum" if name.endswith("sum") else "max"
        return Scan(region(args[0]), region(args[1]), op, int(args[2]), _flag(args[3]))
    if name == "tl.tileop.transpose":
        return Transpose(region(args[0]), region(args[1]))
    return None


def beyond_regions(stmt: tirx.Evaluate) -> tuple[str, str] | None:
    """What a tile operation asks for, in its annotations, that its regions don't say, and the way out; None for all
    other statements."""
    asked = dict((stmt.value.annotations or {}).items()) if op_name(stmt.value).startswith("tl.tileop.") else {}
    for keys, what, fix in _BEYOND:
        found = [key for key in keys if key in asked]
        if found:
            return f"{what} ({', '.join(found)}) is not supported", fix
    by_places = [key for key, value in asked.items() if isinstance(value, tirx.PrimExpr) and key != "barrier"]
    computed = [key for key in by_places if nodes(tirx.Evaluate(asked[key]), tirx.Var, tirx.BufferLoad)]
    if not computed:
        return None
    what = f"{op_name(stmt.value)} has annotations that are computed ({', '.join(computed)})"
    return what, "annotate it with numbers"


def parse_previous(expr: object) -> Atomic | None:
    """The update of one element that an atomic with `return_prev=True` makes; its value is what was there before."""
    if not isinstance(expr, tirx.Call) or op_name(expr) not in _PREVIOUS:
        return None
    return Atomic(_pointee(expr.args[0]), expr.args[1], _PREVIOUS[expr.op.name])


def region(call: tirx.Call) -> Region:
    """The box that a `tl.region(load, mode, extents...)` call names."""
    load = call.args[0]
    return Region(load.buffer, tuple(load.indices), tuple(call.args[2:]))


def _pointee(pointer: tirx.Call) -> Region:
    load = pointer.args[0]
    return Region(load.buffer, tuple(load.indices), tuple(tirx.IntImm("int32", 1) for _ in load.indices))


def _region_or_value(arg: tirx.PrimExpr) -> Region | tirx.PrimExpr:
    return region(arg) if op_name(arg) == "tl.region" else arg


def _flag(arg: object) -> bool:
    return bool(int(arg)) if isinstance(arg, tirx.IntImm) else bool(arg)


def _text(arg: object) -> str:
    return arg.value if isinstance(arg, tirx.StringImm) else str(arg)
