"""What a strategy takes: its mesh and its parameters' layouts, planned and simulated. Nothing is run.

What a layout takes is affine in how many alike layers there are, from the second one on: the first and the last stand
beside other things, all others beside their like. So layouts are planned for a few layers, whatever the depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import ir, tirx

from mesh_tensor.annotations.annotate import annotate
from mesh_tensor.annotations.module_annotations import Annotation
from mesh_tensor.annotations.names import reachable
from mesh_tensor.base.errors import MeshTensorError, refuse
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import uncollected
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.fewer_layers import fewer_layers
from mesh_tensor.plan.manual import NO_AXES, manual_mesh, misplaced_axes
from mesh_tensor.program.from_kernel import lower_to_program
from mesh_tensor.program.plan_module import PlanOptions, plan_graph, read_module
from mesh_tensor.program.program import Program
from mesh_tensor.program.verify import peak_bytes
from mesh_tensor.simulation.costs import working_bytes
from mesh_tensor.simulation.streams import Events, called_seconds, play

ParameterLayouts = Mapping[str, Mapping[str, int]]  # parameter -> axis -> dim
NamedLayouts = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]  # the same, in order of names


@dataclass(frozen=True)
class Strategy:
    """Layouts of parameters on a mesh, and what they take: seconds, bytes at most on a device, and bytes that a device
    receives. Parameters that have none are laid out by what uses them. `in_full`: planned as it runs, not with fewer
    layers."""

    mesh: Mesh
    layouts: NamedLayouts
    time: float
    memory: int
    received: int
    in_full: bool = True

    @property
    def shardings(self) -> dict[str, dict[str, int]]:
        """Parameter -> axis -> dim, as `distribute_module` takes them."""
        return {name: dict(layout) for name, layout in self.layouts}


class _Known:
    """Strategies that were asked for: the same question is answered once."""

    def __init__(self) -> None:
        self._known: dict[tuple, Strategy | None] = {}

    def strategy(self, mesh: Mesh, layouts: ParameterLayouts) -> Strategy | None:
        """The strategy with these layouts; None if it can't be planned."""
        named = tuple(sorted((name, tuple(sorted(layout.items()))) for name, layout in layouts.items() if layout))
        if (mesh, named) not in self._known:
            self._known[mesh, named] = self._evaluated(mesh, named)
        return self._known[mesh, named]

    def _evaluated(self, mesh: Mesh, named: NamedLayouts) -> Strategy | None:
        raise NotImplementedError


class Evaluator(_Known):
    """Strategies of one function on a machine. `planned` counts those that were
    planned, `refused` those of them that can't be. Where four or more layers are alike, it is planned with two and with
    three of them, and what more take is what the third one does; `in_full` plans all. `graph`, `atoms` and
    the `manual` axes are those of the whole function."""

    def __init__(self, mod: ir.IRModule, function: str, machine: Machine) -> None:
        super().__init__()
        self._whole = _Planned(mod, function, machine)
        self.graph, self.atoms, self.manual = self._whole.graph, self._whole.atoms, self._whole.manual
        small = [fewer for copies in (2, 3) if (fewer := fewer_layers(mod, function, {}, (), copies)) is not None]
        self._layers = small[0].layers if len(small) == 2 else 0
        self._few = [_Planned(fewer.module, function, machine) for fewer in small] if self._layers else []
        self.planned = 0

    def learn(self, strategies: Iterable[Strategy]) -> None:
        """These need not be planned again."""
        self._known |= {(strategy.mesh, strategy.layouts): strategy for strategy in strategies}

    def in_full(self, strategy: Strategy) -> Strategy | None:
        """The strategy, planned with all layers; None if it can't be."""
        if strategy.in_full:
            return strategy
        key = (strategy.mesh, strategy.layouts)
        self.planned += 1
        made = self._known[key] = _or_none(self._whole.made, *key)
        return made

    def refuse_whole(self, mesh: Mesh) -> None:
        """Raises what planning refuses where nothing is laid out, if it does."""
        self._whole.made(mesh, ())

    def _evaluated(self, mesh: Mesh, named: NamedLayouts) -> Strategy | None:
        self.planned += 1
        if not self._few:
            return _or_none(self._whole.made, mesh, named)
        two, three = (_or_none(each.made, mesh, named) for each in self._few)
        return None if two is None or three is None else _deeper(two, three, self._layers - 2, named)


