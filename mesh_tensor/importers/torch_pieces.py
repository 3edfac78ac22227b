"""What some of torch's operators are made of, where torch's own way writes into tensors, knows no gradient, or gives
other numbers than the operator. Each function takes what its operator takes.

Bags of embeddings are such, so that tables are split as those of embeddings are. Bags of one size, as indices of two
dims are, are combined along a dim; others by the places of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch._decomp.decompositions import index_add, index_copy, one_layer_lstm

from mesh_tensor.targets.dtypes import wide

_aten = torch.ops.aten
_OPS = (_aten.embedding_bag.default, _aten.embedding_bag.padding_idx, _aten._embedding_bag.default)
_MEAN_OF_BAG, _MAX_OF_BAG = 1, 2


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
    if scale_grad_by_freq or (mode == _MAX_OF_BAG and isinstance(offsets, Tensor) and not include_last_offset):
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
    here = None if counted is None else counted.unflatten(0, (-1, size))[..., None]
    if mode == _MAX_OF_BAG:
        places = torch.arange(size, device=rows.device)[:, None]
        known = _compared(bags, places == 0 if here is None else here.cumsum(1) == 1)
        if here is None:
            return known.max(1).values
        return torch.where(here.any(1), torch.where(here, known, -torch.inf).max(1).values, 0)
    if here is None:
        return bags.mean(1) if mode == _MEAN_OF_BAG else bags.sum(1)
    total = torch.where(here, bags, 0).sum(1)
    return total / here.sum(1).clamp_min(1).to(total.dtype) if mode == _MEAN_OF_BAG else total


def _uneven_bags(
    rows: Tensor, counted: Tensor | None, indices: Tensor, offsets: Tensor, mode: int, include_last_offset: bool
) -> Tensor:
    """Indices before the first bag, and after an end that is stated, have no bag: they are refused."""
    places = torch.arange(rows.shape[0], device=rows.device, dtype=offsets.dtype)
    bags = torch.bucketize(places, offsets, right=True) - 1
    count = offsets.shape[0] - include_last_offset
    if mode == _MAX_OF_BAG:
        return _most(rows, counted, bags, count)
    here = rows if counted is None else torch.where(counted[:, None], rows, 0)
    total = rows.new_zeros((count, rows.shape[1])).index_add(0, bags, here)
    if mode != _MEAN_OF_BAG:
        return total
    ones = rows.new_ones(rows.shape[0]) if counted is None else counted.to(rows.dtype)
    return total / rows.new_zeros(count).index_add(0, bags, ones).clamp_min(1)[:, None]


def _compared(rows: Tensor, first: Tensor) -> Tensor:
    """Rows by which maxima of bags are found: torch asks of each but a bag's `first` whether it is larger, so that a
    NaN is the maximum there alone."""
    return torch.where(rows.isnan() & ~first, -torch.inf, rows)


def _most(rows: Tensor, counted: Tensor | None, bags: Tensor, count: int) -> Tensor:
    """Maxima in bags, whose gradient is that of the first that is as large; 0 in those that have nothing."""
    size, none = rows.shape[0], rows.new_zeros((count, rows.shape[1]))
    if type(size) is int and not size:
        return none
    places = torch.arange(size, device=rows.device)
    of_bags = torch.full((count,), size, device=rows.device, dtype=torch.int64)
    begins = of_bags.scatter_reduce(0, bags, places if counted is None else torch.where(counted, places, size), "amin")
    is_first = (places == begins.index_select(0, bags))[:, None]
    here = _compared(rows, is_first)
    here = here if counted is None else torch.where(counted[:, None], here, -torch.inf)
    bag = bags[:, None].expand_as(rows)
    most = none.scatter_reduce(0, bag, here.detach(), "amax", include_self=False)
    is_most = (here == most.index_select(0, bags)) | (here.isnan() & is_first)
    firsts = of_bags[:, None].expand_as(most)
    first = firsts.scatter_reduce(0, bag, torch.where(is_most, places[:, None], size), "amin")
    most = torch.where(first < size, here.gather(0, first.clamp(max=size - 1)), most)
    return most if counted is None else torch.where(begins[:, None] < size, most, 0)


def _of_padding_from_0(*given: Any) -> tuple[Tensor, ...]:
    """The same, of an operator whose padding is none if it is negative."""
    return _embedding_bag(*(given[:-1] if len(given) == 9 and given[-1] < 0 else given))


BAGS = {
    _aten.embedding_bag.default: _embedding_bag,
    _aten.embedding_bag.padding_idx: _embedding_bag,
    _aten._embedding_bag.default: _of_padding_from_0,
}


Tensor = torch.Tensor
_MEAN, _SUM = 1, 2
_EPSILON = 1e-12  # torch's, of cosines


def _reduced(each: Tensor, reduction: int) -> Tensor:
    return each.mean() if reduction == _MEAN else each.sum() if reduction == _SUM else each


def _root(total: Tensor, order: float = 2) -> Tensor:
    """The root of what is not negative. Its gradient at 0 is 0, as torch has it for norms and deviations."""
    is_zero = total == 0
    above = torch.where(is_zero, 1, total)
    return torch.where(is_zero, 0, above.sqrt() if order == 2 else above ** (1 / order))


def _deviation(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return _root(wide(x).var(dim, correction=correction, keepdim=keepdim)).to(x.real.dtype)


def _variance_and_mean(x: Tensor, dim: Any = None, *, keepdim: bool = False, **correction: Any) -> tuple[Tensor, ...]:
    return x.var(dim, keepdim=keepdim, **correction), x.mean(dim, keepdim)


def _vector_norm(x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, **dtype: Any) -> Tensor:
    """The norm of vectors along dims (none: all)."""
    given = x.to(dtype.get("dtype") or x.dtype).abs()  # of complex numbers, real
    size, how = wide(given), (list(range(x.ndim)) if dim is None else dim, keepdim)
    if order in (math.inf, -math.inf):
        made = size.amax(*how) if order > 0 else size.amin(*how)
    elif order == 0:
        made = (size != 0).to(size.dtype).sum(*how)
    elif order in (1, 2):
        made = size.sum(*how) if order == 1 else _root((size * size).sum(*how))
    else:
        if order < 0:  # the norm of vectors with a 0, which is 0, has no gradient
            size = torch.where((size**order).sum(how[0], True) == math.inf, math.inf, size)
        made = _root((_root(size, 1 / order) if 0 < order < 1 else size**order).sum(*how), order)
    return made.to(given.dtype)


def _hinge_embedding(x: Tensor, target: Tensor, margin: float = 1.0, reduction: int = _MEAN) -> Tensor:
    apart, alike = torch.where(target != 1, (margin - x).clamp_min(0), 0), torch.where(target != -1, x, 0)
    return _reduced(apart + alike, reduction)


def _margin_ranking(x: Tensor, y: Tensor, target: Tensor, margin: float = 0.0, reduction: int = _MEAN) -> Tensor:
    return _reduced((-target * (x - y) + margin).clamp_min(0), reduction)


def _cosine_embedding(x: Tensor, y: Tensor, target: Tensor, margin: float = 0.0, reduction: int = _MEAN) -> Tensor:
    dim = target.ndim
    sizes = ((x * x).sum(dim) + _EPSILON) * ((y * y).sum(dim) + _EPSILON)
    cosine = (x * y).sum(dim) / sizes.sqrt()
    alike, apart = torch.where(target == 1, 1 - cosine, 0), torch.where(target == -1, (cosine - margin).clamp_min(0), 0)
    return _reduced(alike + apart, reduction)


def _multilabel_margin(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """The labels of a row end at the first -1. (Torch's own way counts what comes after as label 0.)"""
    if not x.ndim:
        made, hit = _multilabel_margin(x[None], target[None], reduction)
        return made.reshape(()), hit.reshape(())
    classes = torch.arange(x.shape[-1], device=x.device)
    counts = (target != -1).to(torch.int64).cumprod(-1) == 1
    labels = torch.where(counts, target, 0)
    hit = ((classes[:, None] == labels[..., None, :]) & counts[..., None, :]).any(-1)
    margins = 1 - x.gather(-1, labels)[..., None] + x[..., None, :]
    counted = counts[..., None] & ~hit[..., None, :] & (margins > 0)  # NaN is none, as in torch
    each = torch.where(counted, margins, 0).sum((-2, -1)) / x.shape[-1]
    return _reduced(each, reduction), hit.to(x.dtype)


def _index_fill(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    """An index that comes twice counts once in the gradient of the value."""
    rows = x.new_zeros(x.shape[dim] if x.ndim else 1, dtype=torch.int64)
    hit = rows.index_put((index.reshape(-1),), torch.ones_like(index.reshape(-1))) != 0
    return torch.where(hit.reshape([-1 if d == dim % x.ndim else 1 for d in range(x.ndim)]), value.to(x.dtype), x)


def _from_start(op: Callable[..., Tensor], x: Tensor, dim: int, index: Tensor, *more: Any, **options: Any) -> Tensor:
    """What torch makes of an operator of (x, dim, index, ...) whose index takes no negative rows: these are too large
    here, and refused. (Torch's own way counts them from the end.)"""
    return op(x, dim, torch.where(index < 0, torch.iinfo(index.dtype).max, index), *more, **options)


def _max_unpool(x: Tensor, indices: Tensor, output_size: Sequence[int], *_: Any) -> Tensor:
    """Values at their places among the last dims, by a scatter, which takes no negative places. (Torch's own way
    counts these from the end.)"""
    dims = len(output_size)
    places, values = (tensor.flatten(-dims) for tensor in (indices, x))
    made = values.new_zeros((*values.shape[:-1], math.prod(output_size))).scatter(-1, places, values)
    return made.unflatten(-1, tuple(output_size))


def _lstm_layer(
    x: Tensor,
    from_x: Tensor,
    from_h: Tensor,
    bias_x: Tensor,
    bias_h: Tensor,
    h: Tensor,
    c: Tensor,
    back: bool,
    *more: Any,
) -> tuple[Tensor, ...]:
    """A layer of an LSTM, position by position. The last result, what torch keeps for itself, is none."""
    _, _, _, _, has_biases, *_ = more
    given = h.reshape(-1, h.shape[-1]), c.reshape(-1, c.shape[-1])
    y, (last_h, last_c) = one_layer_lstm(x, given, [from_x, from_h, bias_x, bias_h], has_biases, back)
    return y, last_h.reshape(h.shape), last_c.reshape(c.shape), x.new_zeros(0)


OWN_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _aten.hinge_embedding_loss.default: _hinge_embedding,
    _aten.margin_ranking_loss.default: _margin_ranking,
    _aten.cosine_embedding_loss.default: _cosine_embedding,
    _aten.multilabel_margin_loss_forward.default: _multilabel_margin,
    _aten.index_add.default: partial(_from_start, index_add),
    _aten.index_copy.default: partial(_from_start, index_copy),
    _aten.index_fill.int_Tensor: _index_fill,
    _aten.max_unpool2d.default: _max_unpool,
    _aten.max_unpool3d.default: _max_unpool,
    _aten.mkldnn_rnn_layer.default: _lstm_layer,
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten.std.correction: _deviation,
    _aten.var_mean.correction: _variance_and_mean,
    **BAGS,
}
