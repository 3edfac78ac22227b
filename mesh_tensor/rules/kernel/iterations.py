"""One iteration of a loop over blocks, followed statement by statement in `state_values`.

What is not understood is `None` and stays so; whoever asks decides whether it matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce

from tvm import tirx

from mesh_tensor.base.reductions import neutral
from mesh_tensor.tir.effects import op_name
from mesh_tensor.tir.linear import vars_of
from mesh_tensor.tir.nodes import loads
from mesh_tensor.tir.rewrite import number
from mesh_tensor.tir.tile_ops import Copy, Gemm, Reduce

from .coordinates import Coordinates
from .factors import Factor, why_not_covered
from .live_ranges import LiveRange
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
    stored,
    times,
)
from .statements import Access, Kernel, Loop, Statement, is_load_of

#: An operation on values, and what it makes of what lies past the end.
_Binary = tuple[Callable[[StateValue, StateValue], StateValue | None], Callable[[float, float], float]]

_BINARY: dict[type, _Binary] = {
    tirx.Add: (plus, lambda a, b: a + b),
    tirx.Sub: (lambda a, b: _minus(a, b), lambda a, b: a - b),
    tirx.Mul: (times, lambda a, b: a * b),
    tirx.Max: (lambda a, b: _largest(a, b), max),
}
_POWERS = {"tirx.exp": math.e, "tirx.exp2": 2.0, "tirx.exp10": 10.0}
_LOGARITHMS = {"tirx.log": math.e, "tirx.log2": 2.0, "tirx.log10": 10.0}
_MINUS_INFINITY = Content(-math.inf)


def _minus(a: StateValue, b: StateValue) -> StateValue | None:
    negative = times(constant(-1.0), b)
    return None if negative is None else plus(a, negative)


def _largest(a: StateValue, b: StateValue) -> StateValue | None:
    if a.part is not None and b.part is not None:
        level = max(a.part.level, b.part.level)
        return None if level is Level.SUM else independent(level)
    return maximum((a, b))


class Iteration:
    """What the statements of one iteration of `loop` leave.

    `by_position`: each is one position of the factor. `ordered`: iterations run in order and in whole blocks, so
    that it does not matter what belongs to which position. `env`: the values of on-chip buffers. `depends`:
    statements whose value depends on earlier iterations, or that add up positions; `adds`: of those that combine
    positions, whether what lies past the dim's end changes nothing. `common`: the conditions that all of them have.
    `uses`: what statements read that may depend on earlier iterations. `guarded`: loads of running maxima that
    powers take down. With `named`, maxima that are taken anew at every position, and are carried to the next, are
    atoms, too. With `left`, what the loop leaves, it is the statements after the loop that are followed."""

    def __init__(
        self,
        kernel: Kernel,
        coordinates: Coordinates,
        factor: Factor,
        loop: Loop,
        *,
        ordered: bool = False,
        named: bool = False,
        left: Mapping[LiveRange, StateValue] | None = None,
    ):
        self.ordered, self.named, self.is_after = ordered, named, left is not None
        self.kernel, self.coordinates, self.factor, self.loop = kernel, coordinates, factor, loop
        self.body = [s for s in kernel.statements if loop.var in s.vars]
        self.by_position = factor.roles.keys() & {x.var for s in self.body for x in s.loops} == {loop.var}
        self.env: dict[LiveRange, StateValue | None] = {}
        self._inner = {x.var for s in self.body for x in s.loops[s.loops.index(loop) + 1 :]}
        if left is not None:
            self.body = [s for s in kernel.statements if s.top > self.body[0].top]
            self.env |= left
            self._inner = {x.var for s in self.body for x in s.loops if x.kind != "grid"}
        self.depends: set[Statement] = set()
        self.uses: dict[Statement, dict[LiveRange, None]] = {}
        self.adds: dict[Statement, bool] = {}
        self.guarded: dict[Statement, tuple[tirx.BufferLoad, ...]] = {}
        self._padding = Padding(kernel, coordinates, factor, past_the_end=True)
        self._written = {coordinates.ranges.of(s.write) for s in self.body if s.write is not None}
        self._mixed = set(self._out_of_step())
        self.common = _shared_conditions(self.body)
        for statement in self.body:
            self._run(statement)

    def value(self, live_range: LiveRange) -> StateValue | None:
        """What a live range holds in the end, in terms of its dims."""
        return self.env.get(live_range)

    def runs_alike(self, statement: Statement) -> bool:
        """Whether the statement runs, and how often, whatever earlier iterations left."""
        used, exprs = self.uses.get(statement, {}), [*statement.conditions, *statement.bounds]
        ranges = [
            self.coordinates.ranges.of(self._access(load, statement)) for e in exprs for load in self._all_loads(e)
        ]
        return not any(live_range in used for live_range in ranges)

    def loads_in(self, expr: tirx.PrimExpr) -> set[LiveRange]:
        """What an expression reads."""
        buffers = {load.buffer for load in self._all_loads(expr)}
        return {r for r in self.coordinates.ranges.all if r.buffer in buffers}

    def _all_loads(self, expr: tirx.PrimExpr) -> list[tirx.BufferLoad]:
        """What an expression loads, or its variables were bound to."""
        found, binds = loads(expr), self.kernel.binds
        bound = [v for v in tirx.analysis.undefined_vars(expr) if v in binds] if isinstance(expr, tirx.PrimExpr) else []
        return [*found, *(load for var in bound for load in self._all_loads(binds[var]))]

    # -- statements ----------------------------------------------------------------------------------------------------

    def _run(self, statement: Statement) -> None:
        builds = statement.op is not None and not statement.fresh and statement.write is not None
        for access in (*statement.reads, *([statement.target] if builds else [])):
            live_range = self.coordinates.ranges.of(access)
            known = live_range in self._written or live_range in self.env
            if not live_range.is_param and known and not self._is_free(live_range):
                self.uses.setdefault(statement, {})[live_range] = None
        if statement.write is None or self.coordinates.ranges.of(statement.write).is_param:
            return
        target = self.coordinates.ranges.of(statement.write)
        value = None if self.leaves_some(statement) or target in self._mixed else self._made(statement)
        if value is not None and self._is_named(value, statement, target):
            value = _block_maximum(statement)
        left = None if value is None else stored(value, statement.target.forms)
        if statement.conditions != self.common:
            left = self._either(left, statement, target)
        self.env[target] = left
        if left is not None and not self._is_free(target):
            self.depends.add(statement)

    def _is_named(self, value: StateValue, statement: Statement, target: LiveRange) -> bool:
        own = self.named and self.by_position and statement.op == "max" and _is_point(value)
        return own and self.loop.var in target.carried

    def _either(self, left: StateValue | None, statement: Statement, target: LiveRange) -> StateValue | None:
        """What is there after a statement that may not have run."""
        before = self.env.get(target, self._load(statement.target))
        parts = [None if value is None else value.part for value in (before, left)]
        levels = [part.level for part in parts if part is not None]
        return independent(max(levels)) if len(levels) == 2 and max(levels) is not Level.SUM else None

    def _is_free(self, live_range: LiveRange) -> bool:
        """Whether what is there now depends on no earlier iteration, and is no sum of positions."""
        value = self.env.get(live_range)
        return value is not None and value.part is not None and value.part.level is not Level.SUM

    def leaves_some(self, statement: Statement) -> bool:
        """Whether the statement, where it runs, leaves some of its target as it was, or is not understood."""
        write = statement.target
        if statement.unknown or statement.may_be_skipped:
            return True
        seen: set[tirx.Var] = set()
        for form, size in zip(write.forms, write.buffer.shape, strict=True):
            if form is None or form.terms.keys() & seen:
                return True
            seen |= form.terms.keys()
            is_all = not form.terms and not form.const and self.kernel.analyzer.can_prove_equal(size, 1)
            if not is_all and why_not_covered(form, size, statement, self.kernel.analyzer):
                return True
        return not seen <= self._inner

    def _made(self, statement: Statement) -> StateValue | None:
        """What the statement leaves in an element of its target."""
        operand = self._operand(statement)
        if operand is None or statement.op is None:
            return operand
        added = self._combined(statement, operand)
        if added is None or statement.fresh:
            return added
        before = self._load(statement.target)
        if before is None:
            return None
        if statement.op == "sum":
            total = plus(before, added)
            return None if total is None else total.past(_sum_past(before.padding, added.padding))
        if statement.op == "max":
            if before.part is None or added.part is None:
                before, added = self._as_block(before, statement), self._as_block(added, statement)
            return _largest(before, added)
        if statement.op == "prod" and not self._repeats(statement):
            product = times(before, added)
            return None if product is None else product.past(_product_past(before.padding, added.padding))
        return None

    def _as_block(self, value: StateValue, statement: Statement) -> StateValue:
        """What an iteration has of its own, known by the statement that takes it into a maximum."""
        own = value.part is not None and (self.ordered or (self.by_position and _is_point(value)))
        return _block_maximum(statement) if own else value

    def _repeats(self, statement: Statement) -> bool:
        """Whether one iteration runs the statement more than once on an element."""
        indexed = {v for form in statement.target.forms if form is not None for v in form.terms}
        return any(x.var in self._inner and x.var not in indexed for x in statement.loops)

    def _operand(self, statement: Statement) -> StateValue | None:
        """What the statement stores, or combines with its target."""
        record = statement.tile_op
        if record is None or not record.sources:
            return self._expr(statement.values[0], statement) if statement.values else None
        if self.ordered and all(self._is_free_load(access, statement) for access in statement.reads):
            return independent(Level.POINT)
        if not isinstance(record, (Copy, Gemm, Reduce)) or record.reduction not in (None, "sum", "max"):
            return None
        sources = [self._load(access) for access in statement.reads[: len(record.sources)]]
        known = [source for source in sources if source is not None]
        if len(known) < len(sources) or len(sources) > 2:
            return None
        if len(known) == 1:
            return known[0]
        product = times(*known)
        return None if product is None else product.past(_product_past(known[0].padding, known[1].padding))

    def _combined(self, statement: Statement, operand: StateValue) -> StateValue | None:
        """The operand, combined over what the statement walks of it and its target does not."""
        indexed = {v for form in statement.target.forms if form is not None for v in form.terms}
        over = {x.var for x in statement.loops if x.var in self._inner} - indexed
        if self.ordered and operand.part is not None and (over or statement.fresh):
            return independent(Level.POINT) if statement.fresh or statement.op in ("sum", "max") else None
        if not self.ordered and not self.coordinates.walks(statement.target, self.factor):
            if over & self.factor.roles.keys():
                unit = Content(neutral(str(statement.op), statement.target.buffer.dtype))
                self.adds[statement] = operand.padding == unit
                return _over_positions(statement, operand)
            if _is_point(operand) and not self.by_position:
                return None
        return _over_others(statement, operand) if over and operand.part is None else operand

    def _is_free_load(self, access: Access, statement: Statement) -> bool:
        value = self._load(access)
        return value is not None and value.part is not None

    # -- expressions ---------------------------------------------------------------------------------------------------

    def _expr(self, expr: tirx.PrimExpr, statement: Statement) -> StateValue | None:
        known = number(expr)
        if known is not None:
            return constant(float(known))
        if isinstance(expr, tirx.BufferLoad):
            return self._load(self._access(expr, statement))
        if isinstance(expr, tirx.Var) and self._keeps_its_value(expr):
            return self._expr(self.kernel.binds[expr], statement)
        if isinstance(expr, tirx.Cast) and expr.dtype.startswith(("float", "bfloat")):
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
        return self._kept(expr, statement) or self._independent(expr, statement)

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

    def _keeps_its_value(self, var: tirx.Var) -> bool:
        """Whether a variable was bound to loads of what nothing here writes: they are the same where it is used."""
        found = loads(self.kernel.binds[var]) if var in self.kernel.binds else []
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
            return made.past(_product_past(a.padding, b.padding))
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
        return made.past(inside.padding.mapped(lambda x: 0.0 if x == -math.inf else base**x))

    def _guard(self, expr: tirx.PrimExpr, inside: StateValue, statement: Statement) -> bool:
        """Note the loads of atoms that a power takes down: where those are the lowest value, nothing counts yet. False
        where they are not loaded as they are."""
        down = {atom for atom, rate in inside.atoms.items() if rate < 0}
        for load in loads(expr):
            value = self._load(self._access(load, statement))
            if value is None or (value.atoms and value.atom is None):
                return False
            if value.atom in down and is_running(value.atom) and not is_bounded(value.atom):
                self.guarded[statement] = (*self.guarded.get(statement, ()), load)
        return True

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
        bound = [n for n in vars_of([expr], {}) if n in self.kernel.binds]
        if any(loads(self.kernel.binds[var]) and not self._keeps_its_value(var) for var in bound):
            return None
        for load in [*loads(expr), *(load for var in bound for load in loads(self.kernel.binds[var]))]:
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
        """What an access reads."""
        live_range = self.coordinates.ranges.of(access)
        forms = [form for form in access.forms if form is not None]
        if live_range in self.env:
            value = self.env[live_range]
            complete = value is not None and len(forms) == len(access.forms)
            return moved(value, forms) if complete and value is not None else None
        if live_range in self._written:
            if live_range.is_param or self.loop.var not in live_range.carried or len(forms) < len(access.forms):
                return None
            return StateValue({Atom.make(("before", live_range), forms): 1.0})
        if any(loads(index) for index in access.indices):
            return None
        if self.coordinates.walks(access, self.factor):
            return independent(Level.POINT, self._padding.content(live_range))
        moves = vars_of(access.indices, self.kernel.binds) & self._moving
        if moves and not self.ordered:
            return None
        return independent(Level.POINT if moves else Level.FIXED)

    def _out_of_step(self) -> Iterator[LiveRange]:
        """Live ranges whose elements are used at other places than they are written in the same nest, or that inner
        loops carry in another way than by adding up."""
        for position, first in enumerate(self.body):
            for second in self.body[position:]:
                shared = {x.var for x in first.loops if x.kind != "tile"} & {x.var for x in second.loops} & self._inner
                if shared:
                    yield from self._crossed(first, second, shared)

    def _crossed(self, first: Statement, second: Statement, shared: set[tirx.Var]) -> Iterator[LiveRange]:
        of = self.coordinates.ranges.of
        for a in first.accesses:
            for b in second.accesses:
                if not a.buffer.same_as(b.buffer) or a.buffer in self.kernel.params.values():
                    continue
                if a is not first.write and b is not second.write:
                    continue
                if not a.same_forms(b):
                    yield from (of(a), of(b))
                inner = of(a).carried & self._inner - {v for form in a.forms if form is not None for v in form.terms}
                if inner & shared and not (first is second and first.op in ("sum", "max")):
                    yield of(a)


def chosen(expr: tirx.PrimExpr) -> list[tirx.PrimExpr] | None:
    """The condition of a choice, what it is where that holds, and what elsewhere; None if it is no choice."""
    if isinstance(expr, tirx.Select):
        return [expr.condition, expr.true_value, expr.false_value]
    return list(expr.args) if op_name(expr) == "tirx.if_then_else" else None


def _shared_conditions(body: Sequence[Statement]) -> tuple[tirx.PrimExpr, ...]:
    """The conditions that all statements of a loop start with."""
    shared = body[0].conditions if body else ()
    for statement in body:
        same = [a.same_as(b) for a, b in zip(shared, statement.conditions, strict=False)]
        shared = shared[: same.index(False) if False in same else len(same)]
    return shared


def _is_point(value: StateValue) -> bool:
    """Whether there is one of it per position, whatever earlier iterations left."""
    return value.part is not None and value.part.level is Level.POINT


def is_running(atom: Atom) -> bool:
    """Whether the atom is what an earlier iteration left, or the maximum of that and more."""
    return atom.key[0] == "before" or (atom.key[0] == "max" and any(key[0] == "before" for key in atom.key[1]))


def is_bounded(atom: Atom) -> bool:
    """Whether the atom is a maximum of some finite constant, too."""
    return atom.key[0] == "max" and any(
        key[0] == "fixed" and key[1] is not None and math.isfinite(key[1]) for key in atom.key[1]
    )


def _over_positions(statement: Statement, operand: StateValue) -> StateValue | None:
    """What a statement makes of all positions of a block."""
    if statement.op == "sum":
        if operand.atoms or operand.log is not None or any(p.level is Level.SUM for p in operand.terms.values()):
            return None
        if any(carried is not None for _, carried in operand.terms):
            return None
        return StateValue({}, {factor: type(part)(Level.SUM) for factor, part in operand.terms.items()})
    part = operand.part
    if statement.op != "max" or part is None or part.level is not Level.POINT:
        return None
    return _block_maximum(statement)


def _over_others(statement: Statement, operand: StateValue) -> StateValue | None:
    """What a statement makes of elements that are all at one position: what they are scaled by is one for all, or has
    no place in the target."""
    if statement.op != "sum" or operand.atoms or operand.log is not None:
        return None
    if any(carried is not None for _, carried in operand.terms):
        return None
    return StateValue({}, {factor: type(part)(part.level) for factor, part in operand.terms.items()})


def _block_maximum(statement: Statement) -> StateValue:
    return StateValue({Atom.make(("block", statement), [f for f in statement.target.forms if f is not None]): 1.0})


def _sum_past(before: Content, added: Content) -> Content:
    return before if added == ZERO else before.mapped(lambda a, b: a + b, added)


def _product_past(a: Content, b: Content) -> Content:
    """Past the end of the dim, 0 times what is not known is what the kernel itself has there."""
    return ZERO if ZERO in (a, b) else a.mapped(lambda x, y: x * y, b)
