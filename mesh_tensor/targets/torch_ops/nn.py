"""Softmax, normalisations, attention, losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.rules.operator.nn import LOG_SOFTMAX_BACKWARD, SHARED_ATTENTION, SOFTMAX_GRADIENT

from ..cpu import attention as own
from ..cpu.rms_norm import rms_norm
from ..dtypes import torch_dtype, wide
from .table import Function, torch_op

Tensor = torch.Tensor


@torch_op("nn.softmax", "nn.log_softmax")
def _softmax(call: OpCall) -> Function:
    dim = call.attr("axis")
    function = torch.softmax if call.name == "nn.softmax" else torch.log_softmax
    return lambda x: function(x, dim)


@torch_op(SOFTMAX_GRADIENT, LOG_SOFTMAX_BACKWARD)
def _softmax_gradient(call: OpCall) -> Function:
    """Of the gradient of a softmax, or of its logarithm, and that; the attributes are those of the sum in it."""
    (dim,), dtype = call.axes(call.attr("axis")), torch_dtype(call.outputs[0].dtype)
    aten = torch.ops.aten
    of = aten._softmax_backward_data if call.name == SOFTMAX_GRADIENT else aten._log_softmax_backward_data
    return lambda gradient, result: of(gradient, result, dim, dtype)


@torch_op("nn.layer_norm")
def _layer_norm(call: OpCall) -> Function:
    """Over the named dims; gamma and beta have these dims, in the order named."""
    dims, eps, scale, center = call.axes(call.attr("axes")), *map(call.attr, ("epsilon", "scale", "center"))
    shape = last_dims(call)
    if shape is not None:
        return lambda x, gamma, beta: F.layer_norm(x, shape, gamma if scale else None, beta if center else None, eps)
    return _norm(call, dims)


def _norm(call: OpCall, affine_dims: tuple[int, ...]) -> Function:
    """Over the dims `axes`; gamma and beta lie along `affine_dims`."""
    dims, eps, scale, center = call.axes(call.attr("axes")), *map(call.attr, ("epsilon", "scale", "center"))
    along = _along(affine_dims, call.inputs[0].ndim)
    return lambda x, gamma, beta: _affine(_normalized(x, dims, eps), along(gamma), along(beta), scale, center)


def last_dims(call: OpCall) -> tuple[int, ...] | None:
    """The shape of what a norm is over, where that are the last dims, in order; else None."""
    dims, shape = call.axes(call.attr("axes")), call.inputs[0].shape
    return tuple(shape[len(shape) - len(dims) :]) if dims == tuple(range(len(shape) - len(dims), len(shape))) else None


@torch_op("nn.rms_norm")
def _rms_norm(call: OpCall) -> Function:
    """x / sqrt(mean(x * x) + epsilon) * weight, in float32."""
    dims, eps = call.axes(call.attr("axes")), call.attr("epsilon")
    shape, ndim = last_dims(call), call.inputs[0].ndim
    alike = {tensor.dtype for tensor in (*call.inputs, *call.outputs)}
    if shape is not None and len(alike) == 1 and alike <= {"float32", "float64"}:
        return lambda x, weight: rms_norm(x, shape, weight, eps)
    along = _along(dims, ndim)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        x = wide(x)
        return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps) * wide(along(weight))

    return norm


@torch_op("nn.group_norm")
def _group_norm(call: OpCall) -> Function:
    """Over the named dims and the channels of a group; gamma and beta have one element per channel."""
    data, eps = call.inputs[0], call.attr("epsilon")
    channel, groups = call.axis(call.attr("channel_axis")), call.attr("num_groups")
    scale, center = call.attr("scale"), call.attr("center")
    parts = (groups, data.shape[channel] // groups)
    grouped = (*data.shape[:channel], *parts, *data.shape[channel + 1 :])
    dims = (channel + 1, *(dim + (dim > channel) for dim in call.axes(call.attr("axes"))))
    weights = (*parts, *([1] * (data.ndim - channel - 1)))
    if _is_plain(call, channel) and dims == tuple(range(2, data.ndim + 1)):
        # torch.nn.functional's would refuse groups of one element, which are zero before gamma and beta.
        return lambda x, gamma, beta: torch.group_norm(
            x, groups, gamma if scale else None, beta if center else None, eps
        )

    def group_norm(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        normal = _normalized(x.reshape(grouped), dims, eps)
        return _affine(normal, gamma.reshape(weights), beta.reshape(weights), scale, center).reshape(data.shape)

    return group_norm


@torch_op("nn.instance_norm")
def _instance_norm(call: OpCall) -> Function:
    """Over the named dims; gamma and beta have one element per channel."""
    return _norm(call, (call.axis(call.attr("channel_axis")),))


@torch_op("nn.batch_norm")
def _batch_norm(call: OpCall) -> Function:
    """The data normalised, the moving mean and the moving variance: in training by the batch's own, which then enter
    the moving ones; else by these."""
    channel, eps, momentum = call.axis(call.attr("axis")), call.attr("epsilon"), call.attr("momentum")
    scale, center, training = call.attr("scale"), call.attr("center"), call.attr("training")
    dims = tuple(dim for dim in range(call.inputs[0].ndim) if dim != channel)
    along = _along((channel,), call.inputs[0].ndim)
    as_torch = _is_plain(call, channel) and not training

    def batch_norm(x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
        if as_torch and not (mean.requires_grad or var.requires_grad):  # torch has no gradients of these
            return F.batch_norm(x, mean, var, gamma if scale else None, beta if center else None, eps=eps), mean, var
        used_mean, used_var = mean, var
        if training:
            used_var, used_mean = torch.var_mean(wide(x), dims, correction=0)
            mean = (1 - momentum) * mean + momentum * used_mean
            var = (1 - momentum) * var + momentum * used_var
        normal = (x - along(used_mean)) / torch.sqrt(along(used_var) + eps)
        return _affine(normal, along(gamma), along(beta), scale, center), mean, var

    return batch_norm


def _is_plain(call: OpCall, channel: int) -> bool:
    """Whether channels are the second dim, and all is of one dtype, in which torch itself computes."""
    dtypes = {tensor.dtype for tensor in (*call.inputs, *call.outputs)}
    return channel == 1 and len(dtypes) == 1 and dtypes <= {"float32", "float64"}


def _along(dims: tuple[int, ...], ndim: int) -> Function:
    """Brings a tensor whose dims are `dims` of a tensor with `ndim` dims to a shape that broadcasts with it."""
    order = sorted(range(len(dims)), key=lambda i: dims[i])

    def along(t: Tensor) -> Tensor:
        sizes = iter([t.shape[i] for i in order])
        return t.permute(order).reshape([next(sizes) if dim in dims else 1 for dim in range(ndim)])

    return along


def _normalized(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    x = wide(x)
    var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(var + eps)


def _affine(x: Tensor, gamma: Tensor, beta: Tensor, scale: bool, center: bool) -> Tensor:
    x = x * gamma if scale else x
    return x + beta if center else x


@torch_op("nn.attention", "nn.attention_bias", *SHARED_ATTENTION.values())
def _attention(call: OpCall) -> Function:
    """softmax(query @ key^T * scale + bias) @ value, on tensors of shape (batch, sequence, heads, head size). Of more
    query heads than key heads, as many share a key head as follow each other."""
    scale, mask, turned = call.attr("scale"), _mask(call), call.name in SHARED_ATTENTION.values()
    shared = turned or call.inputs[0].shape[2] != call.inputs[1].shape[2]
    causal = len(call.inputs) == 3 and is_causal(call)

    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        if mask is not None and not causal:
            hidden = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask.to(q.device), -torch.inf)
            bias = hidden if bias is None else bias + hidden
        if causal or not turned:
            others = k.transpose(1, 2), v.transpose(1, 2)
            by_rows, (k, v) = (others, (k, v)) if turned else ((k, v), others)
            if causal and own.takes(q, *by_rows):
                return own.causal_attention(q, *by_rows, scale)[0]
        q = q.transpose(1, 2)
        made = F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, scale=scale, enable_gqa=shared)
        return made.transpose(1, 2)

    return attention


def _keys(call: OpCall) -> int:
    """How many positions the keys of attention have."""
    return call.inputs[1].shape[2 if call.name in SHARED_ATTENTION.values() else 1]


def is_causal(call: OpCall) -> bool:
    """Whether it is torch's own mask: up to the query's position, counted from the first query and key."""
    kind, equal = call.attr("causal_mask"), call.inputs[0].shape[1] == _keys(call)
    return call.attr("window_size") is None and (kind == "TopLeft" or (kind == "BottomRight" and equal))


def _mask(call: OpCall) -> Tensor | None:
    """Which keys a query sees: with a mask those up to its own position, counted from the first query and key or from
    the last ones; of these, with a window, the last so many."""
    kind, window = call.attr("causal_mask"), call.attr("window_size")
    queries, keys = call.inputs[0].shape[1], _keys(call)
    if kind is None and window is None:
        return None
    if kind not in ("TopLeft", "BottomRight") or (window is not None and kind != "BottomRight"):
        refuse(
            f"R.{call.name} with causal_mask={kind!r} and window_size={window}",
            where=str(call.expr),
            fix="use TopLeft or BottomRight, and a window with BottomRight",
        )
    offset = keys - queries if kind == "BottomRight" else 0
    if offset < 0:
        refuse(
            f"R.{call.name} of {queries} queries on {keys} keys with a mask from the bottom right",
            where=str(call.expr),
            why="the first queries see no key",
            fix="give at least as many keys as queries, or mask from the top left",
        )
    position = torch.arange(queries, device="cpu")[:, None] + offset
    key = torch.arange(keys, device="cpu")[None]
    seen = key <= position
    return seen if window is None else seen & (key > position - window)


@torch_op("nn.cross_entropy_with_logits")
def _cross_entropy(call: OpCall) -> Function:
    """-sum(predictions * labels), per row where there are several."""
    shape = call.inputs[0].shape
    rows = shape[0] if len(shape) > 1 else 1
    return lambda predictions, labels: -torch.sum(predictions * labels) / rows


@torch_op("nn.nll_loss")
def _nll_loss(call: OpCall) -> Function:
    reduction, ignored = call.attr("reduction"), call.attr("ignore_index")

    def nll_loss(predictions: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        return F.nll_loss(predictions, targets.long(), weights, ignore_index=ignored, reduction=reduction)

    return nll_loss


@torch_op("nn.dropout")
def _dropout(call: OpCall) -> Function:
    return refuse(
        "operator R.nn.dropout has no torch function",
        where=str(call.expr),
        why="its result is random",
        fix="export the model for inference (model.eval()), or remove the operator",
    )
