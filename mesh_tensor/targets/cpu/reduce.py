"""`T.reduce_*` as loops that vectorise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx

from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.base.reductions import reduction
from mesh_tensor.tir.rewrite import cast, neutral_element, sequence
from mesh_tensor.tir.tile_ops import Reduce

from .dtypes import compute_dtype
from .exprs import FOLD, Bounds, all_of, combine, const, if_then, loop_nest, temporary

LANES = CPU.tuning.totals
"""How many totals a reduction along the last dim keeps: a power of 2."""

_ZERO = const(0, "int32")
_FOLDED = ("Add", "Max", "Min")  # `csrc/mesh_tensor_fold.h` has functions for these


def is_total(store: tirx.BufferStore, var: tirx.Var) -> bool:
    """Whether iteration `var` of a loop combines something with total `var % LANES` by `store`."""
    if len(store.indices) != 1 or not isinstance(store.indices[0], tirx.FloorMod):
        return False
    index = store.indices[0]
    return bool(index.a.same_as(var)) and getattr(index.b, "value", None) == LANES


class ReduceLoops:
    """Totals are kept in a buffer of their own. There is one for each position of the dims behind the reduced one, and
    the loop over the reduced dim goes around them, so that memory is walked in order. Where the reduced dim is the last
    one, its elements are dealt out to `LANES` totals, which are combined at the end."""

    def __init__(self, op: Reduce, bounds: Bounds, load: Callable[..., tirx.PrimExpr]) -> None:
        self._op, self._bounds, self._load = op, bounds, load
        self._dtype = compute_dtype(op.dst.buffer.dtype)
        extents = op.src.extents
        self._vars: list[tirx.PrimExpr] = [tirx.Var(f"i{d}", "int32") for d in range(len(extents))]
        for var, extent in zip(self._vars, extents, strict=True):
            bounds.loop(var, _ZERO, extent)
        constant = all(isinstance(e, tirx.IntImm) for e in extents[op.dim + 1 :])
        self._inner = list(range(op.dim + 1, len(extents))) if constant else []

    def build(self) -> tirx.Stmt:
        """The whole reduction."""
        op, extent = self._op, self._op.src.extents[self._op.dim]
        is_last = op.dim == len(self._vars) - 1
        if is_last and isinstance(extent, tirx.IntImm) and extent.value >= 2 * LANES:
            body = self._in_lanes()
        else:
            body = self._in_order()
        return self._nest([d for d in range(len(self._vars)) if d != op.dim and d not in self._inner], body)

    def _in_order(self) -> tirx.Stmt:
        shape = [int(self._op.src.extents[d]) for d in self._inner] or [1]
        totals = temporary("totals", self._dtype, shape)
        at = [self._vars[d] for d in self._inner] or [_ZERO]
        return sequence(
            [
                tirx.AllocBuffer(totals),
                self._nest(self._inner, tirx.BufferStore(totals, self._start(), at)),
                self._nest([self._op.dim, *self._inner], self._add(totals, at, self._vars)),
                self._nest(self._inner, self._finish(tirx.BufferLoad(totals, at))),
            ]
        )

    def _in_lanes(self) -> tirx.Stmt:
        """Element i goes to total i % LANES; `cpu_lanes` turns that into steps of LANES elements."""
        totals = temporary("totals", self._dtype, [LANES])
        lane, mine = tirx.Var("lane", "int32"), tirx.FloorMod(self._vars[self._op.dim], const(LANES, "int32"))

        def over_lanes(body: tirx.Stmt, count: int = LANES) -> tirx.Stmt:
            return loop_nest([(lane, _ZERO, const(count, "int32"))], body)

        def folded(half: int) -> tirx.Stmt:
            """The upper half of the totals that are left is combined with the lower."""

            low, high = tirx.BufferLoad(totals, [lane]), tirx.BufferLoad(totals, [lane + half])
            return over_lanes(tirx.BufferStore(totals, combine(self._op.reduction, low, high), [lane]), half)

        function = reduction(self._op.reduction).tir
        folds = [folded(LANES >> step) for step in range(1, LANES.bit_length())]
        total = tirx.BufferLoad(totals, [_ZERO])  # what was there comes last: a store to one lane would stall all
        if self._dtype == "float32" and function in _FOLDED:
            total, folds = tirx.call_extern("float32", f"{FOLD}{function}_float32", tirx.address_of(total)), []
        return sequence(
            [
                tirx.AllocBuffer(totals),
                over_lanes(tirx.BufferStore(totals, neutral_element(self._op.reduction, self._dtype), [lane])),
                self._nest([self._op.dim], self._add(totals, [mine], self._vars)),
                *folds,
                self._finish(total if self._op.clears else combine(self._op.reduction, self._start(), total)),
            ]
        )

    def _start(self) -> tirx.PrimExpr:
        if self._op.clears:
            return neutral_element(self._op.reduction, self._dtype)
        return cast(self._load(self._op.dst.buffer, self._dst_indices()), self._dtype)

    def _add(self, totals: tirx.Buffer, at: list[tirx.PrimExpr], element: Sequence[tirx.PrimExpr]) -> tirx.Stmt:
        src = [start + position for start, position in zip(self._op.src.mins, element, strict=True)]
        value = cast(self._load(self._op.src.buffer, src), self._dtype)
        return tirx.BufferStore(totals, combine(self._op.reduction, tirx.BufferLoad(totals, at), value), at)

    def _finish(self, total: tirx.PrimExpr) -> tirx.Stmt:
        buffer, indices = self._op.dst.buffer, self._dst_indices()
        store = tirx.BufferStore(buffer, cast(total, buffer.dtype), indices)
        return if_then(all_of(self._bounds.guard(buffer, indices)), store)

    def _nest(self, dims: Sequence[int], body: tirx.Stmt) -> tirx.Stmt:
        return loop_nest([(self._vars[d], _ZERO, self._op.src.extents[d]) for d in dims], body)

    def _dst_indices(self) -> list[tirx.PrimExpr]:
        op = self._op
        kept = [d for d in range(len(self._vars)) if d != op.dim]
        indices = list(op.dst.mins)
        if len(indices) == len(self._vars):
            pairs = [(d, d) for d in kept]
        elif len(indices) == len(kept):
            pairs = list(enumerate(kept))
        else:
            pairs = list(zip(op.dst.long_dims, [d for d in kept if d in op.src.long_dims], strict=True))
        for dst_dim, src_dim in pairs:
            indices[dst_dim] = indices[dst_dim] + self._vars[src_dim]
        return indices
