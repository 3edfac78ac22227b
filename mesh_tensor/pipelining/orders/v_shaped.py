"""Orders where a microbatch goes down the meshes and back up: mesh s has stages s and 2 * meshes - 1 - s."""

from __future__ import annotations

from collections import deque

from ..schedule import Action
from .one_way import Lane, Rows


def zbv(meshes: int, microbatches: int, chunks: int) -> Rows:
    """Zero bubble in a V: no bubble inside of a mesh's window where F, I and W take equally long (arXiv 2401.10241)."""
    return [_zbv_lane(mesh, meshes, microbatches).actions for mesh in range(meshes)]


def _zbv_lane(mesh: int, meshes: int, microbatches: int) -> Lane:
    down, up = mesh, 2 * meshes - 1 - mesh
    lane = Lane(microbatches)
    whole = max(2 * meshes - 1, microbatches)  # fewer microbatches run the order of so many, less what there isn't
    lane.run("F" * (2 * (meshes - mesh) - 1), down)
    for _ in range(mesh):
        lane.run("F", up)
        lane.run("F", down)
    lane.run("FIW" * (meshes - mesh), up)
    while lane.count("F", up) < whole:
        if lane.count("F", down) < whole:
            lane.run("F", down)
        lane.run("IW", down)
        lane.run("FIW", up)
    for _ in range(mesh):
        lane.run("I", down)
        lane.run("I", up)
    lane.run("IW" * (meshes - mesh), down)
    for stage in (up, down):
        lane.run("W" * (lane.count("I", stage) - lane.count("W", stage)), stage)
    return lane


def dualpipev(meshes: int, microbatches: int, chunks: int) -> Rows:
    """DualPipe cut in half: forwards of one direction beside backwards of the other (DeepSeek-V3, arXiv 2412.19437)."""
    return [_DualPipeLane(mesh, meshes, microbatches).order() for mesh in range(meshes)]


class _DualPipeLane(Lane):
    """A mesh of DualPipeV: eight phases; weight gradients that were put off wait in a queue."""

    def __init__(self, mesh: int, meshes: int, microbatches: int) -> None:
        super().__init__(microbatches)
        self.mesh, self.below = mesh, meshes - 1 - mesh
        self.down, self.up = mesh, 2 * meshes - 1 - mesh
        self.steady = microbatches - 2 * meshes + mesh + 1
        self.put_off: deque[int] = deque()

    def order(self) -> list[Action]:
        """The actions of all phases."""
        self._fill()
        for _ in range(self.steady):
            self.run("F", self.down)
            self.run("B", self.up)
            self.run("F", self.up)
            self.run("B", self.down)
        for _ in range(self.below):
            self.run("B", self.up)
            self.run("F", self.up)
            self.run("B", self.down)
        self._drain()
        return self.actions

    def _fill(self) -> None:
        self.run("F" * (2 * self.below), self.down)
        for _ in range(self.mesh + 1):
            self.run("F", self.down)
            self.run("F", self.up)
        for _ in range(self.below):
            self._input_gradient(self.up)
            self._weight_gradient()
            self.run("F", self.up)

    def _drain(self) -> None:
        """The second half of the last backwards comes in halves, so that weight gradients fill what is left."""
        for i in range(2 * (self.mesh + 1)):
            stage = self.down if i % 2 else self.up
            if i <= self.mesh:
                self.run("B", stage)
            else:
                self._input_gradient(stage)
        for _ in range(self.below):
            self._weight_gradient()
            self._input_gradient(self.down)
        while self.put_off:
            self._weight_gradient()

    def _input_gradient(self, stage: int) -> None:
        self.run("I", stage)
        self.put_off.append(stage)

    def _weight_gradient(self) -> None:
        if self.put_off:
            self.run("W", self.put_off.popleft())
