"""Functions in another form: with axes taken apart, so that one splits two factors; with dims whole that are apart
elsewhere; and with sums of several parts that wait for devices added to each other before anything else is, so that one
collective completes them all. `x + a + b`, of which a and b are products over a split dim, becomes `(a + b) + x`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tvm import relax

from mesh_tensor.annotations.module_annotations import Annotation
from mesh_tensor.base.dtypes import NARROW
from mesh_tensor.base.sub_axes import Refinement
from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.shape import merge_call

from .atoms import Atoms
from .ir import Graph, Node, Value
from .propagate import Layouts
from .reader import Annotations

_MOST = 3  # plans that are tried


def refinements(graph: Graph, atoms: Atoms, layouts: Layouts) -> list[Refinement]:
    """The meshes in which such an axis is two, those first that are asked for first. An axis that only stores a weight
    splits nothing of what is computed."""
    found: dict[Refinement, None] = {}
    for value, annotation in graph.annotations.items():
        shape = atoms.shape(value)
        for axis, dim in annotation.sharding.as_dict().items():
            if axis in layouts.late.get(value, ()):
                continue
            size, first = graph.mesh.size(axis), shape[atoms.positions(value, dim)[0]]
            major = math.gcd(size, first)
            if len(atoms.of[value][dim]) > 1 and 1 < major < size and axis not in graph.manual:
                names = [f"{axis}:(1){major}"]
                found[Refinement.by_names(graph.mesh, names)] = None
    return list(found)[:_MOST]


def refined_annotations(annotations: Annotations, refinement: Refinement) -> dict[tuple[str, str], Annotation]:
    """What is stated, of the parts of axes."""
    return {key: refined_annotation(stated, refinement) for key, stated in annotations.items()}


def refined_annotation(stated: Annotation, refinement: Refinement) -> Annotation:
    """What is stated of a value, of the parts of axes."""
    later: Mapping[str, int] = refinement.expanded(dict(stated.later))
    replicated = tuple(part for axis in stated.replicated for part in refinement.axes(axis))
    sharding = refinement.refine(stated.sharding)
    return replace(stated, sharding=sharding, later=tuple(later.items()), replicated=replicated)


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


_ADD = "add"


def regroup_sums(graph: Graph, atoms: Atoms, layouts: Layouts) -> Graph | None:
    """The graph with the operands of sums in another order where several of them come out as parts, over the same axes,
    and something else is added between, or what others take, too, which may have to be completed for them; None where
    there is no such sum."""
    waiting = _Waiting(graph, atoms, layouts)
    if len(waiting.axes) < 2:
        return None
    made: dict[Node, list[Node]] = {}
    links = graph.inner_links()
    index = {value: number for number, node in enumerate(graph.nodes) for value in node.outputs}
    for chain in _chains(graph):
        parts = [value for value in chain.terms if waiting.axes.get(value)]
        over = {waiting.axes[value] for value in parts}
        others = [value for value in chain.terms if value not in parts]
        whole = all(value.type == chain.last.outputs[0].type for value in parts)
        alone, shared = ([value for value in parts if (value in links) is its_own] for its_own in (True, False))
        if len(parts) > 1 and (others or (shared and len(alone) > 1)) and len(over) == 1 and whole:
            made |= _placed(_summed([*alone, *shared, *others], chain.last), chain, index)
    if not made:
        return None
    return replace(graph, nodes=[n for node in graph.nodes for n in made.get(node, [node])])


def _placed(sums: list[Node], chain: _Chain, index: Mapping[Value, int]) -> dict[Node, list[Node]]:
    """The additions in place of the chain's, each as early as its operands are there: what waits for a collective
    comes after what does not."""
    places = sorted((index[node.outputs[0]], node) for node in chain.nodes)
    made: dict[Node, list[Node]] = {node: [] for node in chain.nodes}
    known = dict(index)
    for node in sums:
        ready = max(known.get(value, -1) for value in node.inputs)  # parameters are there from the start
        known[node.outputs[0]], place = next(one for one in places if one[0] >= ready)
        made[place].append(node)
    return made


@dataclass(frozen=True)
class _Chain:
    """Additions of which each takes the one before, and nothing else does; `last` is one of `nodes`, `terms` what is
    added."""

    nodes: tuple[Node, ...]
    terms: tuple[Value, ...]

    @property
    def last(self) -> Node:
        """The addition that gives the sum."""
        return self.nodes[-1]


def _chains(graph: Graph) -> list[_Chain]:
    """The sums of three operands and more, each as long as can be."""
    links = graph.inner_links()
    found: dict[Value, _Chain] = {}
    for node in graph.nodes:
        if node.call.name != _ADD or len(node.inputs) != 2 or node.outputs[0].type.dtype in NARROW:
            continue
        nodes: tuple[Node, ...] = ()
        terms: tuple[Value, ...] = ()
        for value in node.inputs:
            inner = found.get(value)
            fits = inner is not None and value in links and value not in graph.annotations
            if inner is not None and fits and inner.last.scopes == node.scopes:
                del found[value]
                nodes, terms = nodes + inner.nodes, terms + inner.terms
            else:
                terms = (*terms, value)
        found[node.outputs[0]] = _Chain((*nodes, node), terms)
    return [chain for chain in found.values() if len(chain.terms) > 2]


class _Waiting:
    """Over which axes values come out as parts of a sum, by their layouts: `axes` has those that do."""

    def __init__(self, graph: Graph, atoms: Atoms, layouts: Layouts) -> None:
        self.axes: dict[Value, frozenset[str]] = {}
        for node in graph.nodes:
            if (over := self._over(node, atoms, layouts)) and len(node.outputs) == 1:
                self.axes[node.outputs[0]] = over

    def _over(self, node: Node, atoms: Atoms, layouts: Layouts) -> frozenset[str]:
        rule = atoms.rules[node]
        waiting = [number for number, value in enumerate(node.inputs) if value in self.axes]
        if len(waiting) == 1:
            return self._handed_on(node, atoms, layouts, waiting[0])
        sums = {factor for factor, op in rule.reduced.items() if op == "sum"}
        if not sums:
            return frozenset()
        split = [self._split(layouts, value, dims, sums) for value, dims in zip(node.inputs, rule.inputs, strict=True)]
        return frozenset().union(*split)

    def _handed_on(self, node: Node, atoms: Atoms, layouts: Layouts, waiting: int) -> frozenset[str]:
        """The axes of the one operand that comes in parts, where the node hands these on: it is linear in that one,
        which all devices multiply with the same, or moves it, and makes no more of it."""
        rule, value = atoms.rules[node].rule, node.inputs[waiting]
        axes, others = self.axes[value], [one for one in node.inputs if one is not value]
        linear = frozenset({waiting}) in rule.linear or (rule.moves and not others)
        whole = all(layouts.of[one].dim_of(axis) is None for one in others for axis in axes)
        small = node.outputs[0].type.elements <= value.type.elements or not others
        return axes if linear and whole and small else frozenset()

    @staticmethod
    def _split(layouts: Layouts, value: Value, factors: tuple[str | None, ...], sums: set[str]) -> frozenset[str]:
        """The axes that split what is summed."""
        places: Mapping[str, int] = layouts.of[value].as_dict()
        return frozenset(axis for axis, place in places.items() if factors[place] in sums)


def _summed(terms: list[Value], last: Node) -> list[Node]:
    """Nodes that add these one after the other, and give what `last` did."""
    builder, result = relax.BlockBuilder(), last.outputs[0]
    made: list[Node] = []
    total = terms[0]
    for number, term in enumerate(terms[1:]):
        call = op_call(builder.normalize(relax.op.add(total.variable(), term.variable())))
        (out,) = call.outputs
        ends = number == len(terms) - 2
        sum_ = result if ends else Value(f"{result.name}_{number}", out)
        made.append(Node(call, (total, term), (sum_,), last.scopes, last.where))
        total = sum_
    return made
