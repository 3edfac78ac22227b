"""What a strategy takes: its mesh and its parameters' layouts, planned and simulated. Nothing is run. Deep functions
are looked at by shallow ones: a graph whose layers repeat, with fewer of them.

What a layout takes is affine in how many layers there are, from the second one on: the first and the last stand beside
other things, all others beside their like. So layouts are planned for a few layers, whatever the depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mesh_tensor.annotations.module_annotations import Annotation
from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import uncollected
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.atoms import Atoms, find_atoms
from mesh_tensor.plan.ir import Graph, Node, Value, leaves, map_tree
from mesh_tensor.plan.tir_rule import node_rules
from mesh_tensor.program.plan_module import plan_graph
from mesh_tensor.program.verify import peak_bytes
from mesh_tensor.simulation.streams import Events, play

Layouts = Mapping[str, Mapping[str, int]]  # parameter -> axis -> dim
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


class Evaluator:
    """Strategies of one function on a machine; the same question is answered once. `planned` counts those that were
    planned, `refused` those of them that can't be. Where many layers are alike, it is planned with two and with three
    of them, and what more take is what the third one does; `in_full` plans all."""

    def __init__(self, graph: Graph, atoms: Atoms, machine: Machine) -> None:
        self._whole, self._machine = _Planned(graph, atoms, machine), machine
        self._layers = repeated(graph)
        self._few = [] if self._layers is None else [_with(graph, self._layers, n, machine) for n in (2, 3)]
        self._known: dict[tuple, Strategy | None] = {}
        self.planned = self.refused = 0

    def strategy(self, mesh: Mesh, layouts: Layouts) -> Strategy | None:
        """The strategy with these layouts; None if it can't be planned."""
        named = tuple(sorted((name, tuple(sorted(layout.items()))) for name, layout in layouts.items() if layout))
        key = (mesh, named)
        if key not in self._known:
            self._known[key] = self._evaluated(mesh, named)
        return self._known[key]

    def learn(self, strategies: Iterable[Strategy]) -> None:
        """These need not be planned again."""
        self._known |= {(strategy.mesh, strategy.layouts): strategy for strategy in strategies}

    def in_full(self, strategy: Strategy) -> Strategy | None:
        """The strategy, planned with all layers; None if it can't be."""
        if strategy.in_full:
            return strategy
        key = (strategy.mesh, strategy.layouts)
        self.planned += 1
        made = self._known[key] = self._whole.strategy(*key)
        return made

    def _evaluated(self, mesh: Mesh, named: NamedLayouts) -> Strategy | None:
        self.planned += 1
        if self._layers is None:
            made = self._whole.strategy(mesh, named)
        else:
            two, three = (each.strategy(mesh, named) for each in self._few)
            made = None if two is None or three is None else _deeper(two, three, self._layers.count - 2, named)
        self.refused += made is None
        return made


class _Planned:
    """A graph, planned and simulated for layouts of those of its parameters that are named."""

    def __init__(self, graph: Graph, atoms: Atoms, machine: Machine) -> None:
        self._graph, self._atoms, self._machine = graph, atoms, machine
        self._values = {value.name: value for value in graph.params}

    @uncollected
    def strategy(self, mesh: Mesh, named: NamedLayouts) -> Strategy | None:
        """What the layouts take; None if they can't be planned."""
        stated = dict(self._graph.annotations)
        try:
            for name, layout in named:
                if value := self._values.get(name):
                    sharding = Sharding.make(mesh, value.type.ndim, dict(layout), name=name)
                    stated[value] = Annotation(sharding, open=True)
            program = plan_graph(replace(self._graph, mesh=mesh, annotations=stated), self._atoms).made.program
            events = Events(program, self._machine)
        except MeshTensorError:
            return None
        machine = self._machine
        time, _ = play(events.all, len(machine.links), machine.busy)
        received = sum(step.bytes for step in program.steps)
        return Strategy(mesh, named, time + machine.call, peak_bytes(program), received)


def _with(graph: Graph, layers: Repeated, count: int, machine: Machine) -> _Planned:
    short = shortened(graph, layers, count)
    return _Planned(short, find_atoms(short, node_rules(short, replicate_unknown=False)), machine)


def _deeper(two: Strategy, three: Strategy, more: int, named: NamedLayouts) -> Strategy:
    """What the function takes with so many `more` layers than two."""
    names = "time", "memory", "received"
    time, memory, received = (getattr(two, name) + more * (getattr(three, name) - getattr(two, name)) for name in names)
    return Strategy(two.mesh, named, time, memory, received, in_full=False)


