"""Bags of embeddings: what torch's `embedding_bag` is made of, so that tables are split as those of embeddings are, and
have gradients. Bags of one size, as indices of two dims are, are combined along a dim; others by the places of rows.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch

from mesh_tensor.targets.dtypes import wide

Tensor = torch.Tensor
_aten = torch.ops.aten
_OPS = (_aten.embedding_bag.default, _aten.embedding_bag.padding_idx, _aten._embedding_bag.default)
_MEAN, _MAX = 1, 2


def bag_size(offsets: torch.fx.Node, of: torch.fx.Node) -> int | None:
    """How many indices each bag has, where an operator's operand says so: `arange(0, n, size)`, of n indices in all, is
    where bags begin. None of all others."""
    if of.target not in _OPS or of.args[2] is not offsets or offsets.target is not _aten.arange.start_step:
        return None
    if any(of.args[7:8]):  # with an end for the last bag
        return None
    start, end, size = [_value(arg) for arg in (*offsets.args, 1)[:3]]
    indices = _value(of.args[1]).shape[0]
    if start != 0 or type(size) is not int or size < 1 or _expr(end) != _expr(indices) or _expr(end) % size != 0:
        return None
    return size


def _value(arg: Any) -> Any:
    return arg.meta.get("val") if isinstance(arg, torch.fx.Node) else arg


def _expr(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | int,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, ...]:
    """Rows of a table, added up (or their mean, or maximum) in each bag, of those indices that aren't `padding_idx`.
    The other results, which are what torch keeps for its gradient, are none. Gradients of maxima of bags of different
    sizes, and of those that count how often an index comes, are torch's own: these are not taken apart."""
    padding = padding_idx if padding_idx is None or padding_idx >= 0 else weight.shape[0] + padding_idx
    if scale_grad_by_freq or (mode == _MAX and isinstance(offsets, Tensor)):
        begins = offsets if isinstance(offsets, Tensor) else torch.arange(0, indices.shape[0], offsets)
        options = scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset
        return _aten._embedding_bag_forward_only.default(  # type: ignore[no-any-return]
            weight, indices, begins, *options, -1 if padding is None else padding
        )
    rows = wide(_aten.embedding.default(weight, indices))
    if per_sample_weights is not None:
        rows = rows * wide(per_sample_weights)[:, None]
    counted = None if padding is None else indices != padding
    if isinstance(offsets, int):
        made = _even_bags(rows, counted, offsets, mode)
    else:
        made = _uneven_bags(rows, counted, indices, offsets, mode, include_last_offset)
    none = weight.new_zeros(0, dtype=indices.dtype)
    return made.to(weight.dtype), none, none, none


def _even_bags(rows: Tensor, counted: Tensor | None, size: int, mode: int) -> Tensor:
    bags = rows.unflatten(0, (-1, size))
    if counted is None:
        return bags.max(1).values if mode == _MAX else bags.mean(1) if mode == _MEAN else bags.sum(1)
    here = counted.unflatten(0, (-1, size))[..., None]
    if mode == _MAX:
        most = torch.where(here, bags, -torch.inf).max(1).values
        return torch.where(here.any(1), most, 0)
    total = torch.where(here, bags, 0).sum(1)
    return total / here.sum(1).clamp_min(1).to(total.dtype) if mode == _MEAN else total


def _uneven_bags(
    rows: Tensor, counted: Tensor | None, indices: Tensor, offsets: Tensor, mode: int, include_last_offset: bool
) -> Tensor:
    """Indices before the first bag, and after an end that is stated, have no bag: they are refused."""
    places = torch.arange(rows.shape[0], device=rows.device, dtype=offsets.dtype)
    bags = torch.bucketize(places, offsets, right=True) - 1
    count = offsets.shape[0] - include_last_offset
    here = rows if counted is None else torch.where(counted[:, None], rows, 0)
    total = rows.new_zeros((count, rows.shape[1])).index_add(0, bags, here)
    if mode != _MEAN:
        return total
    ones = rows.new_ones(rows.shape[0]) if counted is None else counted.to(rows.dtype)
    return total / rows.new_zeros(count).index_add(0, bags, ones).clamp_min(1)[:, None]


def _of_padding_from_0(*given: Any) -> tuple[Tensor, ...]:
    """The same, of an operator whose padding is none if it is negative."""
    return _embedding_bag(*(given[:-1] if len(given) == 9 and given[-1] < 0 else given))


BAGS = {
    _aten.embedding_bag.default: _embedding_bag,
    _aten.embedding_bag.padding_idx: _embedding_bag,
    _aten._embedding_bag.default: _of_padding_from_0,
}
