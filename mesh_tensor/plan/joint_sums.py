"""Decisions in which all terms of a sum wait for the same devices, so that one collective completes them: of
`x @ a + y @ b`, by itself the second product may take less with y gathered, but the first one's parts are summed
anyway."""

from __future__ import annotations

from collections.abc import Mapping

from .atoms import Atoms, NodeRule
from .carry import adds, moves
from .decide import Decision, fits
from .ir import Graph, Node, Value
from .propagate import Layouts


def joint_sums(
    graph: Graph, atoms: Atoms, layouts: Layouts, decisions: Mapping[Node, Decision]
) -> dict[Node, Decision]:
    """The terms that are completed by themselves, and could wait for what others of their sum wait for."""
    made, uses, kept = graph.makers(), graph.uses(), graph.kept()
    inside = {value for node in graph.nodes if adds(node, atoms.rules[node]) for value in node.inputs}
    passed = {value for value in inside if len(uses[value]) == 1 and value not in kept}
    found: dict[Node, Decision] = {}
    for node in graph.nodes:
        if not adds(node, atoms.rules[node]) or node.outputs[0] in passed:
            continue
        terms, left = list[Value](), list(node.inputs)
        while left:
            value = left.pop()
            term = made.get(value)
            if term is None or len(uses[value]) != 1 or value in kept:
                continue
            if _hands_on(term, atoms.rules[term]) and not _partial(term, value, decisions):
                left += term.inputs
            else:
                terms.append(value)
        partial = {value: _partial(made[value], value, decisions) for value in terms}
        axes = frozenset().union(*partial.values())
        for value in terms:
            term = made[value]
            lacking = axes - partial[value]
            other = _waiting(term, atoms.rules[term], layouts, decisions[term], lacking)
            if other is not None:
                found[term] = other
    return found


def _hands_on(node: Node, rule: NodeRule) -> bool:
    """Whether parts of all operands make parts of the result."""
    return adds(node, rule) or moves(node, rule) or (len(node.inputs) == 1 and frozenset({0}) in rule.rule.linear)


def _partial(node: Node, value: Value, decisions: Mapping[Node, Decision]) -> frozenset[str]:
    """The axes over which devices have parts of the value."""
    produced = decisions[node].produced[node.outputs.index(value)]
    return frozenset(axis for axis, op in produced.partial if op == "sum")


def _waiting(node: Node, rule: NodeRule, layouts: Layouts, decision: Decision, axes: frozenset[str]) -> Decision | None:
    """The decision in which each of the axes splits what the node sums, if an operand is split there; None where none
    is, or it may not be."""
    mesh, split = decision.produced[0].mesh, dict(decision.split)
    if decision.after != split:
        return None  # what it reduces inside comes out in another layout
    for axis in mesh.in_order(axes):
        places = zip(rule.inputs, (layouts.of[value].dim_of(axis) for value in node.inputs), strict=True)
        factors = (factors[place] for factors, place in places if place is not None)
        summed = [factor for factor in factors if factor is not None and rule.reduced.get(factor) == "sum"]
        if summed:
            split[axis] = summed[0]
    if split == decision.split or len(node.outputs) > 1 or not fits(rule, split, mesh):
        return None
    return Decision.of(mesh, rule, split, layouts.order)
