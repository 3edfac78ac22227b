"""What a kernel computes past a dim's end.

T.copy reads 0 there. Whether that counts depends on what follows: nothing is added by `0 * 0`, but `exp(0)` is 1 and a
maximum sees the 0. This module evaluates statements at such a position, with constants only.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from tvm import ir, tirx

from mesh_tensor.base.dtypes import extreme, is_float, numpy_dtype
from mesh_tensor.base.reductions import neutral, reduction
from mesh_tensor.tir import tile_ops
from mesh_tensor.tir.effects import chosen
from mesh_tensor.tir.linear import Linear, as_expr
from mesh_tensor.tir.rewrite import number
from mesh_tensor.tir.tile_position import with_bounds

from .coordinates import Coordinates
from .factors import Factor, goes_beyond
from .live_ranges import LiveRange
from .reaching import Reaching
from .statements import Access, Kernel, Statement
from .supported import safe_buffers


def _or_infinite(function: Callable[[float], float], value: float) -> float:
    try:
        return function(value)
    except OverflowError:
        return math.inf


def _or_no_number(function: Callable[[float, float], float], a: float, b: float) -> float:
    """Python's `max` and `min` leave out what is no number, in one of the two places."""
    return math.nan if math.isnan(a) or math.isnan(b) else function(a, b)


_MAX, _MIN = partial(_or_no_number, max), partial(_or_no_number, min)
_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "tirx.exp": partial(_or_infinite, math.exp),
    "tirx.exp2": partial(_or_infinite, lambda v: 2.0**v),
    "tirx.tanh": math.tanh,
    "tirx.fabs": abs,
}
_ARITHMETIC: dict[type, Callable[[float, float], float]] = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.Max: _MAX,
    tirx.Min: _MIN,
}


@dataclass(frozen=True)
class Content:
    """What is known of the elements at a position: all are one `number`, or (None) they may be anything.

    A lattice of two levels: `join` is what is known where one or the other may hold."""

    number: float | None

    def join(self, other: Content) -> Content:
        return self if self == other else ANYTHING

    def mapped(self, function: Callable[..., float], *others: Content) -> Content:
        """What a function makes of it, and of others, if all are known."""
        numbers = [content.number for content in (self, *others)]
        known = [number for number in numbers if number is not None]
        return Content(function(*known)) if len(known) == len(numbers) else ANYTHING

    def held_in(self, dtype: str) -> Content:
        """What a dtype keeps of it: floats round, those without infinities are the largest at most, and what is no
        number of an integer type may be anything there."""
        if self.number is None:
            return self
        low, high = extreme(dtype, -1), extreme(dtype, 1)
        if is_float(dtype):
            with np.errstate(all="ignore"):
                return Content(float(numpy_dtype(dtype).type(min(max(self.number, low), high))))
        inside = low <= self.number <= high
        return self if inside and self.number == int(self.number) else ANYTHING

    @property
    def is_finite(self) -> bool:
        return self.number is not None and math.isfinite(self.number)


ANYTHING: Content = Content(None)
ZERO = Content(0.0)

#: What leaves every finite number as it is.
_UNIT = {"sum": ZERO, "prod": Content(1.0)}


def takes_whole_blocks(kernel: Kernel, factor: Factor) -> bool:
    """Whether blocks divide the dim, so that nothing reaches past its end."""
    if any(_reaches_past(kernel, factor, var, step) for var, step in factor.roles.items()):
        return False
    return kernel.analyzer.can_prove_equal(tirx.floormod(factor.size, factor.block), 0)


def _reaches_past(kernel: Kernel, factor: Factor, var: tirx.Var, step: int) -> bool:
    """A loop that goes on behind the dim, or a single one over the whole dim of which that is not known."""
    extent = kernel.loops[var].extent if var in kernel.loops else None
    if extent is None or goes_beyond(extent, step, factor.size):
        return extent is not None
    return factor.block == 1 and not kernel.analyzer.can_prove(extent <= factor.size)


