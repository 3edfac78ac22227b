"""Which values of a forward part are kept for the backward part, so that these are few bytes and little is computed
again: a minimum cut of the graph.

A value is two nodes, before and after it is kept. Each value belongs to one side of the cut: what there is anyway (the
function's parameters) to the first, what the backward part takes to the second.

    first -> before v    cut if v is computed again: what that takes, times a price
    before v -> after v  cut if v is kept: its bytes
    after v -> before w  never cut, where w is computed from v
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mesh_tensor.base.dtypes import itemsize

from .ir import Graph, Value

_FIRST, _SECOND = "first", "second"
_STEPS = 12  # halvings of what computing a byte again costs, in bytes kept


def bytes_kept(graph: Graph, taken: Collection[Value], again: Collection[Value]) -> int:
    """The bytes that are kept where the values `again` are computed again, for a backward part that takes `taken`."""
    made = {value: node for node in graph.nodes for value in node.outputs}
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
