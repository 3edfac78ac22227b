"""Rows that a mask chooses, as many as is known: `x[mask]` of a known size, and `x[mask] = rows`, of which there is one
for each that is chosen. A call in which the mask chooses more or fewer is refused as looking up what isn't there."""

from __future__ import annotations

from typing import Any

import torch

from .torch_rows_graph import OtherError, RowsGraph, args_of, is_open

_aten = torch.ops.aten


def is_of_mask(node: torch.fx.Node) -> bool:
    """Whether the node takes, or writes, rows of a mask that are as many as is known."""
    if node.target not in (_aten.index.Tensor, _aten.index_put.default):
        return False
    x, indices = args_of(node)[:2]
    masks = [index for index in indices if index is not None and index.meta["val"].dtype == torch.bool]
    operands = [x, *masks, node, *([args_of(node)[2]] if node.target is _aten.index_put.default else [])]
    if len(masks) != 1 or any(is_open(size) for each in operands for size in each.meta["val"].shape):
        return False
    if node.target is _aten.index.Tensor:
        return True
    rest = x.meta["val"].dim() - _first(indices) - masks[0].meta["val"].dim()
    return args_of(node)[2].meta["val"].dim() > rest  # a value for all rows goes where the mask says


def known_rows(node: torch.fx.Node, to: RowsGraph) -> torch.fx.Node:
    """What such a node gives."""
    x, indices, *more = args_of(node)
    first, rows = _first(indices), to.place[x]
    flags = to.place[indices[first]]
    shape, dims = tuple(x.meta["val"].shape), tuple(flags.meta["val"].shape)
    rest = shape[first + len(dims) :]
    count = flags.meta["val"].numel()
    if len(indices) != first + 1 or not all(isinstance(size, int) for size in shape) or not count:
        raise OtherError
    flat = to.reshaped(flags, (count,))
    rows = to.reshaped(rows, (*shape[:first], count, *rest))
    if node.target is _aten.index.Tensor:
        known = int(node.meta["val"].shape[first])
        order = to.emit(
            _aten.sort.stable, to.emit(_aten._to_copy.default, flat, dtype=torch.int64), stable=True, descending=True
        )
        places = to.emit(_aten.slice.Tensor, to.item(order, 1), 0, 0, known)
        return to.emit(_aten.index_select.default, rows, first, _if_so_many(flat, known, places, count, to))
    values = to.place[more[0]]
    known = values.meta["val"].shape[values.meta["val"].dim() - len(rest) - 1]
    if (more[1:] and more[1]) or first or values.meta["val"].dim() != len(rest) + 1:
        raise OtherError
    rank = to.emit(_aten.sub.Tensor, to.emit(_aten.cumsum.default, flat, 0), 1)
    rank = to.emit(_aten.where.self, flat, rank, to.emit(_aten.scalar_tensor.default, 0, dtype=torch.int64))
    if known == 1:
        return to.emit(_aten.index_put.default, to.place[x], [flags], to.reshaped(values, rest))
    values = to.emit(_aten.index_select.default, values, 0, _if_so_many(flat, known, rank, known, to))
    values = to.emit(_aten.expand.default, values, [count, *rest])
    chosen = to.reshaped(flat, (count, *([1] * len(rest))))
    return to.reshaped(to.emit(_aten.where.self, chosen, values, rows), shape)


def _first(indices: Any) -> int:
    return next(number for number, index in enumerate(indices) if index is not None)


def _if_so_many(flat: torch.fx.Node, known: int, places: torch.fx.Node, size: int, to: RowsGraph) -> torch.fx.Node:
    """Places among `size`; none of them is there if not so many are chosen."""
    right = to.emit(_aten.eq.Scalar, to.emit(_aten.sum.default, flat), known)
    return to.emit(_aten.where.self, right, places, to.emit(_aten.scalar_tensor.default, size, dtype=torch.int64))