def has_blocks_beyond(kernel: Kernel, factor: Factor) -> bool:
    """Whether loops take whole blocks that lie behind the dim's end."""
    blocks = tirx.floordiv(factor.size + (factor.block - 1), factor.block) * factor.block
    size = kernel.analyzer.simplify(blocks)
    return any(
        var in kernel.loops and goes_beyond(kernel.loops[var].extent, step, size) for var, step in factor.roles.items()
    )


def padding_is_neutral(
    statement: Statement, kernel: Kernel, coordinates: Coordinates, factor: Factor, *, past_the_end: bool
) -> bool:
    """Whether what an update combines outside its buffers is its operation's neutral element.

    `past_the_end`: outside the whole dim, where the kernel's own bounds tests fail; else past the end of some tile,
    where nothing is known of them."""
    padding = Padding(kernel, coordinates, factor, past_the_end)
    if padding.is_skipped(statement):
        return True
    record = statement.tile_op  # 0 is neutral for absmax, not for max
    op = statement.operation if record is None else str(record.reduction)
    return padding.contribution(statement) == Content(neutral(op, statement.target.buffer.dtype))


def content_past_the_end(live_range: LiveRange, kernel: Kernel, coordinates: Coordinates, factor: Factor) -> Content:
    """What an on-chip buffer holds past the end of the factor's dim."""
    return Padding(kernel, coordinates, factor, past_the_end=True).content(live_range)


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


