"""States that a loop over blocks carries, and that are combined although they are no plain reduction.

A loop that keeps a running maximum m, and sums whose terms are powers of what is left over it,

    m' = max(m, block);  l' = l * exp(m - m') + sum(exp(x - m'));  acc' = acc * exp(m - m') + exp(x - m') @ V

leaves, whatever it started from, `l = sum(exp(x)) * exp(-m)`. Two such states are combined by the larger maximum, to
which both sums are scaled. m' may as well be the maximum of the last block alone, where it cancels in what is made of
the state after the loop (`references`). One iteration is followed symbolically (`iterations`) and has to leave exactly
that; what does not is no state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from tvm import tirx

from mesh_tensor.tir.linear import Linear
from mesh_tensor.tir.loops import is_backward
from mesh_tensor.tir.rewrite import number

from .coordinates import Coordinates
from .factors import Factor
from .finite_blocks import has_finite_blocks
from .iterations import Iteration
from .live_ranges import LiveRange
from .references import reference, references_cancel, relative
from .row_totals import adds_at_least_one
from .state_values import Atom, Level, Part, StateValue, Terms, add_rates, independent
from .statements import Kernel, Loop, Statement, is_load_of, lowest_or
from .states import LogSum, RunningMax, ScaledSum, State

_ONE = Part(Level.FIXED, 1.0)


def find_states(kernel: Kernel, coordinates: Coordinates, factor: Factor) -> tuple[State, ...]:
    """The states of a factor's loops; none where a loop carries anything else."""
    loops = carrying_loops(kernel, coordinates, factor)
    if any(is_backward(loop.node) for loop in loops):
        return ()  # the first block is the last device's
    found = [next(filter(None, _states(kernel, coordinates, factor, loop)), None) for loop in loops]
    known = tuple(state for state in found if state is not None)
    return known if len(known) == len(found) else ()


def carrying_loops(kernel: Kernel, coordinates: Coordinates, factor: Factor) -> list[Loop]:
    """The factor's own loops that carry something on chip: those that carry more than plain reductions, if any does."""
    ranges = [r for r in coordinates.ranges.all if not r.is_param]
    carried = {var for r in ranges for var in changed_in(r)}
    more = {var for r in ranges for var in changed_in(r) if not is_plain(r, var)}
    loops = [kernel.loops[var] for var in factor.roles if var in carried and kernel.loops[var].kind == "serial"]
    return [loop for loop in loops if loop.var in more] or loops


def is_plain(live_range: LiveRange, var: tirx.Var) -> bool:
    """Whether all that a loop does with a live range is to combine more into it, with one operation."""
    ops = {None if s.fresh else s.op for s, _ in live_range.writes if var in s.vars}
    return len(ops) == 1 and None not in ops and not any(var in s.vars for s, _ in live_range.reads)


def changed_in(live_range: LiveRange) -> set[tirx.Var]:
    """The loops from one iteration of which to the next the live range carries what it was changed to."""
    return {var for var in live_range.carried if any(var in s.vars for s, _ in live_range.writes)}


def _states(kernel: Kernel, coordinates: Coordinates, factor: Factor, loop: Loop) -> Iterator[State | None]:
    iteration = Iteration(kernel, coordinates, factor, loop)
    yield _state(kernel, coordinates, factor, loop, iteration)
    if iteration.by_position:
        yield _state(kernel, coordinates, factor, loop, Iteration(kernel, coordinates, factor, loop, named=True))


def _state(kernel: Kernel, coordinates: Coordinates, factor: Factor, loop: Loop, iteration: Iteration) -> State | None:
    carried = [r for r in coordinates.ranges.all if not r.is_param and loop.var in changed_in(r)]
    if any(changed_in(r) & factor.roles.keys() != {loop.var} for r in carried):
        return None
    made = _Parts(iteration, carried).found()
    if made is None:
        return None
    updates = {s for r in carried for s, _ in r.writes if loop.var in s.vars}
    explained = frozenset(iteration.depends | updates)
    if not all(iteration.runs_alike(s) for s in explained) or not _stays_inside(explained, coordinates, loop, carried):
        return None
    guards = iteration.guarded if any(m.unbounded for m in made[0]) else {}
    skips = [c for s in explained for c in s.conditions if not _starts_first(c, loop, kernel)]
    if guards and skips and not all(has_finite_blocks(iteration, part.held) for part in made[0]):
        return None
    unseen = [part.held for part in made[0] if not iteration.adds_nothing_unseen(part.held)]
    if not all(has_finite_blocks(iteration, held) for held in unseen):
        return None
    if any(running.is_relative for running in made[0]) and not _references_cancel(iteration, *made):
        return None
    neutral, uses = iteration.adds, iteration.uses
    return State(loop, iteration.body[0].top, *made, explained, neutral, uses, guards, iteration.by_position)


