"""Values of the forward part that the backward part computes again, instead of keeping them till then.

What is computed again is written before the first of the backward part that takes it, by the same operators on what is
kept: results are the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tvm import relax

from mesh_tensor.annotations.names import source_names
from mesh_tensor.base.dtypes import itemsize
from mesh_tensor.base.errors import refuse

from .decide import node_flops
from .ir import Graph, Node, Value, leaves, nodes_before
from .joint import Joint

FULL, SELECTIVE, AUTO = "full", "selective", "auto"
_LAYER = re.compile(r"(.*?)\.?\b(\d+)$")  # "blocks.0": the first of the layers "blocks"
_SMALL = 8  # times fewer elements than what it is made of, from which on a result is kept
_HEAVY = 64  # operations per element of a result, from which on the result is kept


def computed_again(
    graph: Graph, recompute: str | int | Sequence[str], func: relax.Function, taken: Collection[str] = ()
) -> set[Value]:
    """The values that are computed again, instead of kept.

    Args:
        recompute: "full": what is inside of layers, that is everything before the last of their results but these
            results; "selective": whatever takes few operations and is no sum of activations; "auto": of that so much
            that as little as possible is kept; a number: so much that at most so many bytes are kept, and if that is
            not enough, as "full"; or the names of values that are kept: everything before the last of them but they.
            Small results are kept in any case.
        func: has the names of layers.
        taken: the values that the backward part takes, by name, where "auto" or a number asks for that.

    Raises:
        MeshTensorError: there are no layers; or more bytes than the number are kept, whatever is computed again.
    """
    if recompute == AUTO or isinstance(recompute, int):
        return _under(graph, None if recompute == AUTO else int(recompute), func, set(taken))
    small = {value for node in graph.nodes for value in node.outputs if _is_small(value, node)}
    if recompute == SELECTIVE:
        return _cheap(graph) - small
    kept = set(recompute)
    if recompute == FULL:
        kept = layers(source_names(func), {value.name for node in graph.nodes for value in node.outputs})
        if not kept:
            refuse(
                f"recompute={FULL!r} of a model without layers",
                why='layers are submodules with numbers, as "blocks.0", that give one tensor each',
                fix="name the submodules whose results are kept, as recompute=['stem', 'body']",
            )
    inside = nodes_before(graph.nodes, {value for value in graph.values() if value.name in kept})
    return {value for node in inside for value in node.outputs if value.name not in kept} - small


def _under(graph: Graph, limit: int | None, func: relax.Function, taken: set[str]) -> set[Value]:
    """The values that are computed again so that at most `limit` bytes are kept; None: as few as can be."""
    wanted = {value for value in graph.values() if value.name in taken}
    small = {value for node in graph.nodes for value in node.outputs if _is_small(value, node)}
    found = least_kept(graph, wanted, _cheap(graph) - small, limit)
    if limit is None or bytes_kept(graph, wanted, found) <= limit:
        return found
    there = {value.name for node in graph.nodes for value in node.outputs}
    inside = computed_again(graph, FULL, func) if layers(source_names(func), there) else found
    if bytes_kept(graph, wanted, inside) > limit:
        least = min(bytes_kept(graph, wanted, way) for way in (found, inside))
        refuse(
            f"recompute={limit}, but the backward pass takes at least {least} bytes that are kept",
            where="what is kept of a batch, on all devices together",
            fix="ask for more bytes, or for microbatches: accumulate=",
        )
    return inside


def _is_small(value: Value, node: Node) -> bool:
    """Whether the value is a sum over much, as a batch's statistics are: what devices sent each other for it is not
    sent again."""
    return _SMALL * value.type.elements <= max((other.type.elements for other in node.inputs), default=0)


def layers(names: Mapping[str, str], there: Collection[str]) -> set[str]:
    """The results of the outermost submodules that are numbered, where there are several of a kind."""
    found: dict[str, set[str]] = {}
    for theirs, ours in names.items():
        match = _LAYER.fullmatch(theirs)
        if match and ours in there:
            found.setdefault(match[1], set()).add(ours)
    several = {prefix: ours for prefix, ours in found.items() if len(ours) > 1}
    outer = [p for p in several if not any(p != other and p.startswith(other) for other in several)]
    return {name for prefix in outer for name in several[prefix]}


def _cheap(graph: Graph) -> set[Value]:
    computed = {value for node in graph.nodes for value in node.outputs}
    found: set[Value] = set()
    for node in graph.nodes:
        activations = [value for value in node.inputs if value in computed]
        adds = node.call.name == "add" and len(activations) > 1  # residual streams: each layer's needs all before
        size = sum(value.type.elements for value in node.outputs)
        if not adds and node.kernel is None and node_flops(node) <= _HEAVY * size:
            found.update(node.outputs)
    return found - set(leaves(graph.result))


class Again(Mapping[Value, relax.Expr]):
    """A function's values as its backward part has them. `copies`: the name of a value -> that of the one that was
    computed again."""

    def __init__(self, joint: Joint, values: Collection[Value]) -> None:
        self._joint, self._values = joint, values
        self._made: dict[Value, relax.Expr] = {}
        self._places = {value: number for number, node in enumerate(joint.graph.nodes) for value in node.outputs}
        self.copies: dict[str, str] = {}

    def __getitem__(self, value: Value) -> relax.Expr:
        if value not in self._values:
            return self._joint.env[value]
        if value not in self._made:
            self._make(value)
        return self._made[value]

    def __iter__(self) -> Any:
        return iter(self._joint.env)

    def __len__(self) -> int:
        return len(self._joint.env)

    def _make(self, value: Value) -> None:
        nodes, wanted, todo = self._joint.graph.nodes, set[int](), [value]
        while todo:
            one = todo.pop()
            if one in self._values and one not in self._made and self._places[one] not in wanted:
                wanted.add(self._places[one])
                todo += nodes[self._places[one]].inputs
        writer = self._joint.writer
        for number in sorted(wanted):
            node = nodes[number]
            outputs = tuple(writer.copy(value) for value in node.outputs)
            env = {value: self[value] for value in node.inputs}
            with writer.only_if_used():
                writer.again(replace(node, outputs=outputs), env)
            for old, new in zip(node.outputs, outputs, strict=True):
                self._made[old] = env[new]
                self.copies[old.name] = new.name


_FIRST, _SECOND = "first", "second"
_STEPS = 12  # halvings of what computing a byte again costs, in bytes kept


def bytes_kept(graph: Graph, taken: Collection[Value], again: Collection[Value]) -> int:
    """The bytes that are kept where the values `again` are computed again, for a backward part that takes `taken`."""
    made = graph.makers()
    kept, seen, todo = 0, set[Value](), [value for value in taken if value in made]
    while todo:
        value = todo.pop()
        if value in seen or value not in made:
            continue
        seen.add(value)
        if value in again:
            todo += made[value].inputs
        else:
            kept += _bytes(value)
    return kept


def least_kept(graph: Graph, taken: Collection[Value], may: Collection[Value], limit: int | None) -> set[Value]:
    """Of the values `may` those that are computed again for a backward part that takes `taken`: so few of them that at
    most `limit` bytes are kept; where that can't be, or there is no limit, those with which the fewest are."""
    least = _cut(graph, taken, may, 0.0)
    if limit is None or bytes_kept(graph, taken, least) > limit:
        return least
    if bytes_kept(graph, taken, ()) <= limit:
        return set()
    low, high = 0.0, 8.0
    for _ in range(_STEPS):
        price = (low + high) / 2
        found = _cut(graph, taken, may, price)
        if bytes_kept(graph, taken, found) > limit:
            high = price
        else:
            low, least = price, found
    return least


def _cut(graph: Graph, taken: Collection[Value], may: Collection[Value], price: float) -> set[Value]:
    """The values that are computed again, if what that reads and writes costs `price` per byte."""
    import networkx

    net: Any = networkx.DiGraph()
    net.add_edge(_FIRST, _SECOND, capacity=0)
    made = {value for node in graph.nodes for value in node.outputs}
    for node in graph.nodes:
        touched = sum(map(_bytes, {*node.inputs, *node.outputs}))
        for value in node.outputs:
            net.add_edge((value, 0), (value, 1), capacity=_bytes(value))
            net.add_edge(_FIRST, (value, 0), **({"capacity": round(price * touched)} if value in may else {}))
            for source in node.inputs:
                if source in made:
                    net.add_edge((source, 1), (value, 0))
    for value in taken:
        if value in made:
            net.add_edge((value, 1), _SECOND)
    _, (_, second) = networkx.minimum_cut(net, _FIRST, _SECOND)
    return {value for value in made if (value, 0) in second}


def _bytes(value: Value) -> int:
    return value.type.elements * itemsize(value.type.dtype)
