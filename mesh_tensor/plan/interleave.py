"""Fused layers of unequal parts: the weight of queries, keys and values with fewer key heads, taken apart after the
product. No tile of such a weight's rows is a tile of each of its parts; so it is stored in another order, of every part
what each device has together, and the product is taken apart device by device."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from tvm import relax

from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.rule import Dim, atoms_of

from .atoms import Atoms
from .ir import Graph, Interleaved, Node, Value

op = relax.op
# What does the same wherever along a dim an element stands.
_ALIKE = frozenset(["matmul", "add", "multiply", "permute_dims", "astype", "reshape", "dist.annotate_sharding"])


def interleave(graph: Graph, atoms: Atoms, held: Collection[str]) -> Graph | None:
    """The graph with such weights among `held`, which are laid out once, in the order that layouts stated for them ask
    for; None where there is none. Values between a weight and where it is taken apart are in that order, too."""
    splits = [node for node in graph.nodes if node.call.name == "split" and len(set(_sections(node))) > 1]
    if not held or not splits or graph.state:
        return None
    tracer = _Tracer(graph, atoms, held)
    made: dict[Node, list[Node]] = {}
    stored = dict(graph.stored)
    for node in splits:
        found = tracer.weights(node.inputs[0], _axis(node))
        parts = _parts(graph, found)
        if parts > 1 and all(size % parts == 0 for size in _sections(node)):
            made[node] = list(_taken_apart(node, parts))
            stored |= {one.weight: Interleaved(one.dim, _sections(node), parts) for one in found}
    if not made:
        return None
    nodes = [one for node in graph.nodes for one in made.get(node, [node])]
    return replace(graph, nodes=nodes, stored=stored)


def _axis(node: Node) -> int:
    return node.call.axis(node.call.attr("axis", 0))


def _sections(node: Node) -> tuple[int, ...]:
    return tuple(out.type.shape[_axis(node)] for out in node.outputs)


def _parts(graph: Graph, found: list[_Found]) -> int:
    """How many devices share what was found, as is stated for it; 1 where that does not agree."""
    stated = set()
    for one in found:
        annotation = graph.annotations.get(one.stated) if one.stated is not None else None
        if annotation is not None:
            axes = annotation.sharding.axes_of(one.stated_dim)
            stated.add((axes, math.prod(graph.mesh.size(axis) for axis in axes)))
    return next(iter(stated))[1] if len(stated) == 1 else 1


@dataclass(frozen=True)
class _Found:
    """A dim of a weight; `stated`: the annotated value that is made of it, if there is one, and its dim there."""

    weight: Value
    dim: int
    stated: Value | None
    stated_dim: int


class _Tracer:
    """Follows a dim back to the weights that it comes from."""

    def __init__(self, graph: Graph, atoms: Atoms, held: Collection[str]) -> None:
        self._annotations, self._rules = graph.annotations, atoms.rules
        self._weights = {value for value in graph.params if value.name in held}
        self._made = {value: node for node in graph.nodes for value in node.outputs}
        self._alone = graph.inner_links()

    def weights(self, value: Value, dim: int) -> list[_Found]:
        """All weights that the dim of a value comes from; none if it comes from anything else, too, or if something
        else looks at what is between."""
        try:
            return list(self._search(value, dim, None, 0))
        except _OtherError:
            return []

    def _search(self, value: Value, dim: int, stated: Value | None, stated_dim: int) -> Iterator[_Found]:
        if value not in self._alone:
            raise _OtherError
        if value in self._annotations:
            stated, stated_dim = value, dim
        if value in self._weights:
            yield _Found(value, dim, stated, stated_dim)
            return
        node = self._made.get(value)
        if node is None or node.call.name not in _ALIKE:
            raise _OtherError
        rule = self._rules[node].rule
        factor = rule.outputs[0][dim]
        tensors = list(zip(node.inputs, rule.inputs, strict=True))
        if not isinstance(factor, (str, tuple)) or (isinstance(factor, tuple) and len(factor) != 1):
            raise _OtherError
        (name,) = atoms_of(factor)
        for operand, dims in tensors:
            for position, other in enumerate(dims):
                if name in atoms_of(other):
                    yield from self._search(operand, self._alone_in(other, position), stated, stated_dim)

    @staticmethod
    def _alone_in(dim: Dim, position: int) -> int:
        if len(atoms_of(dim)) > 1:
            raise _OtherError
        return position


class _OtherError(Exception):
    """The dim comes from something else."""


def _taken_apart(node: Node, parts: int) -> Iterator[Node]:
    """The nodes that take an interleaved value apart: its dim is (devices, what each has of all sections)."""
    (value,), axis, scopes, where = node.inputs, _axis(node), node.scopes, node.where
    builder = relax.BlockBuilder()
    before, after = value.type.shape[:axis], value.type.shape[axis + 1 :]
    each = [size // parts for size in _sections(node)]

    def made(expr: relax.Expr, source: Value, outputs: tuple[Value, ...] | None, name: str) -> Node:
        call = op_call(builder.normalize(expr))
        values = outputs or tuple(Value(f"{name}_{n}", out) for n, out in enumerate(call.outputs))
        return Node(call, (source,), values, scopes, where)

    def var(source: Value) -> relax.Var:
        return source.variable()

    shape = (*before, parts, sum(each), *after)
    apart = made(op.reshape(var(value), shape), value, None, f"{value.name}_parts")
    yield apart
    cuts = [sum(each[: n + 1]) for n in range(len(each) - 1)]
    split = made(op.split(var(apart.outputs[0]), cuts, axis + 1), apart.outputs[0], None, f"{value.name}_part")
    yield split
    for piece, result in zip(split.outputs, node.outputs, strict=True):
        yield made(op.reshape(var(piece), result.type.shape), piece, (result,), result.name)