def _references_cancel(
    iteration: Iteration,
    maxima: Sequence[RunningMax],
    sums: Sequence[ScaledSum],
    logs: Sequence[LogSum],
    plain: Sequence[LiveRange],
) -> bool:
    """Whether nothing is made of the state that depends on what it is relative to."""
    left = {held: independent(Level.FIXED) for held in (*(log.held for log in logs), *plain)}
    left |= {m.held: reference(m.held) if m.is_relative else independent(Level.FIXED) for m in maxima}
    for part in sums:
        known = relative(part.of.held, part.place, part.rate) if part.of.is_relative else independent(Level.FIXED)
        left[part.held] = known
    totals = {part.held for part in sums if part.of.of_block and adds_at_least_one(iteration, part)}
    return references_cancel(iteration.kernel, iteration.coordinates, iteration.factor, iteration.loop, left, totals)


def _stays_inside(
    explained: frozenset[Statement], coordinates: Coordinates, loop: Loop, carried: Sequence[LiveRange]
) -> bool:
    """Whether what the statements write is part of the state, or is forgotten with the iteration."""
    targets = {coordinates.ranges.of(s.target) for s in explained}
    return all(r in carried or any(x is loop for x in r.scope) for r in targets)


def _starts_first(condition: tirx.PrimExpr, loop: Loop, kernel: Kernel) -> bool:
    """Whether the loop's first block is one of those of which a condition holds, if any is."""
    at_0 = tirx.stmt_functor.substitute(condition, {loop.var: tirx.IntImm(loop.var.dtype, 0)})
    with kernel.analyzer.constraint_scope(tirx.And(loop.var >= 0, condition)):
        return bool(kernel.analyzer.can_prove(at_0))


