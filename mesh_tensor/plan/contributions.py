"""Decisions in which what is looked up is made of the table's rows where they lie."""

from __future__ import annotations

from collections.abc import Mapping

from .atoms import Atoms, NodeRule
from .carry import left_by, taken_of
from .decide import Decision, fits
from .ir import Graph, Node, Value, nodes_before
from .owners import Pending, look_up_of, owner_made, row_factor
from .propagate import Layouts


def contributions(
    graph: Graph, atoms: Atoms, layouts: Layouts, decisions: Mapping[Node, Decision]
) -> dict[Node, Decision]:
    """The nodes that look rows up in tables that lie split along them, and what follows of these token by token, as
    long as that makes less of them."""
    found: dict[Node, Decision] = {}
    pending: dict[Value, Pending] = {}
    less: set[Node] = set()
    for node in graph.nodes:
        rule = atoms.rules[node]
        decision = _other(node, rule, layouts, decisions[node], pending)
        taken = taken_of(node, atoms, {node: decision}, pending)
        owned = owner_made(node, rule, decision) is not None
        if not taken and not owned:
            continue
        found[node] = decision
        if sum(v.type.elements for v in node.outputs) < sum(node.inputs[i].type.elements for i in taken):
            less.add(node)
        for value, left in left_by(node, rule, decision, taken, pending):
            if left.owner is not None and value not in graph.annotations:
                pending[value] = left
    needed = set(nodes_before(graph.nodes, (), lambda node: node in less))  # without the last ones, up to one of these
    return {node: decision for node, decision in found.items() if node in needed and decision != decisions[node]}


def _other(
    node: Node, rule: NodeRule, layouts: Layouts, decision: Decision, pending: Mapping[Value, Pending]
) -> Decision:
    """The decision in which the axes that split the rows do so, or split nothing where it is computed of them."""
    split: dict[str, str] = dict(decision.split)
    for value in node.inputs:
        for axis, _ in pending[value].parts if value in pending else ():
            split.pop(axis, None)
    mesh, look_up = decision.produced[0].mesh, look_up_of(node)
    factor = None if look_up is None else row_factor(rule, look_up)
    if look_up is not None and factor is not None:
        place = rule.inputs[look_up.table].index(factor)
        split.update(dict.fromkeys(layouts.of[node.inputs[look_up.table]].axes_of(place), factor))
    if split == decision.split or not fits(rule, split, mesh):
        return decision
    return Decision.of(mesh, rule, split, layouts.order)
