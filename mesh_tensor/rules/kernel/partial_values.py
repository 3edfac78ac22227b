"""What splitting a factor leaves partial.

A value that is combined over a split factor is *partial*: every device has its share of it. Statements that copy it, or
combine it further with the same operation, leave it partial; the first use that needs the whole value is where the
kernel is cut, and the value completed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tvm import tirx

from mesh_tensor.base.reductions import neutral, reduction
from mesh_tensor.tir.rewrite import number

from .coordinates import Coordinates
from .factors import Factor
from .live_ranges import LiveRange
from .statements import Access, Kernel, Statement, describe
from .states import State

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

    `products`: statements that leave what they read in some places partial, though these are factors there.

    What adds or follows returns why the factor can't be split for what it finds, None if it can."""

    def __init__(
        self,
        kernel: Kernel,
        coordinates: Coordinates,
        factor: Factor,
        states: Sequence[State] = (),
        explained: Collection[Statement] = (),
        products: Mapping[Statement, Collection[Access]] | None = None,
    ):
        self._kernel, self._coordinates, self._factor = kernel, coordinates, factor
        self._partial: dict[LiveRange, _Partial] = {}
        self._accounted: dict[Statement, set[tirx.Var]] = {}
        self._uses: list[Use] = []
        self._sources: set[Statement] = set()  # what makes partial values of others
        self._held: set[Statement] = set()  # stores of partial values that take them whole
        self._products = products or {}
        self._explained = set(explained) | {statement for state in states for statement in state.explained}
        self._scaled = {live_range for state in states for live_range in state.scaled}
        self._logs = {log.held for state in states for log in state.logs}
        for live_range, op in [(r, op) for state in states for r, op in state.ops.items()]:
            updates = [s for s, _ in live_range.writes if s in self._explained]
            self._partial[live_range] = _Partial(op, frozenset(), updates)

    @property
    def ops(self) -> dict[LiveRange, str]:
        """What completes the values of devices; those of single blocks are combined within a device."""
        return {live_range: partial.op for live_range, partial in self._partial.items() if not partial.outer}

    @property
    def cut(self) -> int | None:
        """The top-level statement before which all values are completed that are needed whole; None if none is."""
        return min((statement.top for statement, _ in self._uses), default=None)

    @property
    def completed(self) -> tuple[LiveRange, ...]:
        """The values that are needed whole from there on."""
        return tuple(dict.fromkeys(live_range for _, live_range in self._uses))

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

    def add(self, statement: Statement, op: str, over: Iterable[tirx.Var]) -> str | None:
        """The statement leaves its target partial in `op`, having combined what `over` walks."""
        self._sources.add(statement)
        return self._add(statement, op, over)

    def _add(self, statement: Statement, op: str, over: Iterable[tirx.Var]) -> str | None:
        live_range = self._coordinates.ranges.of(statement.target)
        scope = {loop.var for loop in live_range.scope}
        outer = frozenset(v for v in over if v in scope)
        known = self._partial.setdefault(live_range, _Partial(op, outer))
        if (known.op, known.outer) != (op, outer):
            return f"{live_range.buffer.name} is combined by {known.op} and by {op} over the same dim"
        self._accounted.setdefault(statement, set()).update(over)
        if statement not in known.contributions:
            known.contributions.append(statement)
        return None

    def follow(self) -> str | None:
        """Add what statements that keep partial values partial write, and note the uses that need the whole value."""
        while True:
            known = -1
            while known < (now := sum(len(partial.contributions) for partial in self._partial.values())):
                known, self._uses = now, []
                for statement in [s for s in self._kernel.statements if s not in self._explained]:
                    for access in statement.reads:
                        if problem := self._follow(statement, access):
                            return problem
            if not self._hold():
                break
        self._uses += self._other_updates() + self._uses_before_states()
        for statement, live_range in self._uses:
            if self._partial[live_range].outer:
                return (
                    f"{describe(statement)} uses the {self._partial[live_range].op} of one block of it "
                    f"({live_range.buffer.name}) before all blocks are combined"
                )
        return None

    def _hold(self) -> bool:
        """Of results into which statements store some places before a use of a whole value, and others after it, take
        all stores for uses: else all places would be completed at each use. Whether there were others."""
        found = [live_range for live_range in self._partial if self._is_stored_around_a_use(live_range)]
        for live_range in found:
            stores = self._partial.pop(live_range).contributions
            self._held.update(stores)
            for store in stores:
                self._accounted.pop(store, None)
        return bool(found)

    def _is_stored_around_a_use(self, live_range: LiveRange) -> bool:
        """Whether nothing reads a result, and all that makes it partial is to store partial values, before a use of
        whole values and after it."""
        stores, tops = self._partial[live_range].contributions, [s.top for s, _ in live_range.writes]
        if not live_range.is_param or live_range.reads or any(s.op is not None or s in self._sources for s in stores):
            return False
        return any(min(tops) < use.top <= max(tops) for use, _ in self._uses) and all(map(self._may_wait, stores))

    def _may_wait(self, store: Statement) -> bool:
        """Whether what a statement stores can be completed before."""
        read = [p for a in store.reads if (p := self._partial.get(self._coordinates.ranges.of(a))) is not None]
        return all(not p.outer and store.top > max(s.top for s in p.contributions) for p in read)

    def _follow(self, statement: Statement, access: Access) -> str | None:
        """What a statement makes of a value that it reads."""
        live_range = self._coordinates.ranges.of(access)
        partial = self._partial.get(live_range)
        if partial is None:
            return None
        if problem := self._why_incomplete(statement, live_range, partial):
            return problem
        own = None if statement.write is None else self._kernel.own.get(statement.write.buffer.name)
        if own is not None:
            return self.add(statement, own, partial.outer) if own else None
        if any(access is block for block in self._products.get(statement, ())):
            return self._pass_on(statement, partial)
        is_plain = live_range not in self._scaled and statement not in self._held
        if (
            is_plain
            and keeps_partial(statement, access, partial.op)
            and not self._coordinates.lies_in(statement.target, self._factor)
        ):
            return self._pass_on(statement, partial)
        self._uses.append((statement, live_range))
        return None

    def _pass_on(self, statement: Statement, partial: _Partial) -> str | None:
        """Add what a statement makes of a partial value that it keeps partial."""
        scope = {loop.var for loop in self._coordinates.ranges.of(statement.target).scope}
        if (statement.op is None or statement.fresh) and not partial.outer <= scope:
            return f"{describe(statement)} keeps the last block's value only"
        return self._add(statement, partial.op, partial.outer)

    def _other_updates(self) -> list[Use]:
        """Updates of a partial value with another operation: they use the whole value."""
        return [
            (statement, live_range)
            for live_range, partial in self._partial.items()
            for statement, _ in live_range.writes
            if statement.op not in (None, partial.op) and not statement.fresh and statement not in self._explained
        ]

    def _uses_before_states(self) -> list[Use]:
        """What updates of states use that is partial, and no part of the update itself."""
        return [
            (statement, live_range)
            for live_range, partial in self._partial.items()
            for statement, _ in live_range.reads
            if statement in self._explained and not self._explained.intersection(partial.contributions)
        ]

    def _why_incomplete(self, statement: Statement, live_range: LiveRange, partial: _Partial) -> str | None:
        """A use inside the factor's loop that still adds to the value sees what came before it, in order."""
        scope = {loop.var for loop in live_range.scope}
        own = (statement.vars & self._factor.roles.keys()) - scope
        if any(loop.var in own for contribution in partial.contributions for loop in contribution.loops):
            uses = f"{describe(statement)} uses {live_range.buffer.name} inside the loop that is still adding to it"
            return f"{uses} (mt.combine can say how what two parts of the loop leave goes together)"
        return None

    def starts(self) -> Iterator[tuple[Statement, str | None]]:
        """The statements that partial values start from, whose contribution must count on one device only; and why
        it can't."""
        for live_range, partial, statement in [(r, p, s) for r, p in self._partial.items() for s, _ in r.writes]:
            once = not reduction(partial.op).idempotent or live_range in self._logs
            counts_again = once and statement not in partial.contributions
            if counts_again and not _sets_neutral(statement, partial.op):
                again = f"{describe(statement)} starts every block of it with a value that would count again"
                yield statement, again if partial.outer else None

    def why_not_cut(self) -> str | None:
        """Why the kernel can't be cut where values are needed whole."""
        for statement, live_range in self._uses:
            if statement.top <= max(s.top for s in self._partial[live_range].contributions):
                return (
                    f"{describe(statement)} needs the whole value of {live_range.buffer.name} inside the loop that "
                    "computes it"
                )
        return None


def _sets_neutral(statement: Statement, op: str) -> bool:
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
