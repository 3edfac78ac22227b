"""What a state that a loop carries is made of: maxima, sums that are scaled to them, and logarithms of such sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.tir.linear import Linear

from .live_ranges import LiveRange
from .statements import Loop, Statement


@dataclass(frozen=True, eq=False)
class RunningMax:
    """A maximum. `unbounded`: it may start at the lowest value, from which nothing can be taken. `of_block`: it is that
    of one block alone, whichever was the last. `stand_in`: what ends an iteration with a number in its place where it
    is the lowest value, from which later ones go on. What comes after the loop makes the same of the maximum of all as
    of these two."""

    held: LiveRange
    unbounded: bool
    of_block: bool = False
    stand_in: Statement | None = None

    @property
    def is_relative(self) -> bool:
        """Whether it need not be the maximum of all."""
        return self.of_block or self.stand_in is not None


@dataclass(frozen=True, eq=False)
class ScaledSum:
    """A sum of terms that are each times `2 ** (-rate * of)`. `place`: the row of `of`, in terms of the sum's dims."""

    held: LiveRange
    of: RunningMax
    rate: float
    place: tuple[Linear, ...]


@dataclass(frozen=True, eq=False)
class LogSum:
    """The logarithm of a sum: `2 ** (rate * held)` is one."""

    held: LiveRange
    rate: float


@dataclass(frozen=True, eq=False)
class State:
    """What one loop, in the top-level statement `top`, carries. `explained`: the statements that are understood as part
    of its update; `neutral`: of those that combine positions, whether what lies past the dim's end changes nothing.
    `uses`: what the loop's statements read that may depend on earlier blocks. `guarded`: loads of maxima in powers, for
    which something has to stand in while nothing is known of a row."""

    loop: Loop
    top: int
    maxima: tuple[RunningMax, ...]
    sums: tuple[ScaledSum, ...]
    logs: tuple[LogSum, ...]
    plain: tuple[LiveRange, ...]
    explained: frozenset[Statement]
    neutral: Mapping[Statement, bool]
    uses: Mapping[Statement, Mapping[LiveRange, None]]
    guarded: Mapping[Statement, tuple[tirx.BufferLoad, ...]]
    by_position: bool

    @property
    def ops(self) -> dict[LiveRange, str]:
        """What every part of the state is combined by, once it is scaled alike."""
        largest = [*(part.held for part in self.maxima), *(part.held for part in self.logs)]
        sums = [*(part.held for part in self.sums), *self.plain]
        return {**dict.fromkeys(largest, "max"), **dict.fromkeys(sums, "sum")}

    @property
    def takes_blocks(self) -> bool:
        """Whether a block of padding would have no maximum that could be taken from its elements."""
        return self.by_position or bool(self.logs) or any(running.of_block for running in self.maxima)

    @property
    def scaled(self) -> list[LiveRange]:
        """The parts that can't be combined as they are."""
        return [*(part.held for part in self.sums), *(part.held for part in self.logs)]
