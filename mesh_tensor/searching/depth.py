"""Deep functions by shallow ones: a graph whose layers repeat, with fewer of them.

What a layout takes is affine in how many layers there are, from the second one on: the first and the last stand beside
other things, all others beside their like. So layouts are planned for a few layers, whatever the depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mesh_tensor.plan.ir import Graph, Node, Value, leaves, map_tree

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
