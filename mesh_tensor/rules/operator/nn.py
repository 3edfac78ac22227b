"""Rules of neural network operators: normalisations, attention, losses."""

from __future__ import annotations

from tvm import relax

from .call import OpCall
from .elementwise import dims_of
from .rule import Dim, LocalCall, OpRule
from .table import rule, whole_rule

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
    groups = local.in_tiles[0][channel] * call.attr("num_groups") // call.inputs[0].shape[channel]
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


@rule("nn.cross_entropy_with_logits", "nn.nll_loss")
def loss(call: OpCall) -> OpRule:
    return whole_rule(call)


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
