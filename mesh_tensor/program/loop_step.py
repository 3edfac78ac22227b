"""The step that runs other steps several times, and what it hands on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .program import Program
    from .steps import Meanings, Sends, Step, T


@dataclass(frozen=True)
class Carried:
    """What a loop hands on from step to step: `first` before it, `now` at a step's beginning, `then` at its end; `last`
    after the loop."""

    first: str
    now: str
    then: str
    last: str


@dataclass(frozen=True, eq=False)
class LoopStep:
    """Devices run `body` several times: `count` times, or as long as `test`, a program that is run before every time,
    gives a true value `goes_on`. Bodies take values of the program under their own names, and what is `carried`.
    `stacked`: values that each time makes, with the one after the loop that has them all. `where` names the binding."""

    body: Program
    count: int | None
    test: Program | None
    goes_on: str
    carried: tuple[Carried, ...]
    stacked: tuple[tuple[str, str], ...]
    where: str

    begins = ends = ()
    collective = starts = None
    is_long = True

    @property
    def reads(self) -> tuple[str, ...]:
        """What it begins with, and what its steps take besides."""
        inner = {each.now for each in self.carried}
        taken = [name for body in (self.body, self.test) if body is not None for name in body.takes]
        names = [*(each.first for each in self.carried), *(name for name in taken if name not in inner)]
        return tuple(dict.fromkeys(names))

    needs = reads

    @property
    def writes(self) -> tuple[str, ...]:
        return (*(each.last for each in self.carried), *(rows for _, rows in self.stacked))

    makes = writes

    @property
    def uses(self) -> tuple[str, ...]:
        return (*self.reads, *self.writes)

    @property
    def inner(self) -> tuple[Step, ...]:
        """The steps of one time."""
        return (*(self.test.steps if self.test is not None else ()), *self.body.steps)

    @property
    def flops(self) -> int:
        """Of all times; of one, where data says how many there are."""
        return (self.count or 1) * sum(step.flops for step in self.inner)

    @property
    def bytes(self) -> int:
        """Of all times; of one, where data says how many there are."""
        return (self.count or 1) * sum(step.bytes for step in self.inner)

    @property
    def sends(self) -> Sends:
        """Of all times; of one, where data says how many there are."""
        return tuple([(each, n * (self.count or 1)) for step in self.inner for each, n in step.sends])

    @property
    def times(self) -> str:
        """How often its steps are run, in words."""
        return "as long as it says" if self.count is None else f"{self.count} times"

    @property
    def words(self) -> str:
        return f"loop {self.where}, {self.times}: {'; '.join(step.words for step in self.inner)}"

    def mean(self, meanings: Meanings[T]) -> T:
        return meanings.loop(self)
