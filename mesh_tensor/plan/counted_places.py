"""What is taken by index at counted places, as a range's, is written as the slice that it is: its dims are split then.
What every row takes of itself is taken row by row.

rows = arange(16), reshaped to (16, 1, 1)
x[rows, arange(8) + 2]  ->  reshape(x[:, 2:10], (16, 1, 8))
x[arange(16), places]   ->  gather_nd(x, places, batch_dims=1), if x has 16 rows
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from tvm import relax

from .expansion import Expansion, Make
from .ir import Graph, Node, Value, nodes_before

_INDEX_DTYPES = ("int32", "int64")
_Call = Callable[[relax.Expr], relax.Expr]
_LIMIT = 2**31  # all numbers of an index are smaller: none overflows
_RESHAPED = frozenset({"reshape", "flatten", "expand_dims", "squeeze"})


@dataclass(frozen=True)
class _Count:
    """The elements are start, start + step, ... along a dim, and the same in all others; no dim: all are `start`."""

    start: int
    step: int = 1
    dim: int | None = None


def counted_slices(graph: Graph) -> Graph:
    """The graph in which such look-ups are slices, or by rows; indices that nothing takes any more are not made."""
    counts: dict[Value, _Count] = {}
    columns: dict[Value, tuple[Value, ...]] = {}  # of stacked indices
    made: dict[Node, Make] = {}
    for node in graph.nodes:
        if (count := _count_of(node, counts)) is not None:
            counts[node.outputs[0]] = count
        elif node.call.name == "stack" and node.call.attr("axis") in (-1, node.outputs[0].type.ndim - 1):
            columns[node.outputs[0]] = node.inputs
        elif (indices := _indices(node, columns)) is not None:
            first, taken = indices
            known = all(value in counts for value in taken)
            if known and (chain := _slice(node, first, [_aligned(value, counts, taken) for value in taken])):
                made[node] = partial(_chained, chain)
            elif node.call.name == "gather_nd" and (rows := _own_rows(node, taken, counts)):
                made[node] = partial(_row_by_row, rows, taken[rows:])
    if not made:
        return graph
    nodes = [one for node in graph.nodes for one in (Expansion(node).nodes(made[node]) if node in made else [node])]
    ours = {*counts, *columns}  # what makes these goes where nothing takes them
    wanted = {*graph.kept(), *graph.state.values()}
    return replace(graph, nodes=nodes_before(nodes, wanted, lambda node: ours.isdisjoint(node.outputs)))


def _own_rows(node: Node, indices: tuple[Value, ...], counts: dict[Value, _Count]) -> int:
    """In how many first dims, but not all that are indexed, a look-up takes from every position by that position."""
    data = node.inputs[0].type.shape
    for dim, index in enumerate(indices):
        count, places = counts.get(index), index.type.shape
        own = count is not None and (count.start, count.step) == (0, 1) and (count.dim == dim or data[dim] == 1)
        if not own or dim >= len(places) or places[dim] != data[dim]:
            return dim
    return len(indices) - 1


def _row_by_row(rows: int, indices: tuple[Value, ...], made: Expansion) -> list[relax.Var]:
    """The look-up whose first dims are a batch."""
    places = made(relax.op.stack([made.variable(index) for index in indices], axis=-1))
    return [made(relax.op.gather_nd(made.given[0], places, batch_dims=rows))]


def _count_of(node: Node, counts: dict[Value, _Count]) -> _Count | None:
    """How the node's result counts, if that is known."""
    if len(node.outputs) != 1 or node.outputs[0].type.dtype not in _INDEX_DTYPES or not node.outputs[0].type.elements:
        return None
    make = _COUNTS.get("reshape" if node.call.name in _RESHAPED else node.call.name)
    count, (out,) = None if make is None else make(node, counts), node.outputs
    if count is None:
        return None
    length = 1 if count.dim is None else out.type.shape[count.dim]
    if length == 1:
        count = _Count(count.start)
    return count if max(abs(count.start), abs(count.start + count.step * length)) < _LIMIT else None


def _range(node: Node, _: dict[Value, _Count]) -> _Count | None:
    """Of whole numbers; what it counts to is its length."""
    begin, _end, step = node.call.literals if len(node.call.literals) == 3 else (None, None, None)
    return _Count(begin, step, 0) if isinstance(begin, int) and isinstance(step, int) else None


