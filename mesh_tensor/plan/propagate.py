"""Propagation: a layout for every value of a Graph, from those that were stated.

Annotations of lower priority are heard first; of these, layouts of activations before those that say where weights are
stored (see `_stored_axes`), and axes that a dim's first atom has room for before others, those of larger tensors
first. How they spread: see `spread`. What was stated stays, whenever it spreads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from mesh_tensor.annotations.module_annotations import Annotation
from mesh_tensor.base.dtypes import NARROW
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.sharding import Partial, Placement, Shard, Sharding
from mesh_tensor.rules.operator.rule import OpRule, atoms_of

from .atoms import Atoms
from .ir import Graph, Value, leaves
from .manual import at_the_edge
from .spread import Conflict, Spread

_ROOM = -(2**63)  # before what is left over of any value


Late = Mapping[Value, frozenset[str]]  # the axes of annotated values that are heard after others


@dataclass(eq=False)
class Layouts:
    """The layout of every value, over the value's atoms, and the conflicts that were met. `order`: of axes that split
    one atom, as in Shard, where none is stated. `late`: what was heard after all else of its priority."""

    of: dict[Value, Sharding]
    conflicts: list[Conflict] = field(default_factory=list)
    order: Mapping[str, int] = field(default_factory=dict)
    late: Late = field(default_factory=dict)


def propagate(graph: Graph, atoms: Atoms, late: Late | None = None) -> Layouts:
    """A layout for every value of the graph. Deterministic. `late`: what is heard after all else of its priority; what
    only stores weights, by default."""
    spread = Spread(graph, atoms)
    for value, annotation in graph.annotations.items():
        spread.state(value, annotation)
    for value, axes in at_the_edge(graph, atoms.devices).items():
        spread.start(value, axes)
    spread.run()
    late = _stored_axes(graph, atoms, spread) if late is None else late
    for starting in _turns(graph, late, spread.places):
        for value, axes in starting.items():
            spread.start(value, axes)
        spread.run()
    conflicts = list(spread.conflicts())
    if _resume(graph, atoms, spread, conflicts):
        conflicts = list(spread.conflicts())
    order = _order(graph)
    layouts = _layouts(graph, atoms, spread, order)
    layouts |= _state(graph, layouts)
    layouts |= _stated_partial(graph, layouts)
    return Layouts(layouts, list(dict.fromkeys(conflicts)), order, late)


def _state(graph: Graph, layouts: Mapping[Value, Sharding]) -> dict[Value, Sharding]:
    """The layouts of results that replace parameters in the next call: those of the parameters. Refused where a result
    replaces several, or is another one, and they lie differently."""
    found = {replaced: layouts[replaced] for replaced in graph.state}
    problems = []
    for replaced, result in graph.state.items():
        if found.setdefault(result, layouts[replaced]) != layouts[replaced]:
            problems.append(
                f"{replaced.name!r} lies as '{layouts[replaced]}', and what replaces it as '{found[result]}'"
            )
    if problems:
        refuse(
            problems,
            where=f"what module function {graph.name!r} keeps between calls",
            why="one value replaces several of them, or is another one of them",
            fix="state the same layout for all of these",
        )
    return found


def _turns(
    graph: Graph, late_axes: Late, places: Mapping[Value, Mapping[str, int]]
) -> list[dict[Value, frozenset[str]]]:
    """Which axes of which annotated values start to spread together, in order."""
    turns: dict[tuple[int, bool, int], dict[Value, frozenset[str]]] = {}
    for value, annotation in graph.annotations.items():
        late, left_over = late_axes.get(value, frozenset()), _left_over(annotation, places[value])
        for axis in annotation.sharding.as_dict():
            room = -value.type.elements if axis in left_over else _ROOM
            turn = turns.setdefault((annotation.priority_of(axis), axis in late, room), {})
            turn[value] = turn.get(value, frozenset()) | {axis}
    return [turns[turn] for turn in sorted(turns)]


def _left_over(annotation: Annotation, places: Mapping[str, int]) -> frozenset[str]:
    """The axes that split what they do because the first atom of the dim has no room for all axes that are stated of
    it: head sizes, where there are too few heads."""
    found = annotation.sharding.as_dict()
    first = {dim: min(places[axis] for axis in found if found[axis] == dim) for dim in found.values()}
    return frozenset(axis for axis, dim in found.items() if places[axis] > first[dim])


def _stated_partial(graph: Graph, layouts: Mapping[Value, Sharding]) -> dict[Value, Sharding]:
    """Values that are stated to be partial and used as nothing else are made so: nothing is reduced before. Sums in low
    precision are not: their parts would be rounded."""
    uses, results, found = graph.uses(), set(leaves(graph.result)), {}
    for node in graph.nodes:
        if node.is_annotation and layouts[node.outputs[0]].partial:
            (value,) = node.inputs
            alone = len(uses[value]) == 1 and value not in graph.params and value.data is None
            if alone and value not in graph.annotations and value.type.dtype not in NARROW:
                found[value] = layouts[node.outputs[0]]
    return {value: layout for value, layout in found.items() if value not in results}


def _order(graph: Graph) -> dict[str, int]:
    """The order of axes that is stated first, where one is stated that is not the mesh's."""
    for annotation in graph.annotations.values():
        placements = annotation.sharding.placements().items()
        if found := {axis: p.minor for axis, p in placements if isinstance(p, Shard) and p.minor}:
            return found
    return {}


