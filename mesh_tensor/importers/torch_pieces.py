"""What some of torch's operators are made of, where torch's own way writes into tensors, knows no gradient, or gives
other numbers than the operator. Each function takes what its operator takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp.decompositions import index_add, index_copy, one_layer_lstm

from mesh_tensor.targets.dtypes import wide

from .torch_bags import BAGS

Tensor = torch.Tensor
_aten = torch.ops.aten
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


def _from_start(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What torch makes of an operator of (x, dim, index, ...) whose index takes no negative rows: these are too large
    here, and refused. (Torch's own way counts them from the end.)"""

    def made_of(x: Tensor, dim: int, index: Tensor, *more: Any, **options: Any) -> Tensor:
        return op(x, dim, torch.where(index < 0, torch.iinfo(index.dtype).max, index), *more, **options)

    return made_of


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
    _aten.index_add.default: _from_start(index_add),
    _aten.index_copy.default: _from_start(index_copy),
    _aten.index_fill.int_Tensor: _index_fill,
    _aten.max_unpool2d.default: _max_unpool,
    _aten.max_unpool3d.default: _max_unpool,
    _aten.mkldnn_rnn_layer.default: _lstm_layer,
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten.std.correction: _deviation,
    _aten.var_mean.correction: _variance_and_mean,
    **BAGS,
}