def _cast(node: Node, counts: dict[Value, _Count]) -> _Count | None:
    return counts.get(node.inputs[0])


def _reshaped(node: Node, counts: dict[Value, _Count]) -> _Count | None:
    """The dim is where so many elements stand before it, if it is as long there."""
    count, before, after = counts.get(node.inputs[0]), node.inputs[0].type.shape, node.outputs[0].type.shape
    if count is None or count.dim is None:
        return count
    dim = count.dim
    same = (d for d in range(len(after)) if after[d] == before[dim] and math.prod(after[:d]) == math.prod(before[:dim]))
    found = next(same, None)
    return None if found is None else replace(count, dim=found)


def _broadcast(node: Node, counts: dict[Value, _Count]) -> _Count | None:
    """A dim of more than one element stays as it is, counted from the last."""
    count = counts.get(node.inputs[0])
    if count is None or count.dim is None:
        return count
    return replace(count, dim=count.dim + node.outputs[0].type.ndim - node.inputs[0].type.ndim)


def _added(node: Node, counts: dict[Value, _Count]) -> _Count | None:
    """With a constant number."""
    for index, other in (node.inputs, reversed(node.inputs)):
        if (count := counts.get(index)) is not None and other.data is not None and other.type.elements == 1:
            if node.outputs[0].type != index.type:
                return None
            return replace(count, start=count.start + int(other.data.data.numpy().item()))
    return None


_COUNTS: dict[str, Callable[[Node, dict[Value, _Count]], _Count | None]] = {
    "add": _added,
    "arange": _range,
    "astype": _cast,
    "broadcast_to": _broadcast,
    "reshape": _reshaped,
}


def _indices(node: Node, columns: dict[Value, tuple[Value, ...]]) -> tuple[int, tuple[Value, ...]] | None:
    """The first dim that a look-up indexes, and the index of each from there on."""
    call = node.call
    if call.name == "take" and len(node.inputs) == 2:
        axis = call.attr("axis")
        return (call.axis(axis), node.inputs[1:]) if axis is not None else None
    if call.name == "index_tensor":
        return 0, node.inputs[1:]
    if call.name == "gather_nd" and call.attr("batch_dims", 0) == 0 and node.inputs[1] in columns:
        return 0, columns[node.inputs[1]]
    return None


def _aligned(value: Value, counts: dict[Value, _Count], indices: tuple[Value, ...]) -> _Count:
    """How an index counts in the dims that all of them broadcast to."""
    count, more = counts[value], max(index.type.ndim for index in indices) - value.type.ndim
    return count if count.dim is None else replace(count, dim=count.dim + more)


def _slice(node: Node, first: int, counts: list[_Count]) -> list[_Call]:
    """The operators, one after the other, that take the same; none where that is no slice: of dims that count together,
    backwards, or out of the data."""
    data, out = node.call.inputs[0].shape, node.call.outputs[0].shape
    places = len(out) - len(data) + len(counts)
    moving = [count.dim for count in counts if count.dim is not None]
    cuts = []
    for d, count in enumerate(counts, first):
        last = count.start if count.dim is None else count.start + count.step * (out[first + count.dim] - 1)
        if not 0 <= count.start <= last < data[d]:
            return []
        cuts.append((d, count.start, last + 1, count.step))
    if len(set(moving)) < len(moving):
        return []
    chain: list[_Call] = []
    if parts := [cut for cut in cuts if cut[1:] != (0, data[cut[0]], 1)]:
        chain.append(lambda value: relax.op.strided_slice(value, *map(list, zip(*parts, strict=True))))
    ends = [-1 if count.dim is None else count.dim for count in counts]
    order = sorted(range(len(counts)), key=ends.__getitem__)
    if order != sorted(order):
        dims = [*range(first), *(first + n for n in order), *range(first + len(counts), len(data))]
        chain.append(lambda value: relax.op.permute_dims(value, dims))
    shape = [size if d - first in moving or not 0 <= d - first < places else 1 for d, size in enumerate(out)]
    chain.append(lambda value: relax.op.reshape(value, shape))
    return chain if tuple(shape) == out else [*chain, lambda value: relax.op.broadcast_to(value, out)]


def _chained(chain: list[_Call], made: Expansion) -> list[relax.Var]:
    """What such operators give, one after the other."""
    x = made.given[0]
    for make in chain:
        x = made(make(x))
    return [x]
