"""What orders are written with: the actions of one mesh, microbatches counted per stage and kind."""

from __future__ import annotations

from collections import Counter

from ..schedule import Action

Rows = list[list[Action]]


class Lane:
    """The actions of one mesh: `run("F", stage)` takes the stage's next microbatch, as long as there is one."""

    def __init__(self, microbatches: int) -> None:
        self.actions: list[Action] = []
        self.microbatches = microbatches
        self._next: Counter[tuple[str, int]] = Counter()

    def run(self, kinds: str, stage: int) -> None:
        """Each of `kinds` on the stage's next microbatch of that kind; B counts as I and W."""
        for kind in kinds:
            microbatch = self.count(kind, stage)
            for half in "IW" if kind == "B" else kind:
                self._next[half, stage] += 1
            if microbatch < self.microbatches:
                self.actions.append(Action(kind, stage, microbatch))

    def count(self, kind: str, stage: int) -> int:
        """How many microbatches of a kind have been run."""
        return self._next["I" if kind == "B" else kind, stage]


def stages_of(mesh: int, meshes: int, chunks: int) -> list[int]:
    """The stages of a mesh where stages go round the meshes: mesh, mesh + meshes, ..."""
    return [chunk * meshes + mesh for chunk in range(chunks)]
