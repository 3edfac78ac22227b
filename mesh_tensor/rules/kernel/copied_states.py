"""What a loop carries twice: a state, and a copy of it, as the operand of products, or in another precision. Where that
is a copy before the loop and after every iteration, it is made again of the state wherever that is taken over."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir

from mesh_tensor.base.dtypes import itemsize
from mesh_tensor.tir.rewrite import number
from mesh_tensor.tir.tile_ops import Copy, Fill

from .live_ranges import LiveRange, LiveRanges
from .statements import Kernel, Loop, Statement


def copied_states(
    kernel: Kernel, of: LiveRanges, loop: Loop, ranges: Sequence[LiveRange]
) -> dict[LiveRange, Statement]:
    """Of what the loop carries, what is a copy of something else that it carries, with the statement that copies."""
    known = _Copies(kernel, of, loop)
    found: dict[LiveRange, Statement] = {}
    for live_range in ranges:
        made = known.made(live_range)
        source = None if made is None else of.of(made.reads[0])
        kept = [of.of(other.reads[0]) for other in found.values()]
        if made is not None and source in ranges and source not in found and live_range not in kept:
            found[live_range] = made
    return found


class _Copies:
    def __init__(self, kernel: Kernel, ranges: LiveRanges, loop: Loop):
        self.ranges, self.loop = ranges, loop
        self.order = {statement: number for number, statement in enumerate(kernel.statements)}
        self.top = min(s.top for s in kernel.statements if loop.var in s.vars)

    def made(self, live_range: LiveRange) -> Statement | None:
        """The statement that makes the live range a copy of another one; None if there is none."""
        last = self._last(live_range, inside=True)
        if last is None or not self._is_copy(last):
            return None
        source = self.ranges.of(last.reads[0])
        after = self._last(source, inside=True)
        is_newer = after is not None and self.order[after] > self.order[last]
        alike = source is not live_range and not is_newer and self._start_alike(live_range, source)
        return last if alike else None

    def _last(self, live_range: LiveRange, *, inside: bool) -> Statement | None:
        """What writes the live range last, in the loop or before it."""
        own = [s for s, _ in live_range.writes if (self.loop.var in s.vars if inside else s.top < self.top)]
        return max(own, key=self.order.__getitem__, default=None)

    def _start_alike(self, copy: LiveRange, state: LiveRange) -> bool:
        """Whether the one is a copy of the other before the loop, too."""
        first, second = self._last(copy, inside=False), self._last(state, inside=False)
        if first is None or second is None:
            return False
        if self._is_copy(first) and self.ranges.of(first.reads[0]) is state:
            return self.order[second] < self.order[first]
        exact = copy.buffer.dtype == state.buffer.dtype or _holds(state.buffer.dtype, copy.buffer.dtype)
        if self._is_copy(second) and self.ranges.of(second.reads[0]) is copy:
            return exact and self.order[first] < self.order[second]
        values = [self._filled_with(first), self._filled_with(second)]
        return (
            values[0] is not None
            and values[0] == values[1]
            and (copy.buffer.dtype == state.buffer.dtype or not values[0])
        )

    def _is_copy(self, statement: Statement) -> bool:
        record = statement.tile_op
        if not isinstance(record, Copy) or not self._runs_each_time(statement):
            return False
        same = ir.structural_equal([*record.src.buffer.shape], [*record.dst.buffer.shape])
        return same and record.src.is_whole and record.dst.is_whole

    def _filled_with(self, statement: Statement) -> float | None:
        record = statement.tile_op
        whole = isinstance(record, Fill) and record.dst.is_whole and self._runs_each_time(statement)
        return number(record.value) if whole and isinstance(record, Fill) else None

    def _runs_each_time(self, statement: Statement) -> bool:
        around = [x for x in statement.loops if x is not self.loop and x.kind not in ("grid", "tile")]
        return not around and not statement.conditions and not statement.may_be_skipped


def _holds(wide: str, narrow: str) -> bool:
    """Whether a float of one type is one of the other, too."""
    return wide == "float32" and narrow.startswith(("float", "bfloat")) and itemsize(narrow) < itemsize(wide)
