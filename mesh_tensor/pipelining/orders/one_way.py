"""Orders where every microbatch goes down the meshes one way: those that run all forwards of a phase before its
backwards, and those that alternate both as soon as they can, so that few microbatches are held."""

from __future__ import annotations

from collections import Counter

from ..schedule import Action


def one_f_one_b(meshes: int, microbatches: int, chunks: int) -> Rows:
    """PipeDream's flush: mesh s holds at most min(meshes - s, microbatches) of them (arXiv 2006.09503)."""
    rows = []
    for mesh in range(meshes):
        lane = Lane(microbatches)
        ahead = min(meshes - 1 - mesh, microbatches)
        lane.run("F" * ahead, mesh)
        lane.run("FB" * (microbatches - ahead) + "B" * ahead, mesh)
        rows.append(lane.actions)
    return rows


def interleaved(meshes: int, microbatches: int, chunks: int) -> Rows:
    """1F1B with several stages per mesh, rounds of microbatches going round them (arXiv 2104.04473). Rounds are as many
    as there are whole ones of a microbatch per mesh; where they can't be equally long, the first ones are longer."""
    return alternating(meshes, microbatches, chunks, hop=2, backward="B")


def alternating(meshes: int, microbatches: int, chunks: int, hop: int, backward: str) -> Rows:
    """Forwards ahead by `hop` per mesh to go, then forward and backward in turn.

    `backward` "B" is the whole one; with "I" a weight gradient follows that lags by one backward per mesh before this.
    """
    count = max(1, microbatches // meshes)
    rounds = [microbatches // count + (i < microbatches % count) for i in range(count)]
    total, turn = microbatches * chunks, [chunk for size in rounds for chunk in range(chunks) for _ in range(size)]
    rows = []
    for mesh in range(meshes):
        stages = stages_of(mesh, meshes, chunks)
        forwards, backwards = [stages[c] for c in turn], [stages[chunks - 1 - c] for c in turn]
        ahead = min((chunks - 1) * rounds[0] + hop * (meshes - 1 - mesh), total)
        lag = mesh if backward == "I" else total
        lane = Lane(microbatches)
        for stage in forwards[:ahead]:
            lane.run("F", stage)
        for i, stage in enumerate(backwards):
            if ahead + i < total:
                lane.run("F", forwards[ahead + i])
            lane.run(backward, stage)
            if i >= lag:
                lane.run("W", backwards[i - lag])
        for stage in backwards[max(total - lag, 0) :] if backward == "I" else ():
            lane.run("W", stage)
        rows.append(lane.actions)
    return rows


def zb_h1(meshes: int, microbatches: int, chunks: int) -> Rows:
    """1F1B with the backward in halves: weight gradients fill the bubble, memory as 1F1B's (arXiv 2401.10241)."""
    return alternating(meshes, microbatches, chunks, hop=1, backward="I")


def zb_h2(meshes: int, microbatches: int, chunks: int) -> Rows:
    """Twice 1F1B's forwards ahead, weight gradients last: next to no bubble, twice the memory (arXiv 2401.10241)."""
    rows: Rows = []
    for mesh in range(meshes):
        lane, lag = Lane(microbatches), 2 * mesh
        lane.run("F" * min(2 * (meshes - mesh) - 1, microbatches), mesh)
        for i in range(microbatches):
            lane.run("I", mesh)
            lane.run("WF" if i >= lag else "F", mesh)
        lane.run("W" * min(lag, microbatches), mesh)
        rows.append(lane.actions)
    return rows


def gpipe(meshes: int, microbatches: int, chunks: int) -> Rows:
    """All forwards, then all backwards, microbatches in order (arXiv 1811.06965)."""
    order = range(microbatches)
    return [
        [Action("F", stage, i) for stage in stages_of(mesh, meshes, chunks) for i in order]
        + [Action("B", stage, i) for stage in reversed(stages_of(mesh, meshes, chunks)) for i in order]
        for mesh in range(meshes)
    ]


def looped_bfs(meshes: int, microbatches: int, chunks: int) -> Rows:
    """All microbatches of a stage before the mesh's next one; backwards in the opposite order (arXiv 2211.05953)."""
    forwards = forward(meshes, microbatches, chunks)
    return [row + [action._replace(kind="B") for action in reversed(row)] for row in forwards]


def forward(meshes: int, microbatches: int, chunks: int) -> Rows:
    """Forwards alone, all microbatches of a stage before the mesh's next stage."""
    return [
        [Action("F", stage, i) for stage in stages_of(mesh, meshes, chunks) for i in range(microbatches)]
        for mesh in range(meshes)
    ]


def circular(meshes: int, microbatches: int, chunks: int) -> Rows:
    """As many microbatches as meshes go round all stages, then the next ones; backwards likewise."""
    rows = []
    for mesh in range(meshes):
        stages = stages_of(mesh, meshes, chunks)
        phases = [range(i, min(i + meshes, microbatches)) for i in range(0, microbatches, meshes)]
        forwards = [Action("F", stage, i) for phase in phases for stage in stages for i in phase]
        backwards = [Action("B", stage, i) for phase in phases for stage in reversed(stages) for i in phase]
        rows.append(forwards + backwards)
    return rows


def circular_reversed(meshes: int, microbatches: int, chunks: int) -> Rows:
    """`circular`, with backwards in the opposite order of forwards."""
    forwards = [[a for a in row if a.kind == "F"] for row in circular(meshes, microbatches, chunks)]
    return [row + [action._replace(kind="B") for action in reversed(row)] for row in forwards]


def gpipe_last_1f1b(meshes: int, microbatches: int, chunks: int) -> Rows:
    """GPipe, but the last mesh runs each backward right after its forward, so nothing is held there."""
    rows = gpipe(meshes, microbatches, chunks)
    rows[-1] = [Action(kind, meshes - 1, i) for i in range(microbatches) for kind in "FB"]
    return rows


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
