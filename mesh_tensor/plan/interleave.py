"""Weights that are stored in another order: where what is computed with them is taken apart into unequal parts, as
queries, keys and values with fewer key heads; and where they take what is put side by side. No tile of such a dim is a
tile of each of its parts; so all that has the dim is in another order, of every part what each device has together, and
it is taken apart, or put together, device by device."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from tvm import relax

from mesh_tensor.rules.operator.rule import Dim, OpRule, atoms_of
from mesh_tensor.rules.operator.update import UPDATE

from .atoms import Atoms
from .expansion import Expansion
from .ir import Graph, Interleaved, Node, Value, leaves

op = relax.op
# What does the same wherever along a dim an element stands.
_ALIKE = frozenset(
    "matmul einsum add subtract multiply divide negative square sqrt permute_dims astype reshape sum collapse_sum_to"
    f" nn.relu nn.gelu nn.silu grad.no_grad dist.annotate_sharding {UPDATE}".split()
)


def interleave(graph: Graph, atoms: Atoms, held: Collection[str]) -> Graph | None:
    """The graph with such weights among `held`, which are laid out once, in the order that layouts stated for them ask
    for; None where there is none. Values that have the same dim are in that order, too."""
    seeds = [node for node in graph.nodes if _is_seed(node)] if held else []
    if not seeds:
        return None
    search = _Search(graph, atoms, held)
    made: dict[Node, list[Node]] = {}
    stored = dict(graph.stored)
    for node in seeds:
        group = None if node in made else search.group(node)
        parts = 1 if group is None else _parts(graph, group)
        if group is None or parts < 2 or any(size % parts for size in group.sections):
            continue
        orders = {value: group.order(value, dim, parts) for value, dim in group.units if value in search.kept}
        if len(orders) < sum(value in search.kept for value, _ in group.units) or orders.keys() & stored.keys():
            continue
        stored |= orders
        for one in group.joints:
            made[one] = Expansion(one).nodes(partial(_taken_apart if _is_split(one) else _put_together, parts))
    if not made:
        return None
    nodes = [one for node in graph.nodes for one in made.get(node, [node])]
    return replace(graph, nodes=nodes, stored=stored)


def _is_split(node: Node) -> bool:
    return node.call.name == "split"


def _is_seed(node: Node) -> bool:
    """Splits into equal parts have a dim for what is in each."""
    if _is_split(node):
        return len(set(_sections(node))) > 1
    return _is_join(node) and len(node.inputs) > 1


def _is_join(node: Node) -> bool:
    return node.call.name == "concat" and node.call.attr("axis") is not None


def _axis(node: Node) -> int:
    return node.call.axis(node.call.attr("axis", 0))


def _whole(node: Node) -> Value:
    """What is taken apart, or put together."""
    return node.inputs[0] if _is_split(node) else node.outputs[0]


def _sections(node: Node) -> tuple[int, ...]:
    pieces = node.outputs if _is_split(node) else node.inputs
    return tuple(piece.type.shape[_axis(node)] for piece in pieces)


@dataclass
class _Group:
    """All that has a dim which is made of `sections`. `units`: (value, dim) -> how many elements there each of its own
    is. `joints`: what takes it apart, or puts it together."""

    sections: tuple[int, ...]
    units: dict[tuple[Value, int], int] = field(default_factory=dict)
    joints: dict[Node, None] = field(default_factory=dict)

    def order(self, value: Value, dim: int, parts: int) -> Interleaved:
        """How a weight is stored then."""
        unit = self.units[value, dim]
        return Interleaved(dim, tuple(size * unit for size in self.sections), parts)


def _parts(graph: Graph, group: _Group) -> int:
    """How many devices share what has the dim, as is stated for it: by the axes that are stated for all of it."""
    stated = [
        graph.annotations[value].sharding.axes_of(dim) for value, dim in group.units if value in graph.annotations
    ]
    shared = [axis for axis in stated[0] if all(axis in axes for axes in stated)] if stated else []
    return math.prod(graph.mesh.size(axis) for axis in shared)


class _OtherError(Exception):
    """Something looks at where along the dim an element stands, or is not ours to put in another order."""


class _Search:
    """Finds all that has a dim. `kept`: weights, and what takes their place in the next call."""

    def __init__(self, graph: Graph, atoms: Atoms, held: Collection[str]) -> None:
        self._rules, self._state = atoms.rules, graph.state
        weights = {value for value in graph.params if value.name in held}
        self.kept = weights | {result for weight, result in graph.state.items() if weight in weights}
        self._others = {*graph.params, *leaves(graph.result)} - self.kept
        self._touching: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            for value in dict.fromkeys((*node.inputs, *node.outputs)):
                self._touching.setdefault(value, []).append(node)

    def group(self, seed: Node) -> _Group | None:
        """All that has the dim along which a node takes apart, or puts together; None if anything else does more with
        it than what does the same everywhere, or if no weight is among it."""
        group, waiting = _Group(_sections(seed)), [(_whole(seed), _axis(seed), 1)]
        try:
            while waiting:
                value, dim, unit = waiting.pop()
                if group.units.setdefault((value, dim), unit) != unit:
                    return None
                waiting += [one for one in self._beside(group, value, dim, unit) if one[:2] not in group.units]
        except _OtherError:
            return None
        for weight, result in self._state.items():
            before, after = ({d: u for (v, d), u in group.units.items() if v is one} for one in (weight, result))
            if before != after:
                return None
        return group if any(value in self.kept for value, _ in group.units) else None

    def _beside(self, group: _Group, value: Value, dim: int, unit: int) -> Iterator[tuple[Value, int, int]]:
        """Dims that have the same elements as this one, in whatever takes or makes the value."""
        if value.data is not None or value in self._others:
            raise _OtherError
        for node in self._touching[value]:
            if (_is_split(node) or _is_join(node)) and _whole(node) is value and _axis(node) == dim:
                if _sections(node) != tuple(size * unit for size in group.sections):
                    raise _OtherError
                group.joints[node] = None
            elif node.call.operator in _ALIKE:
                yield from _alike(node, self._rules[node].rule, value, dim, unit)
            else:
                raise _OtherError


def _alike(node: Node, rule: OpRule, value: Value, dim: int, unit: int) -> Iterator[tuple[Value, int, int]]:
    """The dims of a node's tensors that have the factor of which the dim of one is made, or its first part."""
    tensors = [*zip(node.inputs, rule.inputs, strict=True), *zip(node.outputs, rule.outputs, strict=True)]
    for factors in [dims[dim] for one, dims in tensors if one is value]:
        inner, left = divmod(unit, _after_first(factors, rule))
        if not atoms_of(factors) or left:
            raise _OtherError
        first = atoms_of(factors)[0]
        for other, dims in tensors:
            for position, mine in enumerate(dims):
                if first in atoms_of(mine):
                    if atoms_of(mine)[0] != first:
                        raise _OtherError
                    yield other, position, inner * _after_first(mine, rule)