def _layouts(graph: Graph, atoms: Atoms, spread: Spread, order: Mapping[str, int]) -> dict[Value, Sharding]:
    """Of every value: what splits its atoms, and what it was stated to be partial over."""
    layouts: dict[Value, Sharding] = {}
    known: dict[tuple, Sharding] = {}
    for value, places in spread.places.items():
        partial = graph.annotations[value].sharding.partial if value in graph.annotations else ()
        minors = spread.minors.get(value, {})
        found = tuple([(axis, place, minors.get(axis, order.get(axis, 0))) for axis, place in places.items()])
        key = (len(atoms.shape(value)), found, partial)
        if key not in known:
            split: dict[str, Placement] = {axis: Shard(place, minor) for axis, place, minor in found}
            known[key] = Sharding.of(graph.mesh, key[0], split | {axis: Partial(op) for axis, op in partial})
        layouts[value] = known[key]
    return layouts


def other_turns(graph: Graph, atoms: Atoms, layouts: Layouts, made: tuple[Graph, Atoms]) -> list[Late]:
    """What else may be heard late, where weights and activations that are split over one axis met, and no weight is
    only stored: experts' weights, which are gathered then, or inputs; activations that came before matrices. `made`:
    the graph as it was written anew for these layouts."""
    if any(layouts.late.values()):
        return []
    weights, inputs = _that_met(graph, atoms, layouts.conflicts)
    if weights:
        return [weights, inputs]
    before = _before_matrices(graph, atoms, layouts, made)
    return [before] if before else []


def _before_matrices(graph: Graph, atoms: Atoms, layouts: Layouts, made: tuple[Graph, Atoms]) -> Late:
    """The axes that are stated to split activations and came to a product by their rows, before the columns of a
    matrix that is stated to be split over the same axis: positions before heads, where norms come last."""
    weights = set(_weights_and_inputs(graph, atoms)[0])
    stated = {value: frozenset(annotation.sharding.as_dict()) for value, annotation in graph.annotations.items()}
    shared = frozenset().union(*(axes for value, axes in stated.items() if value not in weights)) - graph.manual
    known, root = _roots(graph), _roots(made[0])
    matrices, gave_way = {known[value] for value in weights}, set[str]()
    for conflict in layouts.conflicts:
        rule, axis = made[1].rules[conflict.node], conflict.axis
        if axis in shared and rule.reduced and conflict.other not in rule.reduced:
            for value, factors in zip(conflict.node.inputs, rule.inputs, strict=True):
                place = layouts.of[value].dim_of(axis)
                if root.get(value) in matrices and place is not None and factors[place] == conflict.other:
                    gave_way.add(axis)
    return {value: axes & gave_way for value, axes in stated.items() if value not in weights and axes & gave_way}


def _that_met(graph: Graph, atoms: Atoms, conflicts: Collection[Conflict]) -> tuple[Late, Late]:
    """The axes of weights that are stacks of matrices, which they tell apart, and of inputs, over which both are split,
    and which were asked to split several factors."""
    asked = {conflict.axis for conflict in conflicts} - graph.manual
    if not asked:
        return {}, {}
    weights, inputs = _weights_and_inputs(graph, atoms, stacked=True)
    stated = {value: graph.annotations[value].sharding for value in (*weights, *inputs)}
    split = [
        {value: asked.intersection(stated[value].axes_of(0)) for value in weights if value.type.ndim > 2},
        {value: asked.intersection(stated[value].as_dict()) for value in inputs},
    ]
    met = frozenset.intersection(*(frozenset().union(*side.values()) for side in split))
    experts, others = ({value: met & axes for value, axes in side.items() if met & axes} for side in split)
    return experts, others


