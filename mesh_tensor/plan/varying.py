"""Along which axes every device has a value of its own: inside of manual computations."""

from __future__ import annotations

from collections.abc import Mapping

from mesh_tensor.base.mesh import Mesh
from mesh_tensor.rules.operator.call import operator_name
from mesh_tensor.rules.operator.manual import ALL_DEVICES, PER_DEVICE, axes_of

from .ir import Graph, Node, Value

Axes = tuple[tuple[str, int], ...]  # with their sizes, in mesh order


def varying(graph: Graph) -> dict[Value, Axes]:
    """The axes of every value that has some."""
    found: dict[Value, Axes] = {}
    if not any(_is_edge(node) for node in graph.nodes):
        return found
    for node in graph.nodes:
        if axes := node_axes(node, found, graph.mesh):
            found |= dict.fromkeys(node.outputs, axes)
    return found


def node_axes(node: Node, known: Mapping[Value, Axes], mesh: Mesh) -> Axes:
    """The axes of a node's results, of those of its operands."""
    axes = {axis for value in node.inputs for axis, _ in known.get(value, ())}
    if _is_edge(node):
        mine = set(axes_of(node.call))
        axes = axes | mine if operator_name(node.call) == PER_DEVICE else axes - mine
    return tuple([(axis, mesh.size(axis)) for axis in mesh if axis in axes]) if axes else ()


def at_the_edge(graph: Graph, devices: Mapping[Value, Axes]) -> dict[Value, frozenset[str]]:
    """The axes of the values that come into manual computations, and of those that leave them."""
    if not devices:
        return {}
    edge = [value for node in graph.nodes if _is_edge(node) for value in (*node.inputs, *node.outputs)]
    return {value: frozenset(axis for axis, _ in devices[value]) for value in edge if value in devices}


def _is_edge(node: Node) -> bool:
    return operator_name(node.call) in (PER_DEVICE, ALL_DEVICES)
