"""Drawing, and writing lines of a program: what the scenes of random kernels, programs and compositions share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

from .spec import Block, Line


class Dice:
    """Choices that `random` makes."""

    random: Random

    def pick(self, options: Sequence[Any]) -> Any:
        """One of `options`; what is to come more often is in it more often."""
        return self.random.choice(list(options))

    def chance(self, percent: int) -> bool:
        """True in so many percent."""
        return self.random.randrange(100) < percent

    def number(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        return self.random.randint(low, high)


class Writer(Dice):
    """Emits `lines`, and counts the names that were made of every stem."""

    lines: list[Line]
    counts: dict[str, int]

    def name(self, stem: str) -> str:
        """A new name."""
        count = self.counts[stem] = self.counts.get(stem, -1) + 1
        return f"{stem}{count}"

    def emit(self, *lines: str) -> None:
        """Write lines in the open block."""
        self.lines.extend(lines)

    @contextmanager
    def block(self, *headers: str) -> Iterator[None]:
        """What is emitted inside stands below these headers, nested."""
        outer, self.lines = self.lines, []
        try:
            yield
        finally:
            body, self.lines = self.lines, outer
            for header in reversed(headers):
                body = [Block(header, tuple(body))]
            self.lines.extend(body)
