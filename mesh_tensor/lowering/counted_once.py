"""What counts once: where an accumulator starts from is added on the first device of a split only."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import Statement
from mesh_tensor.tir.constants import neutral_element
from mesh_tensor.tir.nodes import same_expression
from mesh_tensor.tir.rewrite import tile_op

from .splits import Split


class CountedOnce:
    """Makes what the analysis found `gated` count on one device, and start the others with the neutral element."""

    def __init__(self, analysis: Analysis, splits: Sequence[Split]):
        self._splits = [(split, analysis.reductions[split.factor]) for split in splits]
        self._ranges = analysis.coordinates.ranges

    def value(self, statement: Statement, value: tirx.PrimExpr, op: str | None = None) -> tirx.PrimExpr:
        """What a store writes, or what an update with `op` combines, on this device."""
        condition, partial_op = self._gate(statement)
        if condition is None:
            return value
        return tirx.if_then_else(condition, value, neutral_element(op or partial_op, value.dtype))

    def started(self, statement: Statement, value: tirx.PrimExpr) -> tirx.PrimExpr:
        """A value in which 0 stands in for maxima that are still the lowest value: nothing counts yet of such a row,
        and the lowest value can't be taken from itself. The first device has what the whole kernel has."""
        for split, reduction in self._splits:
            for state in reduction.states:
                if statement in state.guarded:
                    value = _replace_loads(value, state.guarded[statement], split.is_first)
        return value

    def tile_op(self, statement: Statement, call: tirx.Stmt, target: tirx.Call) -> tirx.Stmt:
        """A tile operation into the region `target`: a plain update is left out on the other devices, what does not
        build on the target's content is a fill there."""
        condition, op = self._gate(statement)
        if condition is None:
            return call
        if statement.op is not None and not statement.fresh:
            return tirx.IfThenElse(condition, call, None)
        fill = tile_op("fill", target, neutral_element(op, statement.target.buffer.dtype))
        return tirx.IfThenElse(condition, call, fill)

    def _gate(self, statement: Statement) -> tuple[tirx.PrimExpr | None, str]:
        """Whether this device is the one that counts, None if all do; and what completes the partial value."""
        condition, op = None, ""
        for split, reduction in self._splits:
            if statement in reduction.gated:
                op = reduction.partial[self._ranges.of(statement.target)]
                condition = split.is_first if condition is None else tirx.And(condition, split.is_first)
        return condition, op


def _replace_loads(value: tirx.PrimExpr, loads: Sequence[tirx.BufferLoad], is_first: tirx.PrimExpr) -> tirx.PrimExpr:
    def replace(load: tirx.BufferLoad) -> tirx.PrimExpr | None:
        if not any(same_expression(load, other) for other in loads):
            return None
        lowest = neutral_element("max", load.dtype)
        return tirx.Select(tirx.And(tirx.Not(is_first), load == lowest), tirx.const(0, load.dtype), load)

    return tirx.stmt_functor.ir_transform(tirx.Evaluate(value), replace, None, ["tirx.BufferLoad"]).value
