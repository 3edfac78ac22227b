"""What splitting a factor leaves partial.

A value that is combined over a split factor is *partial*: every device has its share of it. Statements that copy it, or
combine it further with the same operation, leave it partial; the first use that needs the whole value is where the
kernel is cut, and the value completed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tvm import tirx

from mesh_tensor.base.reductions import neutral, reduction
from mesh_tensor.tir.constants import number

from .coordinates import Coordinates
from .factors import Blocked, Factor
from .live_ranges import LiveRange
from .statements import Access, Kernel, Statement, describe

#: A statement, and the live range it reads.
Use = tuple[Statement, LiveRange]


@dataclass(eq=False)
class _Partial:
    """What completes a live range's value, and the statements that combine it.

    `outer` are the loops of the factor around the whole live range: with any, it is the value of one block of theirs,
    and not yet that of a device."""

    op: str
    outer: frozenset[tirx.Var]
    contributions: list[Statement] = field(default_factory=list)


class PartialValues:
    """The live ranges that splitting one factor leaves partial, as far as they have been added and followed.

    Every method raises `Blocked` where the factor can't be split for what it finds."""

    def __init__(self, kernel: Kernel, coordinates: Coordinates, factor: Factor):
        self._kernel, self._coordinates, self._factor = kernel, coordinates, factor
        self._partial: dict[LiveRange, _Partial] = {}
        self._accounted: dict[Statement, set[tirx.Var]] = {}

    @property
    def ops(self) -> dict[LiveRange, str]:
        """What completes the values of devices; those of single blocks are combined within a device."""
        return {live_range: partial.op for live_range, partial in self._partial.items() if not partial.outer}

    def op_of(self, live_range: LiveRange) -> str | None:
        """What completes the live range, be it of a device or of a block; None if it is not partial."""
        return self._partial[live_range].op if live_range in self._partial else None

    def accounted(self, statement: Statement) -> set[tirx.Var]:
        """The loops whose iterations the statement combines, or passes on, each in its own right."""
        return self._accounted.get(statement, set())

    def contributes(self, statement: Statement) -> bool:
        """Whether the statement combines into a partial value, or passes one on."""
        partial = self._partial.get(self._coordinates.ranges.of(statement.target))
        return partial is not None and statement in partial.contributions

    def add(self, statement: Statement, op: str, over: Iterable[tirx.Var]) -> bool:
        """The statement leaves its target partial in `op`, having combined what `over` walks; returns whether that is
        new."""
        live_range = self._coordinates.ranges.of(statement.target)
        scope = {loop.var for loop in live_range.scope}
        outer = frozenset(v for v in over if v in scope)
        known = self._partial.setdefault(live_range, _Partial(op, outer))
        if (known.op, known.outer) != (op, outer):
            raise Blocked(f"{live_range.buffer.name} is combined by {known.op} and by {op} over the same dim")
        self._accounted.setdefault(statement, set()).update(over)
        if statement in known.contributions:
            return False
        known.contributions.append(statement)
        return True

    def follow(self) -> list[Use]:
        """Add what statements that keep partial values partial write; returns the uses that need the whole value."""
        uses: list[Use] = []
        changed = True
        while changed:
            changed, uses = False, []
            for statement in self._kernel.statements:
                for access in statement.reads:
                    live_range = self._coordinates.ranges.of(access)
                    partial = self._partial.get(live_range)
                    if partial is None:
                        continue
                    self._check_complete(statement, live_range, partial)
                    if self._stays_partial(statement, access, partial):
                        changed |= self._pass_on(statement, partial)
                    else:
                        uses.append((statement, live_range))
        uses += self._other_updates()
        for statement, live_range in uses:
            if self._partial[live_range].outer:
                raise Blocked(
                    f"{describe(statement)} uses the {self._partial[live_range].op} of one block of it "
                    f"({live_range.buffer.name}) before all blocks are combined"
                )
        return uses

    def _stays_partial(self, statement: Statement, access: Access, partial: _Partial) -> bool:
        return keeps_partial(statement, access, partial.op) and not self._coordinates.walks(
            statement.target, self._factor
        )

    def _pass_on(self, statement: Statement, partial: _Partial) -> bool:
        """Add what a statement makes of a partial value that it keeps partial; returns whether that is new."""
        scope = {loop.var for loop in self._coordinates.ranges.of(statement.target).scope}
        if (statement.op is None or statement.fresh) and not partial.outer <= scope:
            raise Blocked(f"{describe(statement)} keeps the last block's value only")
        return self.add(statement, partial.op, partial.outer)

    def _other_updates(self) -> list[Use]:
        """Updates of a partial value with another operation: they use the whole value."""
        return [
            (statement, live_range)
            for live_range, partial in self._partial.items()
            for statement, _ in live_range.writes
            if statement.op not in (None, partial.op) and not statement.fresh
        ]

    def _check_complete(self, statement: Statement, live_range: LiveRange, partial: _Partial) -> None:
        """A use inside the factor's loop that still adds to the value sees what came before it, in order."""
        scope = {loop.var for loop in live_range.scope}
        own = (statement.vars & self._factor.roles.keys()) - scope
        if any(loop.var in own for contribution in partial.contributions for loop in contribution.loops):
            raise Blocked(
                f"{describe(statement)} uses {live_range.buffer.name} inside the loop that is still adding to it"
            )

    def gated(self) -> list[Statement]:
        """The statements whose contribution must count on one device only: what partial values start from."""
        found = []
        for live_range, partial in self._partial.items():
            if reduction(partial.op).idempotent:
                continue
            for statement, _ in live_range.writes:
                if statement in partial.contributions or _sets_neutral(statement, partial.op):
                    continue
                if partial.outer:
                    raise Blocked(f"{describe(statement)} starts every block of it with a value that would count again")
                found.append(statement)
        return found

    def cut(self, uses: list[Use]) -> int | None:
        """The top-level statement before which all values are completed that `uses` need whole; None without any."""
        for statement, live_range in uses:
            if statement.top <= max(s.top for s in self._partial[live_range].contributions):
                raise Blocked(
                    f"{describe(statement)} needs the whole value of {live_range.buffer.name} inside the loop that "
                    "computes it"
                )
        return min((statement.top for statement, _ in uses), default=None)


def _sets_neutral(statement: Statement, op: str) -> bool:
    """Whether the statement sets what it writes to `op`'s neutral element."""
    if statement.op is not None or not statement.values:
        return False
    if statement.tile_op is not None and statement.tile_op.value is None:
        return False
    return number(statement.values[0]) == neutral(op, statement.target.buffer.dtype)


def keeps_partial(statement: Statement, access: Access, op: str) -> bool:
    """Whether the statement, given a partial value for `access`, leaves one that the same reduction completes."""
    write, record = statement.write, statement.tile_op
    if write is None or write.buffer.dtype != access.buffer.dtype or access not in statement.reads[:1]:
        return False
    if statement.op not in (None, op):
        return False
    if record is not None and record.sources:
        return not record.product and record.reduction in (None, op)
    if record is not None and record.reduction is None:
        return False
    value = statement.values[0] if statement.values else None
    return isinstance(value, tirx.BufferLoad) and value.buffer.same_as(access.buffer)
