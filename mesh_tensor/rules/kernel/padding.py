"""What a kernel computes past a dim's end.

T.copy reads 0 there. Whether that counts depends on what follows: nothing is added by `0 * 0`, but `exp(0)` is 1 and a
maximum sees the 0. This module evaluates statements at such a position, with constants only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from mesh_tensor.base.reductions import neutral, reduction
from mesh_tensor.tir import tile_ops
from mesh_tensor.tir.constants import number
from mesh_tensor.tir.linear import Linear, as_expr
from mesh_tensor.tir.tile_position import with_bounds

from .coordinates import Coordinates
from .factors import Factor
from .live_ranges import LiveRange
from .reader import safe_buffers
from .statements import Access, Kernel, Statement

_FUNCTIONS = {
    "tirx.exp": math.exp,
    "tirx.exp2": lambda v: 2.0**v,
    "tirx.tanh": math.tanh,
    "tirx.fabs": abs,
}


#: What leaves every finite number as it is.
_UNIT = {"sum": 0.0, "prod": 1.0}


def takes_whole_blocks(kernel: Kernel, factor: Factor) -> bool:
    """Whether blocks divide the dim, so that nothing reaches past its end."""
    if any(_reaches_past(kernel, factor, var) for var, c in factor.roles.items() if c == 1):
        return False
    return kernel.analyzer.can_prove_equal(tirx.floormod(factor.size, factor.block), 0)


def _reaches_past(kernel: Kernel, factor: Factor, var: tirx.Var) -> bool:
    """A single loop over the whole dim that is longer than the dim."""
    extent = kernel.loops[var].extent if var in kernel.loops else None
    alone = factor.block == 1
    return alone and extent is not None and not kernel.analyzer.can_prove(extent <= factor.size)


def padding_is_neutral(
    statement: Statement, kernel: Kernel, coordinates: Coordinates, factor: Factor, *, past_the_end: bool
) -> bool:
    """Whether what an update combines outside its buffers is its operation's neutral element.

    `past_the_end`: outside the whole dim, where the kernel's own bounds tests fail; else past the end of some tile,
    where nothing is known of them."""
    padding = _Padding(kernel, coordinates, factor, past_the_end)
    if padding.is_skipped(statement):
        return True
    record = statement.tile_op  # 0 is neutral for absmax, not for max
    op = statement.operation if record is None else str(record.reduction)
    return padding.contribution(statement) == neutral(op, statement.target.buffer.dtype)


def content_past_the_end(
    live_range: LiveRange, kernel: Kernel, coordinates: Coordinates, factor: Factor
) -> float | None:
    """What an on-chip buffer holds past the end of the factor's dim, None if that is not known."""
    return _Padding(kernel, coordinates, factor, past_the_end=True).content(live_range)


def is_inside(condition: tirx.PrimExpr, coordinates: list[tuple[Linear, tirx.PrimExpr]], kernel: Kernel) -> bool:
    """Whether the condition certainly holds at coordinates that lie inside their dims: a bounds test."""
    inside: tirx.PrimExpr = tirx.const(True, "bool")
    for form, size in coordinates:
        inside = tirx.And(inside, tirx.And(as_expr(form) < size, as_expr(form) >= 0))
    with kernel.analyzer.constraint_scope(inside):
        return kernel.analyzer.can_prove(condition)


@dataclass(frozen=True, eq=False)
class _Place:
    """A statement, and its coordinate in the factor."""

    statement: Statement
    form: Linear


