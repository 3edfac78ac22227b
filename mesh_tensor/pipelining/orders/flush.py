"""Orders that run all forwards of a phase before its backwards."""

from __future__ import annotations

from ..schedule import Action
from .lanes import Rows, stages_of


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
