"""Whether an exponent is the lowest value, or NaN, wherever the maximum that is taken from it is the lowest value.

A device may find nothing that counts in a row of its own tile, where others do. What it adds to a sum there has to be
nothing, as it would be relative to the maximum of all: so what is added has to be a power of what the maximum is of,
and not of something else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.base.dtypes import is_float
from mesh_tensor.tir.effects import chosen
from mesh_tensor.tir.linear import Linear
from mesh_tensor.tir.rewrite import number
from mesh_tensor.tir.tile_ops import Reduce

from .coordinates import Coordinates
from .live_ranges import LiveRange
from .state_values import Atom
from .statements import Access, Kernel, Loop, Statement, is_load_of


@dataclass(frozen=True, eq=False)
class _Element:
    """An element in terms of the loops around its use. `content`: the live range, and which of its writes it comes
    from, by the place among the statements, -1 before all of them; or a variable that is bound to it."""

    content: tuple[object, object]
    forms: tuple[Linear, ...]


class LowestValues:
    """Of the statements of one iteration, in their order."""

    def __init__(self, kernel: Kernel, coordinates: Coordinates, body: Sequence[Statement]):
        self._kernel, self._ranges, self._body = kernel, coordinates.ranges, body
        self._at = {statement: place for place, statement in enumerate(body)}

    def come_with(self, exponent: tirx.PrimExpr, statement: Statement, maximum: Atom) -> bool:
        """Whether the exponent is the lowest value, or NaN, wherever the maximum is."""
        blocks = [key[1] for key in maximum.keys if key[0] == "block"]
        elements = self._elements(exponent, statement)
        if elements is None:
            return True
        return any(self._counts_in(e, statement, block, maximum) for e in elements for block in blocks)

    def _elements(self, expr: tirx.PrimExpr, statement: Statement) -> list[_Element] | None:
        """Elements each of which being the lowest value makes the expression that, or NaN; None if it always is."""
        if number(expr) == -math.inf:
            return None
        if isinstance(expr, tirx.BufferLoad):
            access = next(access for access in statement.reads if is_load_of(expr, access))
            content, forms = self._content(access, statement), [f for f in access.forms if f is not None]
            known = content is not None and len(forms) == len(access.forms)
            return [_Element(content, tuple(forms))] if known and content is not None else []
        if isinstance(expr, tirx.Var):
            return [_Element(("bound", expr), ())]
        if isinstance(expr, tirx.Cast) and is_float(expr.dtype) and is_float(expr.value.dtype):
            return self._elements(expr.value, statement)
        if isinstance(expr, tirx.Sub):
            return self._elements(expr.a, statement)
        if isinstance(expr, tirx.Add):
            sides = [self._elements(side, statement) for side in (expr.a, expr.b)]
            return None if None in sides else [element for side in sides for element in side or []]
        if isinstance(expr, tirx.Mul):
            for side, by in ((expr.a, number(expr.b)), (expr.b, number(expr.a))):
                if by is not None and 0 < by < math.inf:
                    return self._elements(side, statement)
        choice = chosen(expr)
        return [] if choice is None else self._of_either(*(self._elements(e, statement) for e in choice[1:]))

    def _of_either(self, a: list[_Element] | None, b: list[_Element] | None) -> list[_Element] | None:
        if a is None or b is None:
            return b if a is None else a
        return [x for x in a if any(x.content == y.content and _same_forms(x.forms, y.forms) for y in b)]

    def _content(self, access: Access, statement: Statement) -> tuple[LiveRange, int] | None:
        """What is read, None if that may change in the middle of it."""
        live_range = self._ranges.of(access)
        if live_range.is_param and not self._kernel.keeps(live_range.buffer):
            return None
        at = self._at[statement]
        before = [self._at[s] for s, _ in live_range.writes if self._at.get(s, at) < at]
        return live_range, max(before, default=-1)

    def _counts_in(self, element: _Element, statement: Statement, block: Statement, maximum: Atom) -> bool:
        """Whether the element is one of those that a block's maximum, at the row that is taken, is of."""
        operand = _operand(block)
        if isinstance(operand, tirx.Var) or operand is None:
            return operand is not None and element.content == ("bound", operand)
        places = _places(block.target, maximum.place) if len(block.target.forms) == len(maximum.place) else None
        if places is None or self._content(operand, block) != element.content:
            return False
        return all(
            of is not None and _is_within(form, of, places, statement, block)
            for form, of in zip(element.forms, operand.forms, strict=True)
        )


