"""What every action of a schedule waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .schedule import Action, Schedule

Takes = Mapping[int, Sequence[int]]


class Dependencies:
    """Which actions must have ended before another starts.

    `takes` says from which stages each stage takes values: from the one before it, where it isn't given. A backward
    takes the gradients from the stages that took its stage's values.
    """

    def __init__(self, schedule: Schedule, takes: Takes | None = None) -> None:
        stages = range(schedule.num_stages)
        self.takes = {s: tuple(takes.get(s, ())) if takes is not None else (s - 1,) * (s > 0) for s in stages}
        self.given_to: dict[int, list[int]] = {s: [] for s in stages}
        for stage, sources in self.takes.items():
            for source in sources:
                self.given_to.setdefault(source, []).append(stage)
        self._whole = {(a.stage, a.microbatch) for row in schedule.rows for a in row if a.kind == "B"}

    def gradient(self, stage: int, microbatch: int) -> Action:
        """The action that makes the gradient of what a stage took: its B, or its I."""
        return Action("B" if (stage, microbatch) in self._whole else "I", stage, microbatch)

    def needs(self, action: Action) -> list[Action]:
        """What must have ended before `action` starts."""
        kind, stage, microbatch = action
        if kind == "F":
            return [Action("F", source, microbatch) for source in self.takes[stage]]
        if kind == "W":
            return [Action("I", stage, microbatch)]
        later = self.given_to[stage]
        return [Action("F", stage, microbatch), *(self.gradient(target, microbatch) for target in later)]
