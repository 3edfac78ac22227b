"""A graph in which all rows are computed that masks choose from, in the making; what tells rows in the old one; and
where rows end that a mask chooses: put back, added up, averaged. Those that it leaves out are dropped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

_aten = torch.ops.aten
_SUMS = (_aten.sum.default, _aten.sum.dim_IntList)
_MEANS = (_aten.mean.default, _aten.mean.dim)


def without_rows(node: torch.fx.Node, along: Along, mask: Mask, to: RowsGraph) -> torch.fx.Node:
    """What an old node makes of rows together."""
    if node.target is _aten.index_put.default:
        return _put(node, along, mask, to)
    first = args_of(node)[0]
    if set(along) != {first} or node.target not in (*_SUMS, *_MEANS):
        raise OtherError
    kept = to.kept(to.place[first], along[first], mask)
    if node.target in _SUMS:
        return to.emit(node.target, kept, *args_of(node)[1:], **node.kwargs)
    return _mean(node, kept, along[first], mask, to)


def _mean(node: torch.fx.Node, kept: torch.fx.Node, dim: int, mask: Mask, to: RowsGraph) -> torch.fx.Node:
    shape, value = kept.meta["val"].shape, node.meta["val"]
    over = range(len(shape)) if node.target is _aten.mean.default else [d % len(shape) for d in args_of(node)[1]]
    keepdim = bool(args_of(node)[2]) if len(args_of(node)) > 2 else False
    wide = torch.float32 if value.dtype.itemsize < 4 else value.dtype
    total = to.emit(_aten.sum.dim_IntList, kept, list(over), keepdim, dtype=wide)
    each = math.prod(shape[d] for d in over if d != dim)
    count = to.emit(_aten.mul.Tensor, to.emit(_aten.sum.default, mask.node), each)
    mean = to.emit(_aten.div.Tensor, total, count)
    return mean if wide == value.dtype else to.emit(_aten._to_copy.default, mean, dtype=value.dtype)


def _put(node: torch.fx.Node, along: Along, mask: Mask, to: RowsGraph) -> torch.fx.Node:
    """`x[mask] = rows`, `x[rows] = ...`, or that added up."""
    x, indices, values, *more = args_of(node)
    if x in along:
        raise OtherError
    accumulate, rows, own = bool(more and more[0]), to.place[values], values in along
    first = next(n for n, index in enumerate(indices) if index is not None)
    dims = _dims(indices, first, mask, to)
    rest = x.meta["val"].dim() - first - len(dims)
    ndim = rows.meta["val"].dim()
    if (own and along[values] != ndim - 1 - rest) or (not own and ndim > rest):
        raise OtherError
    shape = tuple(x.meta["val"].shape[first : first + len(dims)])
    if None in dims or len(set(dims)) < len(dims) or shape != tuple(mask.shape[dim] for dim in dims):
        if not accumulate or first or not own:
            raise OtherError
        safe = [index if index is None else to.index(index, along, mask) for index in indices]
        return to.emit(_aten.index_put.default, to.place[x], safe, to.kept(rows, along[values], mask), True)
    others = [dim for dim in range(len(mask.shape)) if dim not in dims]
    if others and not accumulate:
        raise OtherError  # which of several rows stays isn't said
    return _put_in_place(to.place[x], dims, others, rows, own, rest, accumulate, mask, to)


def _dims(indices: Any, first: int, mask: Mask, to: RowsGraph) -> list[Any]:
    """The dims of the mask that indices are along; None for what is along none of them."""
    if indices[first].meta["val"].dtype != torch.bool:
        one_dim = [index is not None and index.meta["val"].dim() == 1 for index in indices[first:]]
        return [to.dims.get(index) if flat else None for index, flat in zip(indices[first:], one_dim, strict=True)]
    if len(indices) != first + 1 or not same(indices[first], mask.of):
        raise OtherError
    return list(range(len(mask.shape)))


def _put_in_place(
    place: torch.fx.Node,
    dims: list[int],
    others: list[int],
    rows: torch.fx.Node,
    own: bool,
    rest: int,
    accumulate: bool,
    mask: Mask,
    to: RowsGraph,
) -> torch.fx.Node:
    """Rows, at dims of a tensor before `rest` more that are these dims of the mask, of which there are `others`.
    `own`: there is a row for each of the mask's elements."""
    shape = tuple(rows.meta["val"].shape)
    before = shape[: len(shape) - rest - 1] if own else ()
    if own:
        rows = to.reshaped(rows, (*before, *mask.shape, *shape[len(shape) - rest :]))
    chosen = to.reshaped(mask.node, (*mask.shape, *([1] * rest)))
    left = [dim for dim in range(len(mask.shape)) if dim not in others]
    order = [left.index(dim) for dim in dims]

    def turned(value: torch.fx.Node) -> torch.fx.Node:
        ndim = value.meta["val"].dim()
        start = ndim - rest - len(order)
        return to.permuted(value, [*range(start), *(start + dim for dim in order), *range(ndim - rest, ndim)])

    if not accumulate:
        return to.emit(_aten.where.self, turned(chosen), turned(rows) if own else rows, place)
    rows = to.chosen(chosen, rows)
    if others:
        rows = to.emit(_aten.sum.dim_IntList, rows, [len(before) + dim for dim in others])
    return to.emit(_aten.add.Tensor, place, turned(rows))


