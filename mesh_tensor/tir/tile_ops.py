"""TileLang tile operations as typed records.

TileLang keeps `T.copy`, `T.gemm`, ... as opaque calls until its own lowering. Everything that has to understand them
(the sharding rule, the CPU re-targeting, the interpreter) reads them through :func:`parse_tile_op`, so the layout of
the calls' arguments is known in this file only.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, tirx

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
_COPIES = ("tl.tileop.copy", "tl.tileop.async_copy", "tl.tileop.tma_copy")


@dataclass(frozen=True)
class Region:
    """A box of a buffer: `buffer[mins[0] : mins[0] + extents[0], ...]`."""

    buffer: tirx.Buffer
    mins: tuple[tirx.PrimExpr, ...]
    extents: tuple[tirx.PrimExpr, ...]

    @property
    def long_dims(self) -> tuple[int, ...]:
        """The dims whose extent is not the constant 1: the ones that tile operations pair up in order."""
        return tuple(d for d, extent in enumerate(self.extents) if not _is_one(extent))


@dataclass(frozen=True)
class Copy:
    """`dst[...] = cast(src[...])`. Dims of extent 1 are dropped on both sides, the others pair up in order. What lies
    outside `src`'s buffer reads as 0; what lies outside `dst`'s buffer is not written."""

    src: Region
    dst: Region


@dataclass(frozen=True)
class Fill:
    """`dst[...] = value`."""

    dst: Region
    value: tirx.PrimExpr


@dataclass(frozen=True)
class Gemm:
    """`c[m, n] += cast(a[m, k]) * cast(b[k, n])` over the last two dims of each region (leading extents are 1);
    `a` is stored (k, m) if `trans_a`, `b` is stored (n, k) if `trans_b`. `clear` sets `c` to zero first."""

    a: Region
    b: Region
    c: Region
    trans_a: bool
    trans_b: bool
    clear: bool


@dataclass(frozen=True)
class Reduce:
    """Reduce `src` over `dim` into `dst` (that dim is dropped in `dst`, or has extent 1). `op` is one of sum, max, min,
    prod, abssum, absmax, bitand, bitor, bitxor. `clear`: `dst` starts at the neutral element, else at its content."""

    src: Region
    dst: Region
    op: str
    dim: int
    clear: bool


@dataclass(frozen=True)
class Atomic:
    """`dst[...] = dst[...] op value`, atomically: `value` is a Region that pairs with `dst` as in a copy, or an
    expression that goes to every element of `dst`."""

    dst: Region
    value: Region | tirx.PrimExpr
    op: str


@dataclass(frozen=True)
class Scan:
    """Cumulative `op` (sum, max) of `src` along `dim` into `dst`; from the far end if `reverse`."""

    src: Region
    dst: Region
    op: str
    dim: int
    reverse: bool


@dataclass(frozen=True)
class Transpose:
    """`dst[j, i] = src[i, j]` over the last two dims."""

    src: Region
    dst: Region


TileOp = Copy | Fill | Gemm | Reduce | Atomic | Scan | Transpose


def parse_tile_op(stmt: tirx.Stmt) -> TileOp | None:
    """The tile operation that the statement `T.evaluate(call)` is, or None if it is none that is known here."""
    if not isinstance(stmt, tirx.Evaluate) or not isinstance(stmt.value, tirx.Call):
        return None
    call = stmt.value
    name = call.op.name if isinstance(call.op, ir.Op) else ""
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


def between_programs(stmt: tirx.Evaluate) -> str | None:
    """What a copy is called that goes to other programs of the grid; None for all other statements."""
    call = stmt.value
    if not isinstance(call, tirx.Call) or not isinstance(call.op, ir.Op) or call.op.name not in _COPIES:
        return None
    asked = [key for key in ("dst_block", "cluster_mask") if key in (call.annotations or {})]
    return f"a copy to other blocks of a cluster ({', '.join(asked)}) is not supported" if asked else None


def parse_previous(expr: object) -> Atomic | None:
    """The update of one element that an atomic with `return_prev=True` makes; its value is what was there before."""
    if not isinstance(expr, tirx.Call) or not isinstance(expr.op, ir.Op) or expr.op.name not in _PREVIOUS:
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
    is_region = isinstance(arg, tirx.Call) and isinstance(arg.op, ir.Op) and arg.op.name == "tl.region"
    return region(arg) if is_region else arg


def _flag(arg: object) -> bool:
    return bool(int(arg)) if isinstance(arg, tirx.IntImm) else bool(arg)


def _text(arg: object) -> str:
    return arg.value if isinstance(arg, tirx.StringImm) else str(arg)


def _is_one(extent: object) -> bool:
    return isinstance(extent, tirx.IntImm) and extent.value == 1