class Padding:
    """What statements and buffers have at a position outside."""

    def __init__(self, kernel: Kernel, coordinates: Coordinates, factor: Factor, past_the_end: bool):
        self.kernel, self.coordinates, self.factor, self.past_the_end = kernel, coordinates, factor, past_the_end
        self.active: set[tuple[LiveRange, tuple[Statement, ...]]] = set()
        self.reaching = Reaching(kernel)
        self.safe = safe_buffers(kernel.params.values(), kernel.root)

    def is_skipped(self, statement: Statement) -> bool:
        """Whether a condition keeps the statement from running past the end."""
        form = self.coordinates.of_statement(statement).get(self.factor)
        return form is not None and any(self._truth(c, _Place(statement, form)) is False for c in statement.conditions)

    def contribution(self, statement: Statement) -> Content:
        """What an update combines past the end, should it run there."""
        record = statement.tile_op
        if record is not None and record.reduction is not None and record.sources:
            content, *factors = (self._access(access, statement) for access in statement.reads[: len(record.sources)])
            if record.product:
                return ZERO if self._annihilates(content, *factors) else ANYTHING
            return content.mapped(abs) if reduction(record.reduction).magnitudes else content
        if statement.op is None or statement.fresh:
            return self._written(statement)
        form = self.coordinates.of_statement(statement).get(self.factor)
        if not statement.values or form is None:
            return ANYTHING
        return self._value(statement.values[0], _Place(statement, form))  # if it runs at all

    def _written(self, statement: Statement) -> Content:
        record = statement.tile_op
        if isinstance(record, tile_ops.Copy):
            return self._access(statement.reads[0], statement)
        form = self.coordinates.of_statement(statement).get(self.factor)
        if not statement.values or form is None:
            return ANYTHING
        place = _Place(statement, form)
        if any(self._truth(c, place) is not True for c in statement.conditions):
            return ANYTHING
        return self._value(statement.values[0], place)

    def _access(self, access: Access, reader: Statement) -> Content:
        walks = self.coordinates.walks(access, self.factor)
        return self.content(self.coordinates.ranges.of(access), reader) if walks else ANYTHING

    def truth(self, condition: tirx.PrimExpr, statement: Statement) -> bool | None:
        """A condition's value where a statement is past the end, if that is known."""
        form = self.coordinates.of_statement(statement).get(self.factor)
        return None if form is None else self._truth(condition, _Place(statement, form))

    def content(self, live_range: LiveRange, reader: Statement | None = None) -> Content:
        """What an on-chip buffer, or a parameter, has there; where a statement reads it, or anywhere."""
        if live_range.is_param:
            return ANYTHING if live_range.buffer in self.safe else ZERO
        writes = [s for s in self.reaching.writes(live_range, reader) if not self.is_skipped(s)]
        starts = [s for s in writes if s.op is None or s.fresh]
        asked = live_range, tuple(writes)
        if asked in self.active or not starts:
            return ANYTHING
        self.active.add(asked)
        content = functools.reduce(Content.join, map(self._start, starts))
        kept = all(self._keeps(s, content) for s in writes if s.op is not None and not s.fresh)
        self.active.discard(asked)
        return content.held_in(live_range.buffer.dtype) if kept else ANYTHING

    def _start(self, statement: Statement) -> Content:
        """What a statement that does not build on the buffer's content leaves there."""
        if not statement.fresh:
            return self._written(statement)
        content = self.contribution(statement)
        return (
            content if statement.operation in ("max", "min") or content == _UNIT.get(statement.operation) else ANYTHING
        )

    def _keeps(self, statement: Statement, content: Content) -> bool:
        """Whether an update leaves the content as it is."""
        if content == ANYTHING:
            return False
        operand = self.contribution(statement)
        if statement.op == "prod" and self._annihilates(content, operand):
            return content == ZERO
        if statement.op in ("max", "min") and operand != ANYTHING:
            return content.mapped(_MAX if statement.op == "max" else _MIN, operand) == content
        return operand == _UNIT.get(statement.operation) and content.is_finite

    def _value(self, expr: tirx.PrimExpr, place: _Place) -> Content:
        content = self._computed(expr, place)
        return content.held_in(expr.dtype) if isinstance(expr, tirx.PrimExpr) else content

    def _computed(self, expr: tirx.PrimExpr, place: _Place) -> Content:
        constant = number(expr)
        if constant is not None:
            return Content(constant)
        if isinstance(expr, tirx.Cast):
            return self._value(expr.value, place)
        if isinstance(expr, tirx.BufferLoad):
            return self._load(expr, place)
        if (choice := chosen(expr)) is not None:
            return self._choice(choice, place)
        if isinstance(expr, tirx.Call) and isinstance(expr.op, ir.Op):
            return self._call(expr, place)
        if type(expr) in _ARITHMETIC:
            a, b = self._value(expr.a, place), self._value(expr.b, place)
            if isinstance(expr, tirx.Mul) and self._annihilates(a, b):
                return ZERO
            return a.mapped(_ARITHMETIC[type(expr)], b)
        return ANYTHING

    def _call(self, expr: tirx.Call, place: _Place) -> Content:
        if expr.op.name in _FUNCTIONS:
            return self._value(expr.args[0], place).mapped(_FUNCTIONS[expr.op.name])
        return ANYTHING

    def _annihilates(self, a: Content, b: Content) -> bool:
        """Whether a product is 0. 0 times infinity is not: past the end of the whole dim the kernel itself would have
        it, past the end of a tile what is not known may be anything."""
        if ZERO not in (a, b):
            return False
        other = b if a == ZERO else a
        return self.past_the_end if other == ANYTHING else other.is_finite

    def _load(self, load: tirx.BufferLoad, place: _Place) -> Content:
        for access in place.statement.reads:
            if access.buffer.same_as(load.buffer) and all(
                a.same_as(b) for a, b in zip(access.indices, load.indices, strict=True)
            ):
                return self._access(access, place.statement)
        return ANYTHING

    def _choice(self, choice: list[tirx.PrimExpr], place: _Place) -> Content:
        condition, then, otherwise = choice
        truth = self._truth(condition, place)
        if truth is not None:
            return self._value(then if truth else otherwise, place)
        return self._value(then, place).join(self._value(otherwise, place))

    def _truth(self, condition: tirx.PrimExpr, place: _Place) -> bool | None:
        """The condition's value past the end, if that is known."""
        analyzer = self.kernel.analyzer
        if not self.past_the_end:
            return None
        condition, bounds = with_bounds(condition)
        outside = functools.reduce(tirx.And, bounds, as_expr(place.form) >= self.factor.size)
        with analyzer.constraint_scope(place.statement.ranges), analyzer.constraint_scope(outside):
            if analyzer.can_prove(condition):
                return True
            return False if analyzer.can_prove(tirx.Not(condition)) else None