class _Planned:
    """A function, planned and simulated for layouts of those of its parameters that are named."""

    def __init__(self, mod: ir.IRModule, function: str, machine: Machine) -> None:
        self.manual = manual_mesh(reachable(mod, function).values())
        self.graph, self.atoms = read_module(mod, function, self.manual, {}, PlanOptions(machine=machine), loops=True)
        self._machine = machine
        self._values = {value.name: value for value in self.graph.params}

    @uncollected
    def made(self, mesh: Mesh, named: NamedLayouts) -> Strategy:
        """What the layouts take; refused if they can't be planned."""
        if self.manual != NO_AXES and (wrong := misplaced_axes(self.manual, mesh)):
            refuse(
                wrong,
                where=f"function {self.graph.name!r}, which has manual computations",
                why="their axes are those of the mesh that the module is distributed over",
                fix=f"search a mesh that has the axes {dict(self.manual.shape)}, in this order: devices=mt.Mesh(...)",
            )
        stated = dict(self.graph.annotations)
        for name, layout in named:
            if value := self._values.get(name):
                sharding = Sharding.make(mesh, value.type.ndim, dict(layout), name=name)
                stated[value] = Annotation(sharding, open=True)
        program = plan_graph(replace(self.graph, mesh=mesh, annotations=stated), self.atoms).made.program
        return _simulated(program, self._machine, named)


def meshes_around(manual: Mesh, tried: Sequence[Mesh]) -> list[Mesh]:
    """The meshes of as many devices that have these axes, and one more, before or after them, of what is left; where
    there is none, the first one that was tried, which is refused."""
    found = []
    name = next(name for name in ("data", *(f"data{n}" for n in range(len(manual)))) if name not in manual)
    for each in dict.fromkeys(mesh.num_devices for mesh in tried):
        rest, left = divmod(each, manual.num_devices)
        if left == 0:
            found += [{name: rest, **manual.shape}, {**manual.shape, name: rest}] if rest > 1 else [dict(manual.shape)]
    return [Mesh(mesh) for mesh in found] or [tried[0]]


class KernelEvaluator(_Known):
    """Strategies of one kernel on a machine: layouts of its buffers. Those that are not named lie whole everywhere."""

    def __init__(self, func: tirx.PrimFunc, machine: Machine) -> None:
        super().__init__()
        self._func, self._machine = func, machine

    @property
    def planned(self) -> int:
        """How many there are."""
        return len(self._known)

    def refuse_whole(self, mesh: Mesh) -> None:
        """Raises what planning refuses where nothing is laid out, if it does."""
        self._made(mesh, ())

    def _evaluated(self, mesh: Mesh, named: NamedLayouts) -> Strategy | None:
        return _or_none(self._made, mesh, named)

    def _made(self, mesh: Mesh, named: NamedLayouts) -> Strategy:
        stated = {buffer.name: dict[str, int]() for buffer in self._func.buffer_map.values()}
        stated |= {name: dict(layout) for name, layout in named}
        program = lower_to_program(annotate(self._func, mesh, stated), machine=self._machine)
        return _simulated(program, self._machine, named)


def _or_none(made: Callable[[Mesh, NamedLayouts], Strategy], mesh: Mesh, named: NamedLayouts) -> Strategy | None:
    """None where planning refuses."""
    try:
        return made(mesh, named)
    except MeshTensorError:
        return None


def _simulated(program: Program, machine: Machine, named: NamedLayouts) -> Strategy:
    time, _ = play(Events(program, machine).all, len(machine.links), machine.busy)
    received = sum(step.bytes for step in program.steps)
    memory = peak_bytes(program, working_bytes(machine))
    return Strategy(program.mesh, named, time + called_seconds(program, machine), memory, received)


def _deeper(two: Strategy, three: Strategy, more: int, named: NamedLayouts) -> Strategy:
    """What the function takes with so many `more` layers than two."""
    names = "time", "memory", "received"
    time, memory, received = (getattr(two, name) + more * (getattr(three, name) - getattr(two, name)) for name in names)
    return Strategy(two.mesh, named, time, memory, received, in_full=False)
