"""What comes after a loop whose sums are scaled to the maximum of one block, whichever was the last.

Such a state says the same relative to any other number: devices take theirs to the largest of their maxima, which need
not be that of the last block. That is no other result if the number cancels in all that is made of the state: the
statements after the loop are followed (`iterations`) with `l = L * 2 ** (-rate * m)`, and what leaves them has to hold
no m. Whether l is 0 says nothing of m. Where it is at least 1 as soon as any block was seen, the maximum is still what
it started with where it is 0: so `log(l if l != 0 else 1) + m` may be made of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from tvm import tirx

from mesh_tensor.tir.effects import chosen
from mesh_tensor.tir.linear import Linear
from mesh_tensor.tir.rewrite import number

from .coordinates import Coordinates
from .factors import Factor
from .iterations import Iteration
from .live_ranges import LiveRange
from .state_values import Atom, Level, Part, StateValue, independent, power
from .statements import Kernel, Loop, Statement


def reference(live_range: LiveRange) -> StateValue:
    """A number for every row, of which nothing is known."""
    return StateValue({Atom.make(("before", live_range), _dims(live_range)): 1.0})


def relative(of: LiveRange, place: tuple[Linear, ...], rate: float) -> StateValue:
    """Something times `2 ** (-rate * of)`."""
    atom = Atom.make(("before", of), place)
    return StateValue({}, {(power({atom: -rate}), None): Part(Level.FIXED)})


def _dims(live_range: LiveRange) -> list[Linear]:
    return [Linear({dim: 1}) for dim in range(len(live_range.buffer.shape))]


def references_cancel(
    kernel: Kernel,
    coordinates: Coordinates,
    factor: Factor,
    loop: Loop,
    left: Mapping[LiveRange, StateValue],
    totals: Set[LiveRange],
) -> bool:
    """Whether no statement makes anything of what the loop left that depends on its references. `totals`: what is 0
    only where no block was seen."""
    after = _Aftermath(kernel, coordinates, factor, loop, left, totals)
    top = next(s.top for s in kernel.statements if loop.var in s.vars)
    beside = [s for s in kernel.statements if s.top == top and loop.var not in s.vars]
    touched = {coordinates.ranges.of(a) for s in beside for a in s.accesses}
    return not after.shows and not touched & left.keys()


_COMPARISONS = (tirx.EQ, tirx.NE, tirx.GT, tirx.GE, tirx.LT, tirx.LE)


def _is_relative(value: StateValue | None) -> bool:
    """Whether it is a single power, which is more than 0, times something that depends on no reference."""
    if value is None or value.atoms or value.log is not None or len(value.terms) != 1:
        return False
    (((exponent, carried), part),) = value.terms.items()
    return bool(exponent) and carried is None and part.level is Level.FIXED


class _Aftermath(Iteration):
    """The statements after a loop. `shows`: whether one may leave what depends on a reference."""

    shows = False

    def __init__(
        self,
        kernel: Kernel,
        coordinates: Coordinates,
        factor: Factor,
        loop: Loop,
        left: Mapping[LiveRange, StateValue],
        totals: Set[LiveRange],
    ):
        self._totals = totals
        super().__init__(kernel, coordinates, factor, loop, left=left)

    def _expr(self, expr: tirx.PrimExpr, statement: Statement) -> StateValue | None:
        return super()._expr(expr, statement) or self._if_any(expr, statement)

    def _if_any(self, expr: tirx.PrimExpr, statement: Statement) -> StateValue | None:
        """A choice by whether a sum is 0, of what depends on no reference; or of something for where no block was seen,
        and what is made of references elsewhere."""
        condition, *either = chosen(expr) or [None]
        if not isinstance(condition, _COMPARISONS) or number(condition.b) != 0:
            return None
        if not isinstance(condition.a, tirx.BufferLoad):
            return None
        tested, values = self._access(condition.a, statement), [self._expr(value, statement) for value in either]
        known = [value for value in values if value is not None]
        if not _is_relative(self._load(tested)) or len(known) < len(values):
            return None
        levels = [value.part.level for value in known if value.part is not None]
        if len(levels) == len(known):
            return None if Level.SUM in levels else independent(max(levels))
        of_none, of_some = known if isinstance(condition, tirx.EQ) else reversed(known)
        is_told = (
            isinstance(condition, (tirx.EQ, tirx.NE, tirx.GT)) and self.coordinates.ranges.of(tested) in self._totals
        )
        return of_some if is_told and of_none.part is not None else None

    def _run(self, statement: Statement) -> None:
        target = None if statement.write is None else self.coordinates.ranges.of(statement.write)
        was_free = target is not None and (target not in self.env or self._is_free(target))
        super()._run(statement)
        if statement not in self.uses:
            if target is not None and not target.is_param and was_free:
                self.env[target] = independent(Level.FIXED)
            return
        self.shows |= target is None or not self._passes_on(statement, target)

    def _passes_on(self, statement: Statement, target: LiveRange) -> bool:
        """Whether the statement does nothing with what depends on references but to leave it in its target, where that
        is followed."""
        around = {r for index in statement.target.indices for r in self.loads_in(index)}
        if statement.unknown or statement.may_be_skipped or not self.runs_alike(statement):
            return False
        if around & self.uses[statement].keys():
            return False
        if target.buffer.name in self.kernel.own:
            return True  # what of this kernel is handed on, with its reference
        if target.is_param:
            made = self._operand(statement)
            return made is not None and made.part is not None
        # what one iteration leaves to the next is not followed
        own = [(s, {v for form in write.forms if form is not None for v in form.terms}) for s, write in target.writes]
        return not any(x.var in target.carried - indexed for s, indexed in own if s in self.body for x in s.loops)
