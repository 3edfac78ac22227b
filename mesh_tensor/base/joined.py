"""Things that turn out to be one and the same, two at a time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Joined(Generic[T]):
    """Sets of things. Each is alone until its set is joined to another."""

    def __init__(self) -> None:
        self._above: dict[T, T] = {}

    def __iter__(self) -> Iterator[T]:
        """All whose root was asked for."""
        return iter(self._above)

    def root(self, one: T) -> T:
        """The one that stands for its set: of the sets that were joined, the one of the first."""
        above = self._above
        while (up := above.setdefault(one, one)) is not one:
            above[one] = one = above[up]
        return one

    def sets(self) -> list[list[T]]:
        """The sets of all whose root was asked for, in that order."""
        found: dict[T, list[T]] = {}
        for one in self:
            found.setdefault(self.root(one), []).append(one)
        return list(found.values())

    def join(self, first: T, other: T) -> None:
        """Make two sets one, for which the root of the first one's stands."""
        self._above[self.root(other)] = self.root(first)
