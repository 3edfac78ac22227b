"""Which sums stay pending: values that all users can take as parts, because they are linear in them.

Reducing later saves collectives where two pending sums are added, and bytes where what follows makes less of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from mesh_tensor.base.dtypes import NARROW
from mesh_tensor.base.sharding import Partial, Sharding
from mesh_tensor.rules.operator.call import operator_name
from mesh_tensor.rules.operator.update import UPDATE

from .atoms import Atoms, NodeRule
from .decide import Decision, operand_layouts, result_layout
from .ir import Graph, Node, Value, leaves
from .propagate import Layouts

Pending = tuple[tuple[str, str], ...]  # (axis, op)


def find_carried(
    graph: Graph, atoms: Atoms, layouts: Layouts, decisions: Mapping[Node, Decision]
) -> tuple[dict[Value, Sharding], Mapping[Node, Decision]]:
    """The values that are handed on partial, each with a layout that says over which axes; and the decisions, of which
    some are others so that pending sums meet (see `_meeting`)."""
    uses = graph.uses()
    meeting = _meeting(graph, atoms, decisions, uses)
    while True:
        tried = {**decisions, **meeting}
        pending = _carried(graph, atoms, tried, uses)
        alone = [node for node in meeting if not _taken(node, atoms, tried, pending)]
        if not alone:
            break
        for node in alone:
            del meeting[node]
    carried = {
        value: Sharding.of(graph.mesh, layouts.of[value].ndim, {axis: Partial(op) for axis, op in parts})
        for value, parts in pending.items()
    }
    return carried, tried


def _meeting(
    graph: Graph, atoms: Atoms, decisions: Mapping[Node, Decision], uses: Mapping[Value, list[tuple[Node, int]]]
) -> dict[Node, Decision]:
    """Other decisions for nodes that add several pending sums, which nothing else takes, and for those that only move
    elements on the way there: the axes that these are pending over split nothing there, so that one sum is reduced
    after it instead of several before."""
    found: dict[Node, Decision] = {}
    pending: dict[Value, Pending] = {}
    for node in graph.nodes:
        decision, rule = decisions[node], atoms.rules[node]
        parts = {pending.get(value, ()) for value in node.inputs}
        (only,) = parts if len(parts) == 1 else ((),)
        split = {axis: factor for axis, factor in decision.split.items() if axis not in dict(only)}
        joins = _adds(node, rule) or _moves(node, rule)
        if only and split != decision.split and joins and all(len(uses[v]) == 1 for v in node.inputs):
            needed = operand_layouts(graph.mesh, rule, split)
            results = zip(rule.outputs, rule.partial, strict=True)
            produced = tuple(result_layout(graph.mesh, factors, split, ops) for factors, ops in results)
            decision = found[node] = Decision(split, split, needed, produced)
        taken = _taken(node, atoms, {node: decision}, pending)
        for value, made in zip(node.outputs, decision.produced, strict=True):
            left = pending[node.inputs[min(taken)]] if taken else made.partial
            if left and value not in graph.annotations and not _is_narrow_sum(value, left):
                pending[value] = left
    for node in reversed(graph.nodes):
        if node in found and _moves(node, atoms.rules[node]) and not _is_added(node, atoms, found, uses):
            del found[node]
    return found


def _moves(node: Node, rule: NodeRule) -> bool:
    """Whether the node only moves the elements of its one operand."""
    return len(node.inputs) == len(node.outputs) == 1 and rule.rule.moves and not node.is_annotation


def _is_added(
    node: Node, atoms: Atoms, found: Mapping[Node, Decision], uses: Mapping[Value, list[tuple[Node, int]]]
) -> bool:
    """Whether what the node gives is added to other pending sums, or is a gradient that an optimizer takes: there it is
    in the parameter's layout, and nothing but the optimizer waits for it."""
    users = [user for user, _ in uses.get(node.outputs[0], ())]
    if any(operator_name(user.call) == UPDATE for user in users):
        return True
    return len(users) == 1 and (users[0] in found or _adds(users[0], atoms.rules[users[0]]))


def _adds(node: Node, rule: NodeRule) -> bool:
    """Whether the node is linear in several operands together, and they are all that it has."""
    return len(node.inputs) > 1 and frozenset(range(len(node.inputs))) in rule.rule.linear


def _carried(
    graph: Graph,
    atoms: Atoms,
    decisions: Mapping[Node, Decision],
    uses: Mapping[Value, list[tuple[Node, int]]],
) -> dict[Value, Pending]:
    """What values are pending with. Starts from all that could be, and takes away what some user can't take, until that
    changes nothing."""
    refused = {*leaves(graph.result), *graph.annotations}
    while True:
        pending = _pending(graph, atoms, decisions, refused)
        bad = {
            value
            for value in pending
            if any(position not in _taken(node, atoms, decisions, pending) for node, position in uses.get(value, ()))
        }
        if not bad:
            return pending
        refused |= bad


def _pending(
    graph: Graph, atoms: Atoms, decisions: Mapping[Node, Decision], refused: set[Value]
) -> dict[Value, Pending]:
    """What each value is pending with, if all but the refused stay so."""
    pending: dict[Value, Pending] = {}
    for node in graph.nodes:
        taken = _taken(node, atoms, decisions, pending)
        for value, produced in zip(node.outputs, decisions[node].produced, strict=True):
            parts = pending[node.inputs[min(taken)]] if taken else produced.partial
            if parts and value not in refused and not _is_narrow_sum(value, parts):
                pending[value] = parts
    return pending


def _taken(
    node: Node, atoms: Atoms, decisions: Mapping[Node, Decision], pending: Mapping[Value, Pending]
) -> frozenset[int]:
    """The operands that the node takes partial: none, or a set that it is linear in."""
    waiting = frozenset(i for i, value in enumerate(node.inputs) if value in pending)
    if not waiting:
        return waiting
    rule, decision = atoms.rules[node].rule, decisions[node]
    parts = {pending[node.inputs[i]] for i in waiting}
    if len(parts) != 1 or node.is_annotation or rule.windows or any(s.partial for s in decision.produced):
        return frozenset()
    (only,) = parts
    if any(axis in decision.split for axis, _ in only):
        return frozenset()
    sums = all(op == "sum" for _, op in only)
    linear = (sums and waiting in rule.linear) or (rule.moves and len(waiting) == len(node.inputs))
    before = sum(node.inputs[i].type.elements for i in waiting)
    if not linear or sum(value.type.elements for value in node.outputs) > before:
        return frozenset()
    return waiting


def _is_narrow_sum(value: Value, parts: Pending) -> bool:
    """Parts of a low-precision sum are added in float32, at once."""
    return value.type.dtype in NARROW and any(op == "sum" for _, op in parts)
