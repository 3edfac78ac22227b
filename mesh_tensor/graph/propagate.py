"""Propagation: a layout for every value of a Graph, from those that were stated.

What is stated spreads both ways through the operators' factors, in waves: annotations of lower priority first; through
factors that results have before factors that are summed over; from operands to results before the other ways; what
stands nearer to an annotation before what stands farther (operators with one operand are no distance: a transposed
weight is as near as the weight); then the larger tensor; then the order in the module. A value takes, per mesh axis,
what reaches it first; what comes later and disagrees is a conflict: reported, and a change of layout there.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..errors import refuse
from ..sharding import Partial, Placement, Shard, Sharding
from .atoms import Atoms, NodeRule
from .ir import Annotation, Graph, Node, Value


@dataclass(frozen=True)
class Conflict:
    """At `node`, `axis` is asked to split several factors; `taken` is what spread, `other` what did not."""

    node: Node
    axis: str
    taken: str
    other: str

    def __str__(self) -> str:
        return f"{self.node.where} ({self.node.call.name}): axis {self.axis} splits {self.taken}, not {self.other}"


@dataclass(eq=False)
class Layouts:
    """The layout of every value, over the value's atoms, and the conflicts that were met."""

    of: dict[Value, Sharding]
    conflicts: list[Conflict] = field(default_factory=list)


def propagate(graph: Graph, atoms: Atoms) -> Layouts:
    """A layout for every value of the graph. Deterministic."""
    spread = _Spread(graph, atoms)
    for priority in sorted({a.priority for a in graph.annotations.values()}):
        for value, annotation in graph.annotations.items():
            if annotation.priority == priority:
                spread.state(value, annotation)
        spread.run()
    layouts = {value: _layout(graph, atoms, value, spread.places(value)) for value in graph.values()}
    return Layouts(layouts, list(dict.fromkeys(spread.conflicts())))


def _layout(graph: Graph, atoms: Atoms, value: Value, places: Mapping[str, int]) -> Sharding:
    """What splits the value's atoms, and what it was stated to be partial over."""
    placements: dict[str, Placement] = {axis: Shard(place) for axis, place in places.items()}
    if value in graph.annotations:
        placements |= {axis: Partial(op) for axis, op in graph.annotations[value].sharding.partial}
    return Sharding.of(graph.mesh, len(atoms.shape(value)), placements)


class _Spread:
    """Which atom of which value every axis splits, as far as it is known.

    A wave is (in a summed factor?, to operands?, distance, -elements, order, axis, tensor of the node, node)."""

    def __init__(self, graph: Graph, atoms: Atoms) -> None:
        self._graph, self._atoms, self._mesh = graph, atoms, graph.mesh
        self._places: dict[Value, dict[str, int]] = {value: {} for value in graph.values()}
        self._closed: dict[Value, frozenset[str]] = {}
        self._order = {value: index for index, value in enumerate(graph.values())}
        self._touching: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            for value in dict.fromkeys((*node.inputs, *node.outputs)):
                self._touching.setdefault(value, []).append(node)
        self._factor: dict[tuple[Node, str], str] = {}
        self._waves: list[tuple] = []

    def places(self, value: Value) -> dict[str, int]:
        """axis -> atom."""
        return self._places[value]

    def state(self, value: Value, annotation: Annotation) -> None:
        """The layout that was stated for a value: its own axes stay, and all others unless it is open."""
        places = refine_sharding(annotation.sharding, value, self._atoms)
        stated = {*places, *(axis for axis, _ in annotation.sharding.partial)}
        self._closed[value] = frozenset(stated if annotation.open else self._mesh)
        self._places[value] = {a: p for a, p in self._places[value].items() if a not in self._closed[value]} | places
        for axis in places:
            self._push(value, axis, 0)

    def run(self) -> None:
        """Spread until nothing changes."""
        while self._waves:
            _, back, distance, _, _, axis, index, node = heapq.heappop(self._waves)
            self._meet(node, axis, index, distance, back)

    def conflicts(self) -> Iterator[Conflict]:
        """Where an axis reaches an operator through several factors."""
        for node in self._graph.nodes:
            rule = self._atoms.rules[node]
            for axis in self._mesh:
                found = [f for value, factors in tensors_of(node, rule) if (f := self._factor_at(value, factors, axis))]
                different = list(dict.fromkeys(found))
                taken = self._factor.get((node, axis))
                for other in different:
                    if taken is not None and other != taken:
                        yield Conflict(node, axis, taken, other)

    def _push(self, value: Value, axis: str, distance: int) -> None:
        """The axis now splits the value: every operator on it hears of that."""
        for node in self._touching.get(value, ()):
            rule = self._atoms.rules[node]
            for index, (tensor, factors) in enumerate(tensors_of(node, rule)):
                if tensor is value and (factor := self._factor_at(value, factors, axis)):
                    order = self._order[value]
                    for back in (False, True):
                        wave = (factor in rule.reduced, back, distance, -value.type.elements, order, axis, index, node)
                        heapq.heappush(self._waves, _Wave(wave))

    def _factor_at(self, value: Value, factors: tuple[str | None, ...], axis: str) -> str | None:
        place = self._places[value].get(axis)
        return None if place is None else factors[place]

    def _meet(self, node: Node, axis: str, index: int, distance: int, back: bool) -> None:
        """A wave reaches an operator: the first one per axis goes on, to its operands or to its results."""
        rule = self._atoms.rules[node]
        tensors = list(tensors_of(node, rule))
        factor = self._factor_at(*tensors[index], axis)
        if factor is None or self._factor.setdefault((node, axis), factor) != factor:
            return
        count = len(node.inputs)
        for value, factors in tensors[:count] if back else tensors[count:]:
            if factor in factors and axis not in self._places[value] and axis not in self._closed.get(value, ()):
                self._places[value][axis] = factors.index(factor)
                self._push(value, axis, distance + (count > 1))


class _Wave(tuple):
    """Waves are ordered by all but the node."""

    def __lt__(self, other: tuple) -> bool:
        return self[:-1] < other[:-1]


def tensors_of(node: Node, rule: NodeRule) -> Iterator[tuple[Value, tuple[str | None, ...]]]:
    """The operands and results of a node, with the factors of their atoms."""
    yield from zip(node.inputs, rule.inputs, strict=True)
    yield from zip(node.outputs, rule.outputs, strict=True)


def refine_sharding(sharding: Sharding, value: Value, atoms: Atoms) -> dict[str, int]:
    """The atom that each axis of a stated layout splits: of the dim that it names, the first atom that the axes on it
    divide evenly, else the first that is large enough.

    Raises:
        MeshTensorError: the layout is for another number of dims.
    """
    if sharding.ndim != value.type.ndim:
        refuse(
            f"'{sharding}' is a layout of {sharding.ndim} dims",
            where=f"value {value.name!r} of shape {value.type.shape}",
            fix="state it for the value's own dims",
        )
    places: dict[str, int] = {}
    shape = atoms.shape(value)
    taken = dict.fromkeys(range(len(shape)), 1)
    for axis, dim in sharding.as_dict().items():
        parts = sharding.mesh.size(axis)
        positions = atoms.positions(value, dim)
        even = [p for p in positions if shape[p] % (taken[p] * parts) == 0]
        large = [p for p in positions if shape[p] >= taken[p] * parts]
        places[axis] = (even or large or list(positions))[0]
        taken[places[axis]] *= parts
    return places
