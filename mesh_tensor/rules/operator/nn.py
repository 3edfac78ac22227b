"""Rules of neural network operators: normalisations, attention, losses; of reductions and scans along dims, and of
what looks for elements along them."""

from __future__ import annotations

import math

from tvm import relax

from mesh_tensor.base.dtypes import NARROW, is_float

from .call import OpCall
from .elementwise import dims_of
from .rule import Dim, LocalCall, OpRule, rule, whole_rule

LOG_SOFTMAX_BACKWARD = "fused.log_softmax_backward"  # of a gradient and log_softmax's result, along the axis of a sum


@rule("nn.layer_norm", "nn.rms_norm")
def normalize(call: OpCall) -> OpRule:
    axes = call.axes(call.attr("axes"))
    dims = tuple(None if d in axes else f"d{d}" for d in range(call.inputs[0].ndim))
    rest: tuple[tuple[Dim, ...], ...] = tuple((None,) * t.ndim for t in call.inputs[1:])
    return OpRule((dims, *rest), (dims,))


@rule("nn.group_norm")
def group_norm(call: OpCall) -> OpRule:
    """The channels are (group, channel of the group): groups are parallel."""
    data, groups = call.inputs[0], call.attr("num_groups")
    channel, axes = call.axis(call.attr("channel_axis")), call.axes(call.attr("axes"))
    size = data.shape[channel] // groups
    dims: list[Dim] = [None if d in axes else f"d{d}" for d in range(data.ndim)]
    dims[channel] = ("group", "channel")
    return OpRule(
        (tuple(dims), (dims[channel],), (dims[channel],)),
        (tuple(dims),),
        sizes={"group": groups, "channel": size},
        unsplit=frozenset({"channel"}),
        localize=_group_norm,
    )


def _group_norm(local: LocalCall) -> relax.Expr:
    """The tile has as many groups as it has channels for."""
    call = local.call
    channel, axes = call.axis(call.attr("channel_axis")), call.axes(call.attr("axes"))
    groups, size = call.attr("num_groups"), call.inputs[0].shape[channel]
    if size:
        groups = local.in_tiles[0][channel] * groups // size
    more = {name: call.attr(name) for name in ("epsilon", "center", "scale")}
    return relax.op.nn.group_norm(*local.args, groups, channel, list(axes), **more)


@rule("nn.instance_norm")
def instance_norm(call: OpCall) -> OpRule:
    axes = call.axes(call.attr("axes"))
    dims = tuple(None if d in axes else f"d{d}" for d in range(call.inputs[0].ndim))
    channel = dims[call.axis(call.attr("channel_axis"))]
    return OpRule((dims, (channel,), (channel,)), (dims,))


@rule("nn.batch_norm")
def batch_norm(call: OpCall) -> OpRule:
    """In training all of a channel counts; else every element is on its own."""
    ndim, channel = call.inputs[0].ndim, call.axis(call.attr("axis"))
    whole = bool(call.attr("training"))
    dims = tuple(None if whole and d != channel else f"d{d}" for d in range(ndim))
    each = (dims[channel],)
    return OpRule((dims, each, each, each, each), (dims, each, each))


rule("nn.cross_entropy_with_logits", "nn.nll_loss")(whole_rule)


@rule("nn.dropout")
def dropout(call: OpCall) -> OpRule:
    dims = dims_of(call.inputs[0].ndim)
    return OpRule((dims,), (dims, dims))


@rule("nn.attention", "nn.attention_bias")
def attention(call: OpCall) -> OpRule:
    """(batch, sequence, heads, head size): batch and heads are parallel, and so are the values' features; queries are
    where no mask looks at their positions. Keys are needed whole. Where several query heads share a key head, query
    heads are (key head, which of them)."""
    query, keys, values = (tensor.shape for tensor in call.inputs[:3])
    masked = call.attr("causal_mask") is not None or call.attr("window_size") is not None
    rows: Dim = None if masked else "q"
    each = query[2] // keys[2]
    fits = query[2] == each * keys[2] and keys[2] == values[2]
    taken: Dim = "h" if fits else None
    heads: Dim = ("h", "shared") if fits and each > 1 else taken
    inputs: list[tuple[Dim, ...]] = [("b", rows, heads, None), ("b", None, taken, None), ("b", None, taken, "e")]
    for bias in call.inputs[3:]:
        wanted = (("b", query[0]), (heads, query[2]), (rows, query[1]), (None, keys[1]))
        inputs.append(
            tuple(name if size == full else None for size, (name, full) in zip(bias.shape, wanted, strict=True))
        )
    return OpRule(
        tuple(inputs),
        (("b", rows, heads, "e"),),
        sizes={"h": keys[2], "shared": each} if fits else {},
        unsplit=frozenset({"shared"}),
        linear=(frozenset({2}),),
    )


