"""Where rows end that a mask chooses: put back, added up, averaged. Those that it leaves out are dropped."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from .torch_reduced_rows import reduced
from .torch_rows_graph import Along, Mask, OtherError, RowsGraph, args_of, same

_aten = torch.ops.aten
_SUMS = (_aten.sum.default, _aten.sum.dim_IntList)
_SCATTERS = (*(_aten.scatter_add.default, _aten.scatter_reduce.two, _aten.scatter.src, _aten.scatter.value),)
#: Operators that find an order along a dim, and which of their arguments that is.
_ORDERS = {_aten.topk.default: 2, _aten.sort.default: 1, _aten.sort.stable: 2}
_MOVED = (_aten.alias.default, _aten.clone.default, _aten.detach.default, _aten.slice.Tensor)
_MEANS = (_aten.mean.default, _aten.mean.dim)


def without_rows(node: torch.fx.Node, along: Along, mask: Mask, to: RowsGraph) -> Any:
    """What an old node makes of rows together; several results are a tuple."""
    if node.target is _aten.index_put.default:
        return _put(node, along, mask, to)
    if node.target in _SCATTERS:
        return _scattered(node, along, mask, to)
    first = args_of(node)[0]
    if set(along) != {first}:
        raise OtherError
    if node.target not in (*_SUMS, *_MEANS):
        return reduced(node, along[first], mask, to)
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


def _scattered(node: torch.fx.Node, along: Along, mask: Mask, to: RowsGraph) -> torch.fx.Node:
    """Rows of indices along the dim in which these say where values go."""
    x, dim, index, values, *more = args_of(node)
    dim %= x.meta["val"].dim()
    own = isinstance(values, torch.fx.Node) and values in along
    if x in along or along.get(index) != dim or (own and along[values] != dim):
        raise OtherError
    if node.target is _aten.scatter_add.default and own:
        places, rows = to.index(index, along, mask), to.kept(to.place[values], dim, mask)
        return to.emit(node.target, to.place[x], dim, places, rows)
    size = x.meta["val"].shape[dim]
    places = to.place[index]
    past = to.emit(_aten.where.self, to.emit(_aten.ge.Scalar, places, size), _number(size + 1, to), places)
    rows = to.kept(to.place[values], dim, mask) if own else to.place.get(values, values)

    def put(longer: torch.fx.Node, past: torch.fx.Node) -> torch.fx.Node:
        return to.emit(node.target, longer, dim, past, rows, *more, **node.kwargs)

    return _with_one_more(x, dim, to.kept(past, dim, mask, _number(size, to)), put, to)


def _with_one_more(x: torch.fx.Node, dim: int, places: torch.fx.Node, put: Any, to: RowsGraph) -> torch.fx.Node:
    """What is put into x and one more place, at which rows go that the mask leaves out."""
    size = x.meta["val"].shape[dim]
    one = to.emit(_aten.slice.Tensor, to.place[x], dim, 0, 1)
    made = put(to.emit(_aten.cat.default, [to.place[x], one], dim), places)
    return to.emit(_aten.slice.Tensor, made, dim, 0, size)


def _number(value: int, to: RowsGraph) -> torch.fx.Node:
    return to.emit(_aten.scalar_tensor.default, value, dtype=torch.int64)


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
        if not accumulate and len(indices) == 1:
            return _put_at(node, along, mask, to)
        if not accumulate or first or not own:
            raise OtherError
        safe = [index if index is None else to.index(index, along, mask) for index in indices]
        return to.emit(_aten.index_put.default, to.place[x], safe, to.kept(rows, along[values], mask), True)
    others = [dim for dim in range(len(mask.shape)) if dim not in dims]
    if others and not accumulate and not (_is_one_of(mask, others) and rows.meta["val"].dtype != torch.bool):
        raise OtherError  # which of several rows stays isn't said
    return _put_in_place(to.place[x], dims, others, rows, own, rest, accumulate, mask, to)


def _put_at(node: torch.fx.Node, along: Along, mask: Mask, to: RowsGraph) -> torch.fx.Node:
    """`x[rows] = ...` at whole numbers, which may count from the end."""
    x, (index,), values, *_ = args_of(node)
    own, size = values in along, x.meta["val"].shape[0]
    if index.meta["val"].dim() != 1 or index.meta["val"].dtype == torch.bool or not size:
        raise OtherError
    places = to.place[index]
    from_end = to.emit(_aten.lt.Scalar, places, 0)
    places = to.emit(_aten.where.self, from_end, to.emit(_aten.add.Scalar, places, size), places)
    none = to.emit(
        _aten.logical_or.default, *(to.emit(op, places, n) for op, n in ((_aten.lt.Scalar, 0), (_aten.ge.Scalar, size)))
    )
    places = to.kept(to.emit(_aten.where.self, none, _number(size + 1, to), places), 0, mask, _number(size, to))
    rows = to.kept(to.place[values], along[values], mask) if own else to.place[values]
    return _with_one_more(x, 0, places, lambda longer, at: to.emit(node.target, longer, [at], rows), to)


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

    if accumulate or (others and own):  # of `others`, one row at most is put
        rows = to.chosen(chosen, rows)
    if others and (accumulate or own):
        over, dtype = [len(before) + dim for dim in others], rows.meta["val"].dtype
        rows = to.emit(_aten.sum.dim_IntList, rows, over, dtype=dtype)
    if accumulate:
        return to.emit(_aten.add.Tensor, place, turned(rows))
    if others:
        chosen = to.emit(_aten.ne.Scalar, to.emit(_aten.sum.dim_IntList, chosen, others), 0)
    return to.emit(_aten.where.self, turned(chosen), turned(rows) if own else rows, place)


def _is_one_of(mask: Mask, dims: list[int]) -> bool:
    """Whether the mask chooses at most one of those along a dim: the places of the largest, or of what is sorted, are
    different ones there, and it says which is some number."""
    if isinstance(mask.of, tuple) or len(dims) != 1 or mask.of.target is not _aten.eq.Scalar:
        return False
    places: Any = args_of(mask.of)[0]
    while places.target in _MOVED:
        places = args_of(places)[0]
    if places.target is not operator.getitem or args_of(places)[1] != 1:
        return False
    order: Any = args_of(places)[0]
    if order.target not in _ORDERS:
        return False
    at = _ORDERS[order.target]
    dim = args_of(order)[at] if len(args_of(order)) > at else order.kwargs.get("dim", -1)
    return bool(dim % len(mask.shape) == dims[0])
