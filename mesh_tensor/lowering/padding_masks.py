"""Padding is never reduced: where a tile is short, or blocks reach past its end, neutral elements stand in."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from mesh_tensor.rules.kernel.factors import Blocked
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import Access, Statement
from mesh_tensor.tir.constants import neutral_element
from mesh_tensor.tir.linear import Linear, as_expr
from mesh_tensor.tir.rewrite import parallel_nest, tile_op

from .expressions import ValueRewriter
from .splits import Shrink, Split

#: A split whose padding a statement would combine, and the statement's coordinate in it.
_Padded = tuple[Split, Linear]


class PaddingMasks:
    """Keeps what lies outside the valid part of tiles from being combined."""

    def __init__(self, analysis: Analysis, splits: Sequence[Split], shrink: Shrink, values: ValueRewriter):
        self._kernel, self._shrink, self._values = analysis.kernel, shrink, values
        self._splits = [(split, analysis.reductions[split.factor]) for split in splits]

    def value(self, statement: Statement, value: tirx.PrimExpr) -> tirx.PrimExpr:
        """What an update combines: its value inside, the neutral element outside."""
        neutral = neutral_element(statement.operation, value.dtype)
        for split, form in self._padded(statement):
            value = tirx.if_then_else(as_expr(form) < split.valid, value, neutral)
        return value

    def loops(self, statement: Statement) -> list[tirx.Stmt]:
        """Loops that set the operands of a tile operation to its neutral element outside the valid part.

        Raises `Blocked` for an operand that lies in a parameter, which can't be overwritten."""
        padded = self._padded(statement)
        if not padded:
            return []
        record = statement.tile_op
        assert record is not None
        operands, op = statement.reads[: len(record.sources)], str(record.reduction)
        return [loop for operand in operands if (loop := self._loop(operand, statement, padded, op)) is not None]

    def skipped(self, statement: Statement, body: tirx.Stmt, target: tirx.Call) -> tirx.Stmt:
        """A tile operation that lies, as a whole, at one coordinate: past the valid part it combines nothing into the
        region `target`."""
        otherwise: tirx.Stmt | None = None
        if statement.fresh:
            neutral = neutral_element(statement.operation, statement.target.buffer.dtype)
            otherwise = tile_op("fill", target, neutral)
        for split, form in self._padded(statement):
            if not form.terms.keys() & statement.element_vars:
                body = tirx.IfThenElse(as_expr(form) < split.valid, body, otherwise)
        return body

    def _padded(self, statement: Statement) -> list[_Padded]:
        found = []
        for split, reduction in self._splits:
            form = reduction.updates.get(statement)
            overruns = reduction.masked and self._shrink.overruns(split)
            if form is not None and (not split.even or overruns):
                found.append((split, form))
        return found

    def _loop(self, operand: Access, statement: Statement, padded: list[_Padded], op: str) -> tirx.Stmt | None:
        element = statement.element_dims(operand)
        relevant = [(split, form) for split, form in padded if form.terms.keys() & set(element.values())]
        if not relevant:
            return None
        if self._kernel.is_param(operand.buffer):
            raise Blocked(
                f"{operand.buffer.name} is combined as it lies, and what is past the end of a short tile would count",
                relevant[0][0].factor,
            )
        fresh = {var: tirx.Var("mn"[d % 2] + str(d), "int32") for d, var in element.items()}
        buffer = self._shrink.buffer(operand.buffer)
        indices = [tirx.stmt_functor.substitute(i, fresh) for i in self._values.indices(operand)]
        value: tirx.PrimExpr = tirx.BufferLoad(buffer, indices)
        for split, form in relevant:
            inside = tirx.stmt_functor.substitute(as_expr(form), fresh) < split.valid
            value = tirx.if_then_else(inside, value, neutral_element(op, buffer.dtype))
        extents = [self._shrink.extent(var) for var in fresh]
        return parallel_nest(list(fresh.values()), extents, tirx.BufferStore(buffer, value, indices))