#: Attention in which query heads share keys and values, which lie as (batch, heads, positions, width).
SHARED_ATTENTION = {"nn.attention": "fused.shared_attention", "nn.attention_bias": "fused.shared_attention_bias"}
SOFTMAX_GRADIENT = "fused.softmax_gradient"
_OPS = {"sum": "sum", "mean": "sum", "max": "max", "min": "min", "prod": "prod"}


@rule("sum", "mean", "max", "min", "prod", "variance", "std")
def reduce(call: OpCall) -> OpRule:
    """A split dim is reduced part by part where the parts can be combined: not to a variance, nor to a mean of integers
    (whose division rounds), nor to a product in low precision (whose parts leave its range); and no device combines
    bools."""
    axes = call.axes(call.attr("axis"))
    tensor = call.inputs[0]
    op = _OPS.get(call.name) if _combines(call.name, tensor.dtype) else None
    dims = tuple(f"d{d}" if d not in axes or op else None for d in range(tensor.ndim))
    reduced = {f"d{d}": op for d in axes} if op else {}
    linear = (frozenset({0}),) if op == "sum" else ()
    localize = _sum if op == "sum" else None
    return OpRule((dims,), (_kept(call, axes),), reduced, linear=linear, localize=localize)


def _combines(name: str, dtype: str) -> bool:
    if name == "mean":
        return is_float(dtype)
    return dtype != "bool" and not (name == "prod" and dtype in NARROW)


def _kept(call: OpCall, axes: tuple[int, ...]) -> tuple[Dim, ...]:
    """The dims of what is left of a tensor when it is reduced along `axes`."""
    keep = bool(call.attr("keepdims"))
    return tuple(None if d in axes else f"d{d}" for d in range(call.inputs[0].ndim) if d not in axes or keep)


def _sum(local: LocalCall) -> relax.Expr:
    """A mean of a part is the sum of the tile's elements over the number of the whole tensor's."""
    call, (tile,) = local.call, local.in_tiles
    axes = call.axes(call.attr("axis"))
    if not local.wide and all(tile[d] == call.inputs[0].shape[d] for d in axes):
        return local.again()
    dtype = "float32" if local.wide else call.outputs[0].dtype
    x = relax.op.astype(local.args[0], dtype) if dtype != call.inputs[0].dtype else local.args[0]
    total = relax.op.sum(x, list(axes), bool(call.attr("keepdims")))
    if call.name == "sum":
        return total
    return relax.op.divide(total, relax.const(math.prod(call.inputs[0].shape[d] for d in axes), dtype))


@rule("collapse_sum_to", "collapse_sum_like")
def collapse_sum(call: OpCall) -> OpRule:
    """The sum over what would be broadcast: dims that the result lacks, or has with size 1."""
    source, out = call.inputs[0], call.outputs[0]
    skipped = source.ndim - out.ndim
    dims = tuple(f"d{d}" for d in range(source.ndim))
    kept = tuple(dims[skipped + d] if size == source.shape[skipped + d] else None for d, size in enumerate(out.shape))
    if source.dtype == "bool":
        return whole_rule(call)
    reduced = dict.fromkeys((d for d in dims if d not in kept), "sum")
    inputs = (dims, kept)[: len(call.inputs)]
    return OpRule(inputs, (kept,), reduced, linear=(frozenset({0}),)[: 3 - len(inputs)], localize=_collapsed)


def _collapsed(local: LocalCall) -> relax.Expr:
    source, out = local.call.inputs[0], local.call.outputs[0]
    skipped = source.ndim - out.ndim
    axes = [d for d in range(source.ndim) if d < skipped or out.shape[d - skipped] != source.shape[d]]
    x = relax.op.astype(local.args[0], "float32") if local.wide else local.args[0]
    if skipped and len(axes) == skipped:
        return relax.op.sum(x, axes)
    total = relax.op.sum(x, axes, keepdims=True)
    return relax.op.squeeze(total, list(range(skipped))) if skipped else total


@rule("argmax", "argmin", "median")
def find(call: OpCall) -> OpRule:
    """Along dims, which are whole; without any, in the flattened tensor."""
    axis = call.attr("axis")
    if axis is None or axis == ():
        return whole_rule(call)
    axes = call.axes(axis)
    dims = tuple(None if d in axes else f"d{d}" for d in range(call.inputs[0].ndim))
    return OpRule((dims,), (_kept(call, axes),) * len(call.outputs))


@rule("nn.softmax", "nn.log_softmax", "cumsum", "cumprod", "sort", "argsort", "topk")
def along_a_dim(call: OpCall) -> OpRule:
    """One dim, which is whole: the last one, unless it is named. A scan without a dim is of the flattened tensor."""
    axis = call.attr("axis")
    if axis is None and call.name.startswith("cum"):
        return whole_rule(call)
    dim = call.axis(-1 if axis is None else axis)
    dims = tuple(None if d == dim else f"d{d}" for d in range(call.inputs[0].ndim))
    return OpRule((dims,), (dims,) * len(call.outputs))