def _resume(graph: Graph, atoms: Atoms, spread: Spread, conflicts: Collection[Conflict]) -> bool:
    """Where experts kept an axis from inputs, and what it splits is summed, the inputs' layout goes on: rows of tokens
    are split again once what experts made of them is added up. Whether that may be so."""
    _, inputs = _that_met(graph, atoms, conflicts)
    if not inputs:
        return False
    alone = spread.afresh()
    for value, axes in inputs.items():
        alone.state(value, graph.annotations[value])
        alone.start(value, axes)
    alone.run()
    shared = graph.mesh.in_order(frozenset().union(*inputs.values()))
    for node in graph.nodes:
        rule = atoms.rules[node]
        operands = list(zip(node.inputs, rule.inputs, strict=True)) if rule.reduced else []
        for axis in shared if operands else ():
            summed = any(spread.splits(value, factors, axis) in rule.reduced for value, factors in operands)
            for value in [v for v in node.outputs if summed and axis in alone.places[v]]:
                spread.take(value, axis, alone.places[value][axis])
    return True


def _stored_axes(graph: Graph, atoms: Atoms, spread: Spread) -> dict[Value, frozenset[str]]:
    """Per annotated weight the axes that only store it."""
    split = {value: frozenset(stated.sharding.as_dict()) for value, stated in graph.annotations.items()}
    weights, _ = _weights_and_inputs(graph, atoms)
    by_weights: frozenset[str] = frozenset().union(*(split[value] for value in weights))
    by_others: frozenset[str] = frozenset().union(*(axes for value, axes in split.items() if value not in weights))
    shared = by_weights & by_others
    if not shared:
        return {}
    alone = spread.afresh()
    for value in weights:
        alone.state(value, graph.annotations[value])
    for value in weights:
        alone.start(value, shared)
    alone.run()
    disagreeing = {conflict.axis for conflict in alone.conflicts()}
    for value in graph.annotations.keys() - set(weights):
        asked, stated = alone.places[value], alone.refined(graph.annotations[value].sharding, value)
        disagreeing |= {axis for axis, place in stated.items() if asked.get(axis, place) != place}
    return {value: split[value] & disagreeing for value in weights}


def _weights_and_inputs(graph: Graph, atoms: Atoms, stacked: bool = False) -> tuple[list[Value], list[Value]]:
    """The annotated values that are parameters, perhaps turned or cast: those which what they meet first leads (a
    matrix that rows are multiplied with, a bias, a scale, a table), and the others. `stacked`: several matrices, with
    which the same rows are multiplied, are led by what is computed, or leads elsewhere."""
    root = _roots(graph)
    led: dict[Value, bool] = {}
    for node in graph.nodes:
        if root.keys().isdisjoint(node.inputs) or not root.keys().isdisjoint(node.outputs):
            continue
        rule = atoms.rules[node].rule
        places: Sequence[int] = range(len(node.inputs))
        if stacked and rule.reduced:
            first = [n for n in places if node.inputs[n] not in root or led.get(root[node.inputs[n]]) is False]
            places = first or places
        leader = max(places, key=lambda position: _lead(rule, position))
        for place, value in enumerate(node.inputs):
            if value in root:
                # As a loss's target, and what is compared with it.
                alike = not rule.reduced and _lead(rule, place)[:-1] == _lead(rule, leader)[:-1]
                led.setdefault(root[value], value is not node.inputs[leader] and not alike)
    found: tuple[list[Value], list[Value]] = ([], [])
    for value in graph.annotations:
        if value in root:
            found[0 if led.get(root[value]) else 1].append(value)
    return found


def _roots(graph: Graph) -> dict[Value, Value]:
    """Of parameters, and of what is made of one of them alone (turned, cast): the parameter."""
    root = {value: value for value in graph.params}
    for node in graph.nodes:
        met = [value for value in node.inputs if value in root]
        if met and len({value for value in node.inputs if value.data is None}) == 1:
            root.update(dict.fromkeys(node.outputs, root[met[0]]))
    return root


def _lead(rule: OpRule, position: int) -> tuple[int, int, int]:
    """How much an operand says of what the results are: the more of their factors it has."""
    factors = {factor for dim in rule.inputs[position] for factor in atoms_of(dim)}
    made = {factor for result in rule.outputs for dim in result for factor in atoms_of(dim)}
    return len(made & factors), -len(factors.intersection(rule.reduced)), -position
