"""What a strategy takes: its mesh and its parameters' layouts, planned and simulated. Nothing is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mesh_tensor.annotations.module_annotations import Annotation
from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.atoms import Atoms
from mesh_tensor.plan.ir import Graph
from mesh_tensor.program.lifetimes import peak_bytes
from mesh_tensor.program.plan_module import plan_graph
from mesh_tensor.simulation.streams import Events, play

Layouts = Mapping[str, Mapping[str, int]]  # parameter -> axis -> dim


@dataclass(frozen=True)
class Strategy:
    """Layouts of parameters on a mesh, and what they take: seconds, bytes at most on a device, and bytes that a device
    receives. Parameters that have none are laid out by what uses them."""

    mesh: Mesh
    layouts: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
    time: float
    memory: int
    received: int

    @property
    def shardings(self) -> dict[str, dict[str, int]]:
        """Parameter -> axis -> dim, as `distribute_module` takes them."""
        return {name: dict(layout) for name, layout in self.layouts}


class Evaluator:
    """Strategies of one function on a machine; the same question is answered once. `planned` counts those that were
    planned, `refused` those of them that can't be."""

    def __init__(self, graph: Graph, atoms: Atoms, machine: Machine) -> None:
        self._graph, self._atoms, self._machine = graph, atoms, machine
        self._values = {value.name: value for value in graph.params}
        self._known: dict[tuple, Strategy | None] = {}
        self.planned = self.refused = 0

    def strategy(self, mesh: Mesh, layouts: Layouts) -> Strategy | None:
        """The strategy with these layouts; None if it can't be planned."""
        named = tuple(sorted((name, tuple(sorted(layout.items()))) for name, layout in layouts.items() if layout))
        key = (mesh, named)
        if key not in self._known:
            self._known[key] = self._evaluated(mesh, named)
        return self._known[key]

    def _evaluated(self, mesh: Mesh, named: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]) -> Strategy | None:
        self.planned += 1
        stated = dict(self._graph.annotations)
        try:
            for name, layout in named:
                value = self._values[name]
                sharding = Sharding.make(mesh, value.type.ndim, dict(layout), name=name)
                stated[value] = Annotation(sharding, open=True)
            program = plan_graph(replace(self._graph, mesh=mesh, annotations=stated), self._atoms).made.program
            events = Events(program, self._machine)
        except MeshTensorError:
            self.refused += 1
            return None
        machine = self._machine
        time, _ = play(events.all, len(machine.links), machine.busy)
        received = sum(step.bytes for step in program.steps)
        return Strategy(mesh, named, time + machine.call, peak_bytes(program), received)
