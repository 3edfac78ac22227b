"""Cut a kernel where states that loops carry (rules.kernel.states) are needed whole: every device has the state of its
own part, and they are combined.

    loop       the statements before; every device leaves its `own` state, as one of as many as there are devices
    combine    every own state is scaled to the maximum of all, and added up: a kernel over the states, like any other
    rest       the statements after, which take over the state of all

The maximum of all is completed between the first two, sums between the last two. Which collectives that takes, and who
then has what, follows from the three kernels as it does for any kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.base.recent import made_once
from mesh_tensor.rules.kernel.factors import Blocked
from mesh_tensor.rules.kernel.live_ranges import LiveRange
from mesh_tensor.rules.kernel.normalize import ANALYSES
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import OWN_ATTR, Statement, body_statements, lowest_or
from mesh_tensor.rules.kernel.states import LogSum, ScaledSum, State
from mesh_tensor.tir.linear import Linear
from mesh_tensor.tir.rewrite import buffer_like, fill, neutral_element, over_elements, sequence

from .cut import (
    Workspace,
    check_padding,
    is_live,
    make_workspace,
    part_of,
    reload,
    with_leading_dim,
    without_lost_prints,
)
from .scalars import computed_again

#: By what they are for.
_Workspaces = Mapping[LiveRange, Workspace]
_Copies = Mapping[LiveRange, tirx.Stmt]

#: From the indices of an element to its value.
_Element = Callable[[Sequence[tirx.PrimExpr]], tirx.PrimExpr]


@dataclass(frozen=True, eq=False)
class Combination:
    """The three kernels. `own`: what devices leave for the second, by how many there are; `shared`: what is carried
    over whole."""

    loop: tirx.PrimFunc
    combine: tirx.PrimFunc
    rest: tirx.PrimFunc
    own: tuple[Workspace, ...]
    shared: tuple[Workspace, ...]


def live_states(states: Sequence[State], at: int) -> list[State]:
    """The states of which something is live at a cut that can't be completed as it is."""
    return [state for state in states if state.top < at and any(is_live(held, at) for held in state.scaled)]


@made_once(ANALYSES)
def combine(analysis: Analysis, states: tuple[State, ...], at: int, devices: int, suffix: str) -> Combination:
    """The kernel's statements before `at`, with what combines their states, and those from `at` on.

    Raises Blocked where something live can't be carried over."""
    return _Combiner(analysis, states, at, devices, suffix).made()