_LEAST = 4  # layers from which there is something to leave out


@dataclass(frozen=True)
class Repeated:
    """`count` layers of a graph, of `length` nodes each, from node number `start` on, that compute alike."""

    start: int
    length: int
    count: int

    def layer(self, graph: Graph, number: int) -> list[Node]:
        """The nodes of a layer."""
        first = self.start + number * self.length
        return graph.nodes[first : first + self.length]

    @property
    def end(self) -> int:
        """The number of the node after the last layer."""
        return self.start + self.count * self.length


def repeated(graph: Graph) -> Repeated | None:
    """The layers that are most of a graph; None if there are few, or more than what a layer makes goes from it to the
    next and from the last one on."""
    marks = _marks(graph.nodes)
    found = max(_periods(marks), key=lambda each: (each.count * each.length, -each.length), default=None)
    if found is None or not _is_chain(graph, found):
        return None
    return found


def shortened(graph: Graph, layers: Repeated, count: int) -> Graph:
    """The graph with so many of its layers; what comes after them takes the last one's results."""
    kept, last = layers.layer(graph, count - 1), layers.layer(graph, layers.count - 1)
    other = {old: new for a, b in zip(last, kept, strict=True) for old, new in zip(a.outputs, b.outputs, strict=True)}
    before = graph.nodes[: layers.start + count * layers.length]
    after = [_with_inputs(node, other) for node in graph.nodes[layers.end :]]
    nodes, result = [*before, *after], map_tree(graph.result, lambda value: other.get(value, value))
    used = {value for node in nodes for value in node.inputs} | set(leaves(result))
    taken = {value for node in graph.nodes for value in node.inputs}
    params = [value for value in graph.params if value in used or value not in taken]
    stated = {value: stated for value, stated in graph.annotations.items() if value in used}
    return replace(graph, nodes=nodes, params=params, result=result, annotations=stated)


def _with_inputs(node: Node, other: Mapping[Value, Value]) -> Node:
    return replace(node, inputs=tuple(other.get(value, value) for value in node.inputs))


def _marks(nodes: Sequence[Node]) -> np.ndarray:
    """A number per node: equal ones compute the same on the same types."""
    known: dict[tuple, int] = {}
    return np.array([known.setdefault(_mark(node), len(known)) for node in nodes], dtype=np.int64)


def _mark(node: Node) -> tuple:
    kind = (node.call.name, node.call.inputs) if node.is_annotation else node.call.kind
    return kind, id(node.kernel)


def _periods(marks: np.ndarray) -> list[Repeated]:
    """Per number of nodes, the longest run of nodes that repeats after so many."""
    found = []
    for length in range(1, len(marks) // _LEAST + 1):
        ends = np.flatnonzero(np.append(marks[:-length] != marks[length:], True))
        starts = np.insert(ends[:-1] + 1, 0, 0)
        best = int(np.argmax(ends - starts))
        count = int(ends[best] - starts[best]) // length + 1
        if count >= _LEAST:
            found.append(Repeated(int(starts[best]), length, count))
    return found


def _is_chain(graph: Graph, layers: Repeated) -> bool:
    """Whether every layer takes what the one before it makes as the second one does, and nothing of other layers; what
    comes after takes the last one's results alone; and every layer has parameters of its own at the same places."""
    made: dict[Value, tuple[int, int, int]] = {}  # layer, node in it, result
    for number in range(layers.count):
        for place, node in enumerate(layers.layer(graph, number)):
            made |= {value: (number, place, position) for position, value in enumerate(node.outputs)}
    params = set(graph.params)

    def role(value: Value, number: int) -> tuple:
        if value in made:
            layer, place, position = made[value]
            return (number - layer, place, position)
        own = value in params or value.data is not None
        return ("own", value.type.shape, value.type.dtype) if own else ("shared", value)

    def roles(number: int) -> list[list[tuple]]:
        return [[role(value, number) for value in node.inputs] for node in layers.layer(graph, number)]

    second = roles(1)
    if any(isinstance(each[0], int) and each[0] > 1 for node in second for each in node):
        return False
    if any(roles(number) != second for number in range(2, layers.count)):
        return False
    later = [value for node in graph.nodes[layers.end :] for value in node.inputs] + leaves(graph.result)
    return all(made[value][0] == layers.count - 1 for value in later if value in made) and not graph.state