class _Padding:
    def __init__(self, kernel: Kernel, coordinates: Coordinates, factor: Factor, past_the_end: bool):
        self.kernel, self.coordinates, self.factor, self.past_the_end = kernel, coordinates, factor, past_the_end
        self.active: set[LiveRange] = set()
        self.safe = safe_buffers(kernel.params.values(), kernel.root)

    def is_skipped(self, statement: Statement) -> bool:
        """Whether a condition keeps the statement from running past the end."""
        form = self.coordinates.of_statement(statement).get(self.factor)
        return form is not None and any(self._truth(c, _Place(statement, form)) is False for c in statement.conditions)

    def contribution(self, statement: Statement) -> float | None:
        """What an update combines past the end, should it run there; None if that is not known."""
        record = statement.tile_op
        if record is not None and record.reduction is not None and record.sources:
            value, *factors = (self._access(access) for access in statement.reads[: len(record.sources)])
            if record.product:
                return 0.0 if self._annihilates(value, *factors) else None
            return abs(value) if value is not None and reduction(record.reduction).magnitudes else value
        if statement.op is None or statement.fresh:
            return self._written(statement)
        form = self.coordinates.of_statement(statement).get(self.factor)
        if not statement.values or form is None:
            return None
        return self._value(statement.values[0], _Place(statement, form))  # if it runs at all

    def _written(self, statement: Statement) -> float | None:
        """What the statement writes past the end."""
        record = statement.tile_op
        if isinstance(record, tile_ops.Copy):
            return self._access(statement.reads[0])
        form = self.coordinates.of_statement(statement).get(self.factor)
        if not statement.values or form is None:
            return None
        place = _Place(statement, form)
        if any(self._truth(c, place) is not True for c in statement.conditions):
            return None
        return self._value(statement.values[0], place)

    def _access(self, access: Access) -> float | None:
        walks = self.coordinates.walks(access, self.factor)
        return self.content(self.coordinates.ranges.of(access)) if walks else None

    def content(self, live_range: LiveRange) -> float | None:
        if live_range.is_param:
            return None if live_range.buffer in self.safe else 0.0
        if live_range in self.active or not live_range.writes:
            return None
        self.active.add(live_range)
        values = {self._start(s) for s, _ in live_range.writes if s.op is None or s.fresh}
        value = values.pop() if len(values) == 1 else None
        kept = all(self._keeps(s, value) for s, _ in live_range.writes if s.op is not None and not s.fresh)
        self.active.discard(live_range)
        return value if kept else None

    def _start(self, statement: Statement) -> float | None:
        """What a statement that does not build on the buffer's content leaves there."""
        if not statement.fresh:
            return self._written(statement)
        value = self.contribution(statement)
        return value if statement.operation in ("max", "min") or value == _UNIT.get(statement.operation) else None

    def _keeps(self, statement: Statement, value: float | None) -> bool:
        """Whether an update leaves the value as it is."""
        if value is None:
            return False
        operand = self.contribution(statement)
        if statement.op == "prod" and self._annihilates(value, operand):
            return value == 0.0
        if statement.op in ("max", "min") and operand is not None:
            return (max if statement.op == "max" else min)(value, operand) == value
        return operand is not None and operand == _UNIT.get(statement.operation) and math.isfinite(value)

    def _value(self, expr: tirx.PrimExpr, place: _Place) -> float | None:
        constant = number(expr)
        if constant is not None:
            return constant
        if isinstance(expr, tirx.Cast):
            return self._value(expr.value, place)
        if isinstance(expr, tirx.BufferLoad):
            return self._load(expr, place)
        if isinstance(expr, tirx.Select):
            return self._choice(expr.condition, expr.true_value, expr.false_value, place)
        if isinstance(expr, tirx.Call) and isinstance(expr.op, ir.Op):
            return self._call(expr, place)
        if isinstance(expr, (tirx.Add, tirx.Sub, tirx.Mul, tirx.Max, tirx.Min)):
            a, b = self._value(expr.a, place), self._value(expr.b, place)
            if isinstance(expr, tirx.Mul) and self._annihilates(a, b):
                return 0.0
            return None if a is None or b is None else _fold(expr, a, b)
        return None

    def _call(self, expr: tirx.Call, place: _Place) -> float | None:
        if expr.op.name in ("tirx.if_then_else",):
            condition, then, otherwise = expr.args
            return self._choice(condition, then, otherwise, place)
        if expr.op.name in _FUNCTIONS:
            value = self._value(expr.args[0], place)
            return None if value is None else _apply(_FUNCTIONS[expr.op.name], value)
        return None

    def _annihilates(self, a: float | None, b: float | None) -> bool:
        """Whether a product is 0. 0 times infinity is not: past the end of the whole dim the kernel itself would have
        it, past the end of a tile what is not known may be anything."""
        if 0.0 not in (a, b):
            return False
        other = b if a == 0.0 else a
        return self.past_the_end if other is None else math.isfinite(other)

    def _load(self, load: tirx.BufferLoad, place: _Place) -> float | None:
        for access in place.statement.reads:
            if access.buffer.same_as(load.buffer) and all(
                a.same_as(b) for a, b in zip(access.indices, load.indices, strict=True)
            ):
                return self._access(access)
        return None

    def _choice(self, condition, then, otherwise, place: _Place) -> float | None:
        truth = self._truth(condition, place)
        if truth is not None:
            return self._value(then if truth else otherwise, place)
        values = {self._value(then, place), self._value(otherwise, place)}
        return values.pop() if len(values) == 1 else None

    def _truth(self, condition: tirx.PrimExpr, place: _Place) -> bool | None:
        """The condition's value past the end, if that is known."""
        if not self.past_the_end:
            return None
        analyzer = self.kernel.analyzer
        condition, bounds = with_bounds(condition)
        with analyzer.constraint_scope(functools.reduce(tirx.And, bounds, as_expr(place.form) >= self.factor.size)):
            if analyzer.can_prove(condition):
                return True
            return False if analyzer.can_prove(tirx.Not(condition)) else None


def _apply(function: Callable[[float], float], value: float) -> float | None:
    try:
        return function(value)
    except OverflowError:
        return math.inf


def _fold(expr: tirx.PrimExpr, a: float, b: float) -> float:
    if isinstance(expr, tirx.Add):
        return a + b
    if isinstance(expr, tirx.Sub):
        return a - b
    if isinstance(expr, tirx.Mul):
        return a * b
    return max(a, b) if isinstance(expr, tirx.Max) else min(a, b)
