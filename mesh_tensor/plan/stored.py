"""Which layouts of weights say only where a weight is stored: those of the batch's axis, as in fully sharded data
parallelism. They are heard after what activations are stated to be, so that these stay where they are and weights are
gathered.

An axis that is stated of weights and of activations may mean that, or that features are split between layers (tensor
parallelism on the axis of sequence parallelism). The weights tell: column and row layouts of tensor parallelism agree
with each other through every operator between them, and with what is stated of inputs; weights that are split each by
themselves don't.
"""

from __future__ import annotations

from mesh_tensor.rules.operator.rule import OpRule, atoms_of

from .atoms import Atoms
from .ir import Graph, Value
from .spread import Spread, refine_sharding


def stored_axes(graph: Graph, atoms: Atoms) -> dict[Value, frozenset[str]]:
    """Per annotated weight the axes that only store it."""
    split = {value: frozenset(stated.sharding.as_dict()) for value, stated in graph.annotations.items()}
    weights, inputs = _weights_and_inputs(graph, atoms)
    by_weights: frozenset[str] = frozenset().union(*(split[value] for value in weights))
    by_others: frozenset[str] = frozenset().union(*(axes for value, axes in split.items() if value not in weights))
    shared = by_weights & by_others
    if not shared:
        return {}
    alone = Spread(graph, atoms)
    for value in weights:
        alone.state(value, graph.annotations[value])
    for value in weights:
        alone.start(value, shared)
    alone.run()
    disagreeing = {conflict.axis for conflict in alone.conflicts()}
    for value in inputs:
        asked, stated = alone.places[value], refine_sharding(graph.annotations[value].sharding, value, atoms)
        disagreeing |= {axis for axis, place in stated.items() if asked.get(axis, place) != place}
    return {value: split[value] & disagreeing for value in weights}


def _weights_and_inputs(graph: Graph, atoms: Atoms) -> tuple[list[Value], list[Value]]:
    """The annotated values that are parameters, perhaps turned or cast: those which what they meet first leads (a
    matrix that rows are multiplied with, a bias, a scale, a table), and the others."""
    root = {value: value for value in graph.params}
    led: dict[Value, bool] = {}
    for node in graph.nodes:
        met = [value for value in node.inputs if value in root]
        if not met:
            continue
        if len({value for value in node.inputs if value.data is None}) == 1:
            root.update(dict.fromkeys(node.outputs, root[met[0]]))
            continue
        rule = atoms.rules[node].rule
        leader = max(range(len(node.inputs)), key=lambda position: _lead(rule, position))
        for value in met:
            led.setdefault(root[value], value is not node.inputs[leader])
    found: tuple[list[Value], list[Value]] = ([], [])
    for value in graph.annotations:
        if value in root:
            found[0 if led.get(root[value]) else 1].append(value)
    return found


def _lead(rule: OpRule, position: int) -> tuple[int, int, int]:
    """How much an operand says of what the results are: the more of their factors it has."""
    factors = {factor for dim in rule.inputs[position] for factor in atoms_of(dim)}
    made = {factor for result in rule.outputs for dim in result for factor in atoms_of(dim)}
    return len(made & factors), -len(factors.intersection(rule.reduced)), -position