def _after_first(factors: Dim, rule: OpRule) -> int:
    """How many elements of a dim each of its first factor's is."""
    return math.prod(rule.sizes[name] for name in atoms_of(factors)[1:])


def _shapes(node: Node, parts: int) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    """How much each device has of every section, and the dims before and after that one."""
    axis, shape = _axis(node), _whole(node).type.shape
    return [size // parts for size in _sections(node)], shape[:axis], shape[axis + 1 :]


def _taken_apart(parts: int, made: Expansion) -> list[relax.Var]:
    """An interleaved value taken apart: its dim is (devices, what each has of all sections)."""
    (x,), node, axis = made.given, made.node, _axis(made.node)
    each, before, after = _shapes(node, parts)
    apart = made(op.reshape(x, (*before, parts, sum(each), *after)))
    pieces = made.all(op.split(apart, [sum(each[: n + 1]) for n in range(len(each) - 1)], axis + 1))
    return [made(op.reshape(one, out.type.shape)) for one, out in zip(pieces, node.outputs, strict=True)]


def _put_together(parts: int, made: Expansion) -> list[relax.Var]:
    """An interleaved value made of its sections."""
    node, axis = made.node, _axis(made.node)
    each, before, after = _shapes(node, parts)
    sections = zip(made.given, each, strict=True)
    pieces = [made(op.reshape(x, (*before, parts, size, *after))) for x, size in sections]
    return [made(op.reshape(made(op.concat(pieces, axis + 1)), node.outputs[0].type.shape))]