class _Parts:
    """What the carried live ranges are parts of."""

    def __init__(self, iteration: Iteration, carried: Sequence[LiveRange]):
        self.iteration, self.carried = iteration, carried

    def found(
        self,
    ) -> tuple[tuple[RunningMax, ...], tuple[ScaledSum, ...], tuple[LogSum, ...], tuple[LiveRange, ...]] | None:
        """The parts, None if a live range is none of them."""
        values = {r: self.iteration.value(r) for r in self.carried}
        maxima = {
            r: RunningMax(r, self._is_unbounded(r), stand_in=self._stand_in(r) if v.is_finite else None)
            for r, v in values.items()
            if v is not None and self._is_maximum(r, v)
        }
        maxima |= {r: RunningMax(r, False, of_block=True) for r, v in values.items() if self._is_of_last_block(r, v)}
        sums, logs, plain = [], [], []
        for live_range, value in values.items():
            if live_range in maxima or value is None:
                if value is None:
                    return None
                continue
            log, made = self._log(live_range, value), self._sum(live_range, value, maxima)
            if log is not None:
                logs.append(log)
            elif made is None:
                return None
            elif isinstance(made, ScaledSum):
                sums.append(made)
            else:
                plain.append(live_range)
        return tuple(maxima.values()), tuple(sums), tuple(logs), tuple(plain)

    def _is_unbounded(self, live_range: LiveRange) -> bool:
        numbers = self._starts(live_range)
        return not numbers or any(n is None or math.isinf(n) for n in numbers)

    def _starts(self, live_range: LiveRange) -> list[float | None]:
        """The numbers that the loop begins with; None for what is none."""
        starts = [s for s, _ in live_range.writes if self.iteration.loop.var not in s.vars]
        return [number(s.values[0]) if s.values and s.op is None else None for s in starts]

    def _stand_in(self, live_range: LiveRange) -> Statement | None:
        """What ends an iteration with a number in place of a maximum that is the lowest value, elsewhere leaves it."""
        last = [s for s, _ in live_range.writes if self.iteration.loop.var in s.vars][-1]
        load, _, elsewhere = lowest_or(last.values[0]) or (None, None, None) if last.values else (None, None, None)
        own = load is not None and is_load_of(load, last.target) and is_load_of(elsewhere, last.target)
        return last if own and isinstance(last.node, tirx.BufferStore) and last.op is None else None

    def _is_maximum(self, live_range: LiveRange, value: StateValue) -> bool:
        """Whether the live range holds the maximum of what it held before, of blocks, and of constants."""
        atom = value.atom
        if atom is None or atom.key[0] != "max" or not is_in_place(atom, live_range):
            return False
        if value.is_finite and self._stand_in(live_range) is None:
            return False
        return ("before", live_range) in atom.key[1] and all(
            key == ("before", live_range) or key[0] in ("block", "fixed") for key in atom.key[1]
        )

    def _is_of_last_block(self, live_range: LiveRange, value: StateValue | None) -> bool:
        """Whether the live range holds the maximum of the iteration's block, and starts lower than any."""
        atom = None if value is None else value.atom
        if atom is None or atom.key[0] not in ("block", "max") or not is_in_place(atom, live_range):
            return False
        is_of_block = all(key[0] in ("block", "fixed") for key in atom.keys)
        return is_of_block and set(self._starts(live_range)) == {-math.inf}

    def _sum(
        self, live_range: LiveRange, value: StateValue, maxima: Mapping[LiveRange, RunningMax]
    ) -> ScaledSum | LiveRange | None:
        """The scaled sum, or the live range of a plain one; None if it is neither."""
        if value.log is not None or any(not _is_before(atom, live_range) for atom in value.atoms):
            return None
        terms: Terms = {(frozenset(), a): Part(Level.FIXED, rate) for a, rate in value.atoms.items()}
        terms = {**terms, **value.terms}
        own = [(dict(power), part) for (power, carried), part in terms.items() if carried is not None]
        if len(own) != 1 or own[0][1] != _ONE or len(terms) > 2:
            return None
        if not all(_is_before(carried, live_range) for _, carried in terms if carried is not None):
            return None
        added = [(dict(power), part) for (power, carried), part in terms.items() if carried is None]
        if not all(self._is_of_block(part) for _, part in added):
            return None
        if not own[0][0] and all(not power for power, _ in added):
            return live_range
        return self._scaled(live_range, own[0][0], [power for power, _ in added], maxima)

    def _is_of_block(self, part: Part) -> bool:
        """Whether the part is that of all positions of an iteration, which may be one."""
        return part.level is Level.SUM or (part.level is Level.POINT and self.iteration.by_position)

    def _scaled(
        self,
        live_range: LiveRange,
        own: Mapping[Atom, float],
        added: Sequence[Mapping[Atom, float]],
        maxima: Mapping[LiveRange, RunningMax],
    ) -> ScaledSum | None:
        """The sum, if it was times `2 ** (-rate * m)` before and is times `2 ** (-rate * m')` now."""
        for running in maxima.values():
            now = self.iteration.value(running.held)
            assert now is not None
            last = now.atom
            assert last is not None
            rates = {atom: rate for atom, rate in own.items() if atom.key == ("before", running.held)}
            if len(rates) != 1:
                continue
            ((before, rate),) = rates.items()
            after = last.moved(before.place)
            if rate <= 0 or add_rates(own, {before: -rate, after: rate}):
                return None
            if any(add_rates(power, {after: rate}) for power in added):
                return None
            return ScaledSum(live_range, running, rate, before.place)
        return None

    def _log(self, live_range: LiveRange, value: StateValue) -> LogSum | None:
        """`2 ** (rate * value)` has to be as much as before, and a sum over positions."""
        if value.log is None or value.terms or value.scale <= 0:
            return None
        rate = 1 / value.scale
        terms: Terms = {
            (frozenset(add_rates(dict(power), {a: r * rate for a, r in value.atoms.items()}).items()), carried): part
            for (power, carried), part in value.log.items()
        }
        before = [(power, part) for (power, carried), part in terms.items() if power and carried is None]
        added = [part for (power, carried), part in terms.items() if not power and carried is None]
        if len(before) != 1 or len(added) != 1 or len(terms) != 2:
            return None
        if not self._is_of_block(added[0]):
            return None
        ((power, part),) = before
        ((atom, old),) = power if len(power) == 1 else [(None, 0.0)]
        same = atom is not None and _is_before(atom, live_range) and math.isclose(old, rate, rel_tol=1e-6)
        return LogSum(live_range, rate) if same and part == _ONE else None


def _is_before(atom: Atom, live_range: LiveRange) -> bool:
    return atom.key == ("before", live_range) and is_in_place(atom, live_range)


def is_in_place(atom: Atom, live_range: LiveRange) -> bool:
    """Whether the atom is that of the very element."""
    return len(atom.place) == len(live_range.buffer.shape) and all(
        form.same_as(Linear({dim: 1})) or (not form.terms and not form.const and int_size(live_range, dim) == 1)
        for dim, form in enumerate(atom.place)
    )


def int_size(live_range: LiveRange, dim: int) -> int | None:
    """The size of a live range's dim, if it is a number."""
    size = live_range.buffer.shape[dim]
    return int(size) if isinstance(size, (int, tirx.IntImm)) else None
