"""One iteration of a loop over blocks, followed statement by statement in `state_values`.

What is not understood is `None` and stays so; whoever asks decides whether it matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tvm import tirx

from mesh_tensor.base.reductions import neutral
from mesh_tensor.tir.tile_ops import Copy, Gemm, Reduce

from .coordinates import Coordinates
from .factors import Factor, why_not_covered
from .iteration_expressions import Expressions, largest, negative, product_past
from .live_ranges import LiveRange
from .lowest_values import LowestValues
from .padding import ZERO, Content, Padding
from .state_values import Atom, Level, StateValue, independent, plus, stored, times
from .statements import Access, Kernel, Loop, Statement


class Iteration(Expressions):
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
        self._finite: list[Atom] = []
        self._unproven: set[LiveRange] = set()
        self._lowest = LowestValues(kernel, coordinates, self.body)
        self._padding = Padding(kernel, coordinates, factor, past_the_end=True)
        self._written = {coordinates.ranges.of(s.write) for s in self.body if s.write is not None}
        self._mixed = set(self._out_of_step())
        self.common = _shared_conditions(self.body)
        for statement in self.body:
            self._run(statement)

    def value(self, live_range: LiveRange) -> StateValue | None:
        """What a live range holds in the end, in terms of its dims."""
        return self.env.get(live_range)

    def adds_nothing_unseen(self, maximum: LiveRange) -> bool:
        """Whether no power that takes a running maximum down is more than nothing where that is the lowest value."""
        return maximum not in self._unproven

    def runs_alike(self, statement: Statement) -> bool:
        """Whether the statement runs, and how often, whatever earlier iterations left."""
        used, exprs = self.uses.get(statement, {}), [*statement.conditions, *statement.bounds]
        ranges = [
            self.coordinates.ranges.of(self._access(load, statement)) for e in exprs for load in self._all_loads(e)
        ]
        return not any(live_range in used for live_range in ranges)

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

    def leaves_some(self, statement: Statement) -> bool:
        """Whether the statement, where it runs, leaves some of its target as it was, or is not understood."""
        write = statement.target
        if statement.unknown or statement.may_be_skipped:
            return True
        seen: set[tirx.Var] = set()
        for dim, (form, size) in enumerate(zip(write.forms, write.buffer.shape, strict=True)):
            if form is None and self._goes_along(statement, dim):
                continue
            if form is None or form.terms.keys() & seen:
                return True
            seen |= form.terms.keys()
            is_all = not form.terms and not form.const and self.kernel.analyzer.can_prove_equal(size, 1)
            if not is_all and why_not_covered(form, size, statement, self.kernel.analyzer):
                return True
        return not seen <= self._inner

    def _goes_along(self, statement: Statement, dim: int) -> bool:
        """Whether the statement goes along all of its target's dim, element by element, in an iteration of its own."""
        record = statement.tile_op
        if not self.ordered or record is None or record.in_order != dim:
            return False
        prove = self.kernel.analyzer.can_prove_equal
        return prove(record.dst.mins[dim], 0) and prove(record.dst.extents[dim], statement.target.buffer.shape[dim])

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
            return largest(before, added)
        if statement.op == "prod" and not self._over(statement):
            product = times(before, added)
            return None if product is None else product.past(product_past(before.padding, added.padding))
        return None

    def _as_block(self, value: StateValue, statement: Statement) -> StateValue:
        """What an iteration has of its own, known by the statement that takes it into a maximum."""
        own = value.part is not None and (self.ordered or (self.by_position and _is_point(value)))
        return _block_maximum(statement) if own else value

    def _over(self, statement: Statement) -> set[tirx.Var]:
        """What a statement walks in one iteration, and its target does not."""
        indexed = {v for form in statement.target.forms if form is not None for v in form.terms}
        return {x.var for x in statement.loops if x.var in self._inner and not self.kernel.is_idle(x.var)} - indexed

    def _operand(self, statement: Statement) -> StateValue | None:
        """What the statement stores, or combines with its target."""
        record = statement.tile_op
        if record is None or not record.sources:
            value = self._expr(statement.values[0], statement) if statement.values else None
            return negative(value) if value is not None and statement.subtracts else value
        if self.ordered and all(self._is_free_load(access) for access in statement.reads):
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
        return None if product is None else product.past(product_past(known[0].padding, known[1].padding))

    def _combined(self, statement: Statement, operand: StateValue) -> StateValue | None:
        """The operand, combined over what the statement walks of it and its target does not."""
        over = self._over(statement)
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

    def _is_free_load(self, access: Access) -> bool:
        value = self._load(access)
        return value is not None and value.part is not None

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
