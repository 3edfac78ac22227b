"""The sharding rule of every node of a Graph: that of its operator, or of its kernel."""

from __future__ import annotations

from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator import OpRule, has_rule, rule_of
from mesh_tensor.rules.operator.call import operator_name
from mesh_tensor.rules.operator.rule import whole_rule

from .ir import ANNOTATE, Graph, Node
from .tir_rule import kernel_rule


def node_rules(graph: Graph, *, replicate_unknown: bool) -> dict[Node, OpRule]:
    """The rule of every node; alike calls have one.

    Raises:
        MeshTensorError: an operator has no rule, and is not to be taken as one that needs everything whole.
    """
    known: dict[tuple, OpRule] = {}
    rules = {}
    for node in graph.nodes:
        if node.kernel is not None:
            rules[node] = kernel_rule(node, graph.mesh)
            continue
        kind = (ANNOTATE, node.call.inputs[0]) if node.is_annotation else node.call.kind
        rule = known.get(kind)
        if rule is None:
            rule = known[kind] = _rule(node, replicate_unknown)
        rules[node] = rule
    return rules


def _rule(node: Node, replicate_unknown: bool) -> OpRule:
    if node.is_annotation:
        return OpRule((_dims(node),), (_dims(node),), moves=True)
    if node.call.name == "call_tir_inplace":
        refuse(
            "R.call_tir_inplace can't be distributed",
            where=node.where,
            why="it overwrites its operands",
            fix="use R.call_tir, whose results are new tensors",
        )
    if replicate_unknown and not has_rule(operator_name(node.call)):
        return whole_rule(node.call)
    return rule_of(node.call, node.where)


def _dims(node: Node) -> tuple[str, ...]:
    return tuple(f"d{dim}" for dim in range(node.call.inputs[0].ndim))