class _Combiner:
    def __init__(self, analysis: Analysis, states: Sequence[State], at: int, devices: int, suffix: str):
        self.analysis, self.at, self.devices, self.suffix = analysis, at, devices, suffix
        self.sums = [part for state in states for part in state.sums]
        self.logs = [part for state in states for part in state.logs]
        self.maxima = list(dict.fromkeys(part.of.held for part in self.sums))
        self.stood_in = {part.of.held: part.of.stand_in for part in self.sums if part.of.stand_in is not None}
        self.scaled = [held for state in states for held in state.scaled]
        self.parts = [*self.maxima, *self.scaled]
        self.live = [r for r in analysis.coordinates.ranges.all if not r.is_param and is_live(r, at)]
        self.live += [r for r in self.parts if r not in self.live]
        self.step = tirx.Var("device", "int32")
        self.allocated: list[tirx.Buffer] = []

    def made(self) -> Combination:
        analysis, at = self.analysis, self.at
        if len({r.buffer for r in self.live}) < len(self.live):
            raise Blocked("a buffer has two values at the point where the kernel would be cut")
        again = {r: copy for r in self.live if (copy := reload(r, analysis, at)) is not None}
        scalars = computed_again(
            analysis, at, list(again.values()), [r.buffer for r in self.live if r not in self.parts]
        )
        kept = [r for r in self.live if r not in again and r.buffer not in scalars.buffers]
        for live_range in kept:
            check_padding(live_range, analysis)
        whole = {r: make_workspace(r, analysis, self.suffix) for r in kept}
        largest = {r: whole[r] for r in self.maxima}
        largest |= {part.held: make_workspace(part.held, analysis, f"{self.suffix}max") for part in self.logs}
        first, own = self._loop(again, whole, largest)
        second = self._combine(whole, largest, own)
        stmts = body_statements(analysis.kernel.root.body)
        restored = {r: w.restore() for r, w in whole.items() if is_live(r, at)}
        found = [_stand_in(r.buffer, said) for r, said in self.stood_in.items() if r in restored]
        rest = [*scalars.stmts, *again.values(), *restored.values(), *found, *stmts[at:]]
        third = part_of(analysis, rest, [w for r, w in whole.items() if is_live(r, at)])
        third = without_lost_prints(third, analysis, at)
        return Combination(first, second, third, tuple(own.values()), (*whole.values(), *largest.values()))

    def _loop(
        self, again: _Copies, whole: _Workspaces, largest: _Workspaces
    ) -> tuple[tirx.PrimFunc, dict[LiveRange, Workspace]]:
        """The statements before the cut, and the states that devices leave for each other."""
        analysis, name = self.analysis, f"own_{self.suffix}"
        own = {r: make_workspace(r, analysis, name) for r in self.parts}
        one = [with_leading_dim(workspace, 1, tirx.IntImm("int32", 0)) for workspace in own.values()]
        left = list(dict.fromkeys([*(w for r, w in whole.items() if r not in self.scaled), *largest.values()]))
        idle = {copy for r, copy in again.items() if not any(s.top < self.at for s, _ in r.reads)}
        before = body_statements(analysis.kernel.root.body)[: self.at]
        instead = {said: buffer_like(held.buffer, "stand_in") for held, said in self.stood_in.items()}
        stmts = [*(_apart(s, instead) for s in before if s not in idle), *(w.save() for w in (*left, *one))]
        made = part_of(analysis, stmts, [*left, *one], list(instead.values()))
        largest_of_own = {part.held for part in self.logs} | {part.of.held for part in self.sums if part.of.of_block}
        names = {**analysis.kernel.own, **{w.buffer.name: "" for w in one}}
        names |= {w.buffer.name: "max" for held, w in largest.items() if held in largest_of_own}
        spread = {r: with_leading_dim(workspace, self.devices, self.step) for r, workspace in own.items()}
        return made.with_attr(OWN_ATTR, names), spread

    def _combine(self, whole: _Workspaces, largest: _Workspaces, own: _Workspaces) -> tirx.PrimFunc:
        """Take over the maxima of all, scale every device's sums to them, and add up."""
        there = {r: self._beside(r) for r in own}
        stmts = [workspace.restore() for workspace in largest.values()]
        loop = [workspace.into(there[r]).restore() for r, workspace in own.items()]
        for part in self.sums:
            stmts.append(self._fill(part.held.buffer))
            loop.append(self._add(part.held.buffer, self._scaled(part, there)))
        totals = {part: self._beside(part.held) for part in self.logs}
        for log, total in totals.items():
            stmts.append(self._fill(total))
            loop.append(self._add(total, self._power(log, there)))
        stmts.append(tirx.For(self.step, 0, self.devices, tirx.ForKind.SERIAL, sequence(loop)))
        stmts += [self._finish(log, total) for log, total in totals.items()]
        made = [whole[held] for held in self.scaled]
        stmts += [workspace.save() for workspace in made]
        return part_of(self.analysis, stmts, [*largest.values(), *own.values(), *made], self.allocated)

    def _beside(self, live_range: LiveRange) -> tirx.Buffer:
        made = buffer_like(live_range.buffer, str(len(self.allocated)))
        self.allocated.append(made)
        return made

    def _fill(self, buffer: tirx.Buffer) -> tirx.Stmt:
        return fill(buffer, neutral_element("sum", buffer.dtype))

    def _add(self, total: tirx.Buffer, value: _Element) -> tirx.Stmt:
        return over_elements(total, lambda at: tirx.BufferStore(total, tirx.BufferLoad(total, at) + value(at), at))

    def _scaled(self, part: ScaledSum, own: Mapping[LiveRange, tirx.Buffer]) -> _Element:
        """A device's sum, as it is where its terms are scaled to the maximum of all."""

        def element(at: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
            row = [_expr(form, at) for form in part.place]
            mine, largest = tirx.BufferLoad(own[part.of.held], row), tirx.BufferLoad(part.of.held.buffer, row)
            apart, value = mine - _finite(largest), tirx.BufferLoad(own[part.held], list(at))
            if not part.of.of_block:
                return value * _power_of_2(part.rate, apart)
            # relative to one block's maximum, a sum may be as large as the power is small
            half = _power_of_2(part.rate / 2, apart)
            return value * half * half

        return element

    def _power(self, part: LogSum, own: Mapping[LiveRange, tirx.Buffer]) -> _Element:
        """A device's sum of what it has the logarithm of, over the largest of those."""

        def element(at: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
            mine, largest = tirx.BufferLoad(own[part.held], list(at)), tirx.BufferLoad(part.held.buffer, list(at))
            # what overflowed is as large as itself
            above = tirx.Select(mine == largest, tirx.const(0, mine.dtype), mine - _finite(largest))
            return _power_of_2(part.rate, above)

        return element

    def _finish(self, part: LogSum, total: tirx.Buffer) -> tirx.Stmt:
        held = part.held.buffer

        def store(at: list[tirx.PrimExpr]) -> tirx.Stmt:
            largest, summed = tirx.BufferLoad(held, at), tirx.BufferLoad(total, at)
            value = largest + tirx.log2(summed) * tirx.const(1 / part.rate, held.dtype)
            return tirx.BufferStore(held, value, at)

        return over_elements(total, store)


def _stand_in(maximum: tirx.Buffer, said: Statement) -> tirx.Stmt:
    """What says it for a block, for the maximum of all."""
    found = lowest_or(said.values[0])
    assert found is not None

    def store(at: list[tirx.PrimExpr]) -> tirx.Stmt:
        own = tirx.BufferLoad(maximum, at)
        chosen = tirx.Select(own == neutral_element("max", own.dtype), tirx.const(found[1], own.dtype), own)
        return tirx.BufferStore(maximum, chosen, at)

    return over_elements(maximum, store)


def _apart(stmt: tirx.Stmt, instead: Mapping[Statement, tirx.Buffer]) -> tirx.Stmt:
    """The statement with what stands in for maxima in buffers of their own, where the rest of an iteration reads it:
    the next one goes on from the maximum itself, as others do that have seen more."""
    found: dict[tirx.Buffer, tirx.Buffer] = {}

    def replace(node: tirx.BufferStore | tirx.BufferLoad) -> object:
        if isinstance(node, tirx.BufferLoad):
            own = found.get(node.buffer)
            return None if own is None else tirx.BufferLoad(own, node.indices)
        said = next((s for s in instead if s.node.same_as(node)), None)
        if said is None:
            return None
        found[node.buffer] = instead[said]
        return tirx.BufferStore(instead[said], node.value, node.indices)

    return tirx.stmt_functor.ir_transform(stmt, replace, None, ["tirx.BufferStore", "tirx.BufferLoad"])


def _expr(form: Linear, at: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
    """A linear form of dims at indices into them."""
    total: tirx.PrimExpr = tirx.IntImm("int32", form.const)
    for dim, coefficient in form.terms.items():
        total = at[dim] * coefficient + total if coefficient != 1 or form.const else at[dim]
    return total


def _power_of_2(rate: float, exponent: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.exp2(exponent * tirx.const(rate, exponent.dtype))


def _finite(largest: tirx.PrimExpr) -> tirx.PrimExpr:
    """Where nothing counts on any device, 0 does as well as the lowest value, and can be taken away."""
    lowest = neutral_element("max", largest.dtype)
    return tirx.Select(largest == lowest, tirx.const(0, largest.dtype), largest)
