"""What a call of an operator computes."""

from __future__ import annotations

import math

from .call import OpCall, operator_name
from .vjp import VJP, vjp_of

# Classes of operators by what bounds their time; what is not here works element by element.
_CLASSES = {
    "product": ("matmul", "outer", "einsum", "nn.attention", "nn.attention_bias", "aten._grouped_mm.default")
    + tuple(f"nn.conv{dims}d{ending}" for dims in (1, 2, 3) for ending in ("", "_transpose")),
    "view": ("reshape", "flatten", "nn.batch_flatten", "expand_dims", "squeeze", "permute_dims", "broadcast_to")
    + ("strided_slice", "split", "aten.diagonal.default", "aten.unfold.default", "wrap_param"),
    "move": ("concat", "stack", "repeat", "tile", "flip", "nn.pad", "nn.pixel_shuffle", "meshgrid", "slice_scatter")
    + (
        "take",
        "gather_elements",
        "gather_nd",
        "index_tensor",
        "scatter_nd",
        "scatter_elements",
        "index_put",
        "one_hot",
    ),
    "reduce": ("sum", "mean", "max", "min", "prod", "variance", "std", "argmax", "argmin", "cumsum", "cumprod")
    + ("nn.softmax", "nn.log_softmax", "nn.layer_norm", "nn.rms_norm", "nn.group_norm", "nn.instance_norm")
    + ("collapse_sum_to", "collapse_sum_like", "nn.cross_entropy_with_logits", "nn.nll_loss"),
}
_CLASS_OF = {name: kind for kind, names in _CLASSES.items() for name in names}


def class_of(name: str) -> str:
    """The class of an operator, as a Machine knows classes: product, view, move, reduce or elementwise."""
    return _CLASS_OF.get(name, "elementwise")


def count_flops(call: OpCall) -> int:
    """Floating-point operations: 2 per multiply-add of what contracts; 1 per element of the largest tensor else.
    Gradients: three times what they are of."""
    if call.name == "matmul":
        return 2 * call.outputs[0].elements * call.inputs[0].shape[-1]
    if call.name == "einsum":
        return 2 * _labelled(call)
    if operator_name(call) == VJP:
        return _differentiated(call)
    if call.name.startswith("nn.conv") and len(call.inputs) > 1:
        weight = call.inputs[1]
        return 2 * call.outputs[0].elements * weight.elements // max(1, weight.shape[0])
    if call.name.startswith("nn.attention"):
        batch, queries, heads, size = call.inputs[0].shape
        return 4 * batch * heads * queries * call.inputs[1].shape[1] * size
    if operator_name(call) == VJP:  # once more, and twice that backwards
        return 3 * sum(count_flops(of) for of, _ in vjp_of(call).calls)
    return max((math.prod(tensor.shape) for tensor in (*call.inputs, *call.outputs)), default=0)


def _labelled(call: OpCall) -> int:
    """How many combinations of labels a contraction goes through."""
    terms = call.attr("subscripts").partition("->")[0].replace(" ", "").split(",")
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, call.inputs, strict=True):
        if len(term) != tensor.ndim:  # it has "..."
            return max(t.elements for t in (*call.inputs, *call.outputs))
        sizes |= {label: max(size, sizes.get(label, 1)) for label, size in zip(term, tensor.shape, strict=True)}
    return math.prod(sizes.values())


def _differentiated(call: OpCall) -> int:
    """What the operator computes, once more, and as much for every gradient; only this for one that it is linear in."""
    stated = vjp_of(call)
    forward = sum(count_flops(inner) for inner, _ in stated.calls)
    return forward * (len(stated.wrt) + (len(stated.given) == len(stated.operands)))
