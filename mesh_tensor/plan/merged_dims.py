"""Dims that are taken apart elsewhere (rows of windows, as in shifted-window attention) and of which windows are read:
they are made one dim again before that, so that what is next to a tile can be exchanged."""

from __future__ import annotations

from dataclasses import replace

from tvm import relax

from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.shape import merge_call

from .atoms import Atoms
from .ir import Graph, Node, Value


def with_merged_dims(graph: Graph, atoms: Atoms) -> Graph | None:
    """The graph in which operators read windows of dims that are one atom; None where they all do."""
    found: dict[Node, dict[int, list[int]]] = {}
    for node in graph.nodes:
        for operand, dim in atoms.rules[node].rule.windows if node.kernel is None else ():
            if len(atoms.of[node.inputs[operand]][dim]) > 1:
                found.setdefault(node, {}).setdefault(operand, []).append(dim)
    if not found:
        return None
    nodes = []
    for node in graph.nodes:
        inputs = list(node.inputs)
        for operand, dims in found.get(node, {}).items():
            nodes.append(_merge(node, inputs[operand], dims))
            (inputs[operand],) = nodes[-1].outputs
        nodes.append(replace(node, inputs=tuple(inputs)) if node in found else node)
    return replace(graph, nodes=nodes)


def _merge(node: Node, value: Value, dims: list[int]) -> Node:
    var = relax.Var(value.name, relax.TensorStructInfo(value.type.shape, value.type.dtype))
    call = op_call(relax.BlockBuilder().normalize(merge_call(var, dims)))
    return Node(call, (value,), (Value(f"{value.name}_whole_dims", value.type),), node.scopes, node.where)
