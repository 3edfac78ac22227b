"""Which writes of a live range a statement may see: `x = mask(x)`, of all of a buffer, hides what was there before."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx

from mesh_tensor.tir.nodes import loads

from .live_ranges import LiveRange, covers_all
from .statements import Access, Kernel, Loop, Statement


class Reaching:
    """Follows a kernel's statements in their order."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._order: Mapping[Statement, int] = {statement: at for at, statement in enumerate(kernel.statements)}

    def writes(self, live_range: LiveRange, reader: Statement | None) -> list[Statement]:
        """The statements that may have written what the reader sees of a live range, in order; all that write it, if no
        reader is given."""
        written = [statement for statement, _ in live_range.writes]
        last = None if reader is None or live_range.is_param else self._last(written, reader)
        if reader is None or last is None:
            return written
        around = self._around(last)
        inside = {loop for loop in self._repeating(reader) if loop not in around}
        return [s for s in written if s is last or self._comes_between(last, s, reader, inside, live_range)]

    def _last(self, written: list[Statement], reader: Statement) -> Statement | None:
        """The last statement before the reader that sets all of the buffer whenever the reader runs."""
        before = [s for s in written if self._order[s] < self._order[reader]]
        return next((s for s in reversed(before) if self._settles(s, reader)), None)

    def is_before(self, statement: Statement, reader: Statement) -> bool:
        """Whether a statement that covers a buffer runs, where its conditions hold, before the reader in each iteration
        of the loops that it is in."""
        around = self._around(statement)
        return self._order[statement] < self._order[reader] and self._repeating(reader)[: len(around)] == around

    def _settles(self, statement: Statement, reader: Statement) -> bool:
        conditions = statement.conditions
        if not self.is_before(statement, reader) or len(conditions) > len(reader.conditions):
            return False
        same = all(a.same_as(b) and not loads(a) for a, b in zip(conditions, reader.conditions, strict=False))
        return same and covers_all(statement, self._kernel)

    def _repeating(self, statement: Statement) -> list[Loop]:
        """The loops that a statement is in, but for those that run once."""
        return [loop for loop in statement.loops if loop.kind == "tile" or not self._kernel.runs_once(loop.var)]

    def _around(self, statement: Statement) -> list[Loop]:
        """The loops that a statement which covers a buffer is in, but for those over its elements."""
        own = {var for form in statement.target.forms if form is not None for var in form.terms}
        return [loop for loop in self._repeating(statement) if loop.var not in own]

    def _comes_between(
        self, last: Statement, statement: Statement, reader: Statement, inside: set[Loop], live_range: LiveRange
    ) -> bool:
        """Whether a statement may write between the last one that sets all and the reader: in the order in which they
        stand, or in an earlier iteration of a loop `inside` of which the reader is."""
        if self._order[last] < self._order[statement] < self._order[reader]:
            return True
        again = inside.intersection(statement.loops)
        if statement is reader:
            again -= _own_rows(reader, live_range)
        return self._order[statement] >= self._order[reader] and bool(again)


def _own_rows(statement: Statement, live_range: LiveRange) -> set[Loop]:
    """The loops over a statement's elements, each iteration of which reads what it writes and nothing else of the live
    range."""
    target = statement.target
    reads = [access for user, access in live_range.reads if user is statement]
    if not all(access.same_forms(target) for access in reads):
        return set()
    return {loop for loop in statement.loops if _is_walked(loop.var, target)}


def _is_walked(var: tirx.Var, access: Access) -> bool:
    """Whether a loop's variable alone is the index into some dim."""
    return any(form is not None and form.variable == var for form in access.forms)