def _operand(block: Statement) -> Access | tirx.Var | None:
    """The elements that a statement takes the maximum of, or a variable, up to a positive number that they are
    times."""
    if isinstance(block.tile_op, Reduce):
        return block.reads[0]
    expr = block.values[0] if block.values and block.tile_op is None else None
    while isinstance(expr, (tirx.Mul, tirx.Cast)):
        if isinstance(expr, tirx.Cast):
            if not is_float(expr.dtype) or not is_float(expr.value.dtype):
                return None
            expr = expr.value
            continue
        by = [number(side) for side in (expr.a, expr.b)]
        if not any(n is not None and 0 < n < math.inf for n in by):
            return None
        expr = expr.a if by[1] is not None else expr.b
    if isinstance(expr, tirx.Var):
        return expr
    return next((a for a in block.reads if is_load_of(expr, a)), None) if isinstance(expr, tirx.BufferLoad) else None


def _places(target: Access, forms: Sequence[Linear]) -> dict[tirx.Var, Linear] | None:
    """What the variables that index a target are where it is read; None if they do not say that."""
    places: dict[tirx.Var, Linear] = {}
    for own, form in zip(target.forms, forms, strict=True):
        if own is None:
            return None
        if not own.terms and not form.terms and own.const == form.const:
            continue
        if own.variable is None or own.variable in places:
            return None
        places[own.variable] = form
    return places


def _moved(form: Linear, places: Mapping[tirx.Var, Linear], statement: Statement) -> Linear | None:
    """A form with other forms in its variables' places; None if it has one that is not there."""
    total = Linear({}, form.const)
    for var, coefficient in form.terms.items():
        if var not in places and var not in statement.vars:
            return None
        total = total + places.get(var, Linear({var: 1})).scaled(coefficient)
    return total


def _is_within(
    form: Linear, of: Linear, places: Mapping[tirx.Var, Linear], statement: Statement, block: Statement
) -> bool:
    """Whether the place is one of those that a block's statement goes through for one element of its target."""
    walked = {x.var: x for x in block.loops if x.var in of.terms and x.var not in places and x not in statement.loops}
    known = Linear({v: c for v, c in of.terms.items() if v not in walked}, of.const)
    at = _moved(known, places, statement)
    if at is None or len(walked) > 1:
        return False
    rest = form - at
    if not walked:
        return rest.same_as(Linear({}))
    ((var, loop),) = walked.items()
    own = next((x for x in statement.loops if x.var in rest.terms), None)
    step = of.terms[var]
    if own is None:
        return not rest.terms and _goes_through(loop, rest.const, step)
    return rest.same_as(Linear({own.var: step})) and _same_range(own, loop)


def _goes_through(loop: Loop, place: int, step: int) -> bool:
    first, extent = number(loop.min), number(loop.extent)
    return first is not None and extent is not None and place % step == 0 and first <= place // step < first + extent


def _same_range(a: Loop, b: Loop) -> bool:
    ends = (a.min, b.min), (a.extent, b.extent)
    return all(x.same_as(y) or (number(x) is not None and number(x) == number(y)) for x, y in ends)


def _same_forms(a: Sequence[Linear], b: Sequence[Linear]) -> bool:
    return len(a) == len(b) and all(x.same_as(y) for x, y in zip(a, b, strict=True))
