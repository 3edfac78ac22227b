"""What the expressions in an iteration of a loop over blocks come to (`iterations`), in `state_values`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import reduce

from tvm import tirx

from mesh_tensor.base.dtypes import is_float
from mesh_tensor.tir.effects import chosen, op_name
from mesh_tensor.tir.linear import vars_of
from mesh_tensor.tir.nodes import loads
from mesh_tensor.tir.rewrite import number

from .coordinates import Coordinates, without_loads
from .factors import Factor
from .live_ranges import LiveRange
from .lowest_values import LowestValues
from .padding import ANYTHING, ZERO, Content, Padding
from .state_values import (
    Atom,
    Level,
    StateValue,
    constant,
    exponential,
    independent,
    inverse,
    logarithm,
    logarithm_of_power,
    maximum,
    moved,
    plus,
    times,
)
from .statements import Access, Kernel, Loop, Statement, is_load_of, lowest_or

#: An operation on values, and what it makes of what lies past the end.
_Binary = tuple[Callable[[StateValue, StateValue], StateValue | None], Callable[[float, float], float]]

_BINARY: dict[type, _Binary] = {
    tirx.Add: (plus, lambda a, b: a + b),
    tirx.Sub: (lambda a, b: _minus(a, b), lambda a, b: a - b),
    tirx.Mul: (times, lambda a, b: a * b),
    tirx.Max: (lambda a, b: largest(a, b), max),
}
_POWERS = {"tirx.exp": math.e, "tirx.exp2": 2.0, "tirx.exp10": 10.0}
_LOGARITHMS = {"tirx.log": math.e, "tirx.log2": 2.0, "tirx.log10": 10.0}
_MINUS_INFINITY = Content(-math.inf)


def negative(value: StateValue) -> StateValue | None:
    """The value with the other sign."""
    made = times(constant(-1.0), value)
    return None if made is None else made.past(value.padding.mapped(operator.neg))


def _minus(a: StateValue, b: StateValue) -> StateValue | None:
    other = negative(b)
    return None if other is None else plus(a, other)


def largest(a: StateValue, b: StateValue) -> StateValue | None:
    """The larger of the two."""
    if a.part is not None and b.part is not None:
        level = max(a.part.level, b.part.level)
        return None if level is Level.SUM else independent(level)
    return maximum((a, b))


class Expressions:
    """The expressions of the statements of one iteration of `loop`, as it goes along: `env` has the values of on-chip
    buffers. `ordered`, `guarded` as in `Iteration`; `is_after`: the statements are those after the loop."""

    ordered: bool
    is_after: bool
    kernel: Kernel
    coordinates: Coordinates
    factor: Factor
    loop: Loop
    env: dict[LiveRange, StateValue | None]
    guarded: dict[Statement, tuple[tirx.BufferLoad, ...]]
    _finite: list[Atom]
    _unproven: set[LiveRange]
    _lowest: LowestValues
    _padding: Padding
    _written: set[LiveRange]

    def _is_free(self, live_range: LiveRange) -> bool:
        """Whether what is there now depends on no earlier iteration, and is no sum of positions."""
        value = self.env.get(live_range)
        return value is not None and value.part is not None and value.part.level is not Level.SUM

    def loads_in(self, expr: tirx.PrimExpr) -> set[LiveRange]:
        """What an expression reads."""
        buffers = {load.buffer for load in self._all_loads(expr)}
        return {r for r in self.coordinates.ranges.all if r.buffer in buffers}

    def _all_loads(self, expr: tirx.PrimExpr) -> list[tirx.BufferLoad]:
        """What an expression loads, or its variables were bound to."""
        found, binds = loads(expr), self.kernel.binds
        bound = [v for v in tirx.analysis.undefined_vars(expr) if v in binds] if isinstance(expr, tirx.PrimExpr) else []
        return [*found, *(load for var in bound for load in self._all_loads(binds[var]))]

    def _expr(self, expr: tirx.PrimExpr, statement: Statement) -> StateValue | None:
        known = number(expr)
        if known is not None:
            return constant(float(known))
        if isinstance(expr, tirx.BufferLoad):
            return self._load(self._access(expr, statement)) or self._looked_up(expr, statement)
        if isinstance(expr, tirx.Var) and self.keeps_its_value(expr):
            return self._expr(self.kernel.binds[expr], statement)
        if isinstance(expr, tirx.Cast) and is_float(expr.dtype):
            return self._expr(expr.value, statement)
        name = op_name(expr)
        if type(expr) in _BINARY:
            return self._binary(expr, statement)
        if name in _POWERS:
            return self._power(expr, statement, _POWERS[name])
        if name in _LOGARITHMS:
            inside = self._expr(expr.args[0], statement)
            if inside is not None and inside.part is None:
                of_power = logarithm_of_power(inside, _LOGARITHMS[name]) if self.is_after else None
                return of_power or logarithm(inside, _LOGARITHMS[name])
        if isinstance(expr, tirx.Div):
            return self._quotient(expr, statement)
        return self._stood_in_for(expr, statement) or self._kept(expr, statement) or self._independent(expr, statement)

    def _looked_up(self, load: tirx.BufferLoad, statement: Statement) -> StateValue | None:
        """What is loaded of a parameter that nothing writes, at places that data say: as they do, for every position or
        for all of them. None where the place is made of anything else that says which iteration it is."""
        places = [place for index in load.indices for place in self._all_loads(index)]
        if not places or not self.kernel.keeps(load.buffer):
            return None
        if vars_of([without_loads(index) for index in load.indices], self.kernel.binds) & self._moving:
            return None
        if any(self.kernel.is_param(place.buffer) and not self.kernel.keeps(place.buffer) for place in places):
            return None
        values = [self._load(self._access(place, statement)) for place in places]
        parts = [None if value is None else value.part for value in values]
        levels = [part.level for part in parts if part is not None]
        return independent(max(levels)) if len(levels) == len(parts) and Level.SUM not in levels else None

    def _stood_in_for(self, expr: tirx.PrimExpr, statement: Statement) -> StateValue | None:
        """A choice for where a running maximum is still the lowest value, so that nothing counts yet: a number in place
        of the maximum, or 0 in place of a power that it takes down. None if it is anything else."""
        load, number_there, elsewhere = lowest_or(expr) or (None, None, None)
        held = None if load is None else self._load(self._access(load, statement))
        atom = None if held is None else held.atom
        if atom is None or not is_running(atom) or number_there is None or not math.isfinite(number_there):
            return None
        self._finite.append(atom)
        value = self._expr(elsewhere, statement)
        self._finite.pop()
        if value is not None and value.atom == atom:
            return replace(value, is_finite=True)
        if value is None or number_there != 0 or value.atoms or value.log is not None or len(value.terms) != 1:
            return None
        (((exponent, carried), _),) = value.terms.items()
        own = carried is None and any(of == atom for of, _ in exponent)
        return value.past(value.padding if value.padding == ZERO else ANYTHING) if own else None

    def _kept(self, expr: tirx.PrimExpr, statement: Statement) -> StateValue | None:
        """What is kept where a condition that depends on no earlier iteration says so, and 0 elsewhere: that, times
        1 or 0. None if it is anything else, or depends on no earlier iteration itself."""
        condition, *values = chosen(expr) or [None]
        known = [self._expr(value, statement) for value in values]
        kept = [value for value in known if value is not None and value.number != 0]
        if len(kept) != 1 or None in known or kept[0].part is not None:
            return None
        says = self._independent(condition, statement)
        made = None if says is None else times(says, kept[0])
        return None if made is None else made.past(self._chosen(expr, statement))

    def keeps_its_value(self, var: tirx.Var) -> bool:
        """Whether a variable was bound to loads of what nothing here writes, directly or by way of others: they are the
        same where it is used."""
        found = self._all_loads(self.kernel.binds[var]) if var in self.kernel.binds else []
        written = [live_range.buffer for live_range in self._written]
        return bool(found) and not any(load.buffer.same_as(buffer) for load in found for buffer in written)

    def _binary(self, expr: tirx.PrimExpr, statement: Statement) -> StateValue | None:
        a, b = self._expr(expr.a, statement), self._expr(expr.b, statement)
        if a is None or b is None:
            return None
        operation, function = _BINARY[type(expr)]
        made = operation(a, b)
        if made is None:
            return None
        if isinstance(expr, tirx.Mul):
            return made.past(product_past(a.padding, b.padding))
        if a.padding == _MINUS_INFINITY and b.atoms and b.log is None and not isinstance(expr, tirx.Max):
            return made.past(_MINUS_INFINITY)  # nothing is a maximum of infinity without being NaN everywhere
        return made.past(a.padding.mapped(function, b.padding))

    def _power(self, expr: tirx.Call, statement: Statement, base: float) -> StateValue | None:
        inside = self._expr(expr.args[0], statement)
        if inside is None:
            return None
        made = exponential(inside, base)
        if made is None:
            return None
        if inside.atoms and not self._guard(expr.args[0], inside, statement):
            return None
        self._unproven |= self._may_count(expr.args[0], inside, statement)
        return made.past(inside.padding.mapped(lambda x: 0.0 if x == -math.inf else base**x))

    def _guard(self, expr: tirx.PrimExpr, inside: StateValue, statement: Statement) -> bool:
        """Note the loads of atoms that a power takes down: where those are the lowest value, nothing counts yet. False
        where they are not loaded as they are."""
        down = {atom for atom, rate in inside.atoms.items() if rate < 0}
        for load in loads(expr):
            value = self._load(self._access(load, statement))
            if value is None or (value.atoms and value.atom is None):
                return False
            if value.atom is None or value.is_finite or any(map(value.atom.is_at_least, self._finite)):
                continue
            if value.atom in down and is_running(value.atom) and not is_bounded(value.atom):
                self.guarded[statement] = (*self.guarded.get(statement, ()), load)
        return True

    def _may_count(self, expr: tirx.PrimExpr, inside: StateValue, statement: Statement) -> set[LiveRange]:
        """The maxima that a power takes down of which it may be more than nothing where they are the lowest value: it
        is no power of what they are of, nor of what they were before."""
        running = {a: rate for a, rate in inside.atoms.items() if is_running(a) and not is_bounded(a)}
        before = {a.key for a, rate in running.items() if rate > 0}
        return {
            key[1]
            for atom, rate in running.items()
            if rate < 0 and not before & atom.keys and not self._lowest.come_with(expr, statement, atom)
            for key in atom.keys
            if key[0] == "before"
        }

    def _quotient(self, expr: tirx.Div, statement: Statement) -> StateValue | None:
        a, b = self._expr(expr.a, statement), self._expr(expr.b, statement)
        over = None if b is None or not self.is_after else inverse(b)
        if a is not None and over is not None:
            return times(a, over)
        if a is None or b is None or b.part is None or b.part.level is not Level.FIXED:
            return self._independent(expr, statement)
        by = constant(1 / b.number) if b.number else independent(Level.FIXED)
        made = times(a, by)
        return None if made is None else made.past(a.padding.mapped(lambda x, y: x / y if y else math.nan, b.padding))

    def _independent(self, expr: tirx.PrimExpr, statement: Statement) -> StateValue | None:
        """A function of what depends on no earlier iteration."""
        level = Level.POINT if vars_of([expr], self.kernel.binds) & self._moving else Level.FIXED
        binds = self.kernel.binds
        bound = [n for n in vars_of([expr], {}) if n in binds and self._all_loads(binds[n])]
        if not all(map(self.keeps_its_value, bound)):
            return None
        for load in self._all_loads(expr):
            value = self._load(self._access(load, statement))
            part = None if value is None else value.part
            if part is None or part.level is Level.SUM:
                return None
            level = max(level, part.level)
        return independent(level, self._chosen(expr, statement))

    def _chosen(self, expr: tirx.PrimExpr, statement: Statement) -> Content:
        """What an expression is past the end, if its conditions say so."""
        choice = chosen(expr)
        if choice is None:
            return ANYTHING
        condition, then, otherwise = choice
        truth = self._padding.truth(condition, statement)
        values = [
            self._expr(e, statement) for e, wanted in ((then, True), (otherwise, False)) if truth is not (not wanted)
        ]
        return reduce(Content.join, [ANYTHING if value is None else value.padding for value in values])

    @property
    def _moving(self) -> set[tirx.Var]:
        """The variables that say where along the factor an iteration is."""
        return {*self.factor.roles, self.loop.var}

    def _access(self, load: tirx.BufferLoad, statement: Statement) -> Access:
        return next(access for access in statement.reads if is_load_of(load, access))

    def _load(self, access: Access) -> StateValue | None:
        live_range = self.coordinates.ranges.of(access)
        forms = [form for form in access.forms if form is not None]
        if live_range in self.env:
            value = self.env[live_range]
            if self.ordered and self._is_free(live_range) and not any(map(self._all_loads, access.indices)):
                return value
            complete = value is not None and len(forms) == len(access.forms)
            return moved(value, forms) if complete and value is not None else None
        if live_range in self._written:
            if live_range.is_param or self.loop.var not in live_range.carried or len(forms) < len(access.forms):
                return None
            return StateValue({Atom.make(("before", live_range), forms): 1.0})
        if any(map(self._all_loads, access.indices)):
            return None
        if self.coordinates.walks(access, self.factor):
            return independent(Level.POINT, self._padding.content(live_range))
        moves = vars_of(access.indices, self.kernel.binds) & self._moving
        if moves and not self.ordered:
            return None
        return independent(Level.POINT if moves else Level.FIXED)


def is_running(atom: Atom) -> bool:
    """Whether the atom is what an earlier iteration left, or the maximum of that and more."""
    return any(key[0] == "before" for key in atom.keys)


def is_bounded(atom: Atom) -> bool:
    """Whether the atom is a maximum of some finite constant, too."""
    return any(key[0] == "fixed" and key[1] is not None and math.isfinite(key[1]) for key in atom.keys)


def product_past(a: Content, b: Content) -> Content:
    """Past the end of the dim, 0 times what is not known is what the kernel itself has there."""
    return ZERO if ZERO in (a, b) else a.mapped(lambda x, y: x * y, b)