#: By operand the dim that rows are along; operands that have no rows are left out.
Along = Mapping[torch.fx.Node, int]


class OtherError(Exception):
    """Rows are taken for something else."""


@dataclass(frozen=True)
class Mask:
    """A mask of known shape in the new graph, and in the old one."""

    node: torch.fx.Node
    of: torch.fx.Node
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many rows there are in all."""
        return math.prod(self.shape)


@dataclass(eq=False)
class RowsGraph:
    """The new graph. `place`: what old nodes are in it; `dims`: of old nodes that are where rows stand, along which dim
    of the mask; `fake`: in which results' types are found."""

    fake: Any
    graph: torch.fx.Graph = field(default_factory=torch.fx.Graph)
    place: dict[torch.fx.Node, torch.fx.Node] = field(default_factory=dict)
    dims: dict[torch.fx.Node, int] = field(default_factory=dict)

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """A node that calls an operator."""
        made = self.graph.call_function(target, args, kwargs)
        with self.fake:
            taken = torch.fx.map_arg((args, kwargs), lambda node: node.meta["val"])
            made.meta["val"] = target(*taken[0], **taken[1])
        return made

    def reshaped(self, value: torch.fx.Node, shape: tuple[int, ...]) -> torch.fx.Node:
        """The value in a shape."""
        same = tuple(value.meta["val"].shape) == shape
        return value if same else self.emit(_aten.reshape.default, value, [*shape])

    def permuted(self, value: torch.fx.Node, order: list[int]) -> torch.fx.Node:
        """The value's dims in an order."""
        return value if order == sorted(order) else self.emit(_aten.permute.default, value, order)

    def kept(self, rows: torch.fx.Node, dim: int, mask: Mask, other: torch.fx.Node | None = None) -> torch.fx.Node:
        """Rows along a dim, with another one, or 0, for those that the mask leaves out."""
        value = rows.meta["val"]
        chosen = self.reshaped(mask.node, (mask.count, *([1] * (value.dim() - dim - 1))))
        return self.chosen(chosen, rows) if other is None else self.emit(_aten.where.self, chosen, rows, other)

    def chosen(self, where: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
        """The value where that is true, else 0."""
        zero = self.emit(_aten.scalar_tensor.default, 0, dtype=value.meta["val"].dtype)
        return self.emit(_aten.where.self, where, value, zero)

    def index(self, index: torch.fx.Node, along: Along, mask: Mask) -> torch.fx.Node:
        """An index that is 0 in rows that the mask leaves out, where it may be anything."""
        place = self.place[index]
        return place if index not in along else self.kept(place, along[index], mask)


def rows_of(node: torch.fx.Node) -> int | None:
    """The dim of an old node's tensors that rows are along; None if there is none. Refused are several such dims, and
    sizes made of more than one number."""
    found = set()
    for tensor in tensors_of(node):
        dims = [dim for dim, size in enumerate(tensor.shape) if is_open(size)]
        if len(dims) > 1 or any(symbol_of(tensor.shape[dim]) is None for dim in dims):
            raise OtherError
        found.add(dims[0] if dims else None)
    if len(found) > 1:
        raise OtherError
    return found.pop() if found else None


def args_of(node: torch.fx.Node) -> tuple[Any, ...]:
    """The positional arguments of a node."""
    return node.args


def tensors_of(node: torch.fx.Node) -> list[torch.Tensor]:
    """The tensors that a node gives."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [one for one in values if isinstance(one, torch.Tensor)]


def is_open(size: Any) -> bool:
    """Whether only data tell a size."""
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def symbol_of(size: Any) -> Any:
    """The one symbol that a size is; None if it is made of more."""
    return size.node.expr if isinstance(size, torch.SymInt) and size.node.expr.is_symbol else None


def same(one: Any, other: Any, depth: int = 8) -> bool:
    """Whether nodes compute the same, of the same operands at that depth."""
    if not isinstance(one, torch.fx.Node) or not isinstance(other, torch.fx.Node):
        return type(one) is type(other) and one == other
    if one is other or depth == 0:
        return one is other
    alike = one.op == other.op == "call_function" and one.target is other.target
    if not alike or len(one.args) != len(other.args) or one.kwargs != other.kwargs:
        return False
    if torch.Tag.nondeterministic_seeded in getattr(one.target, "tags", ()):
        return False
    return all(same(a, b, depth - 1) for a, b in zip(one.args, other.args, strict=True))
