"""rewrite: operators of ONNX that TVM's importer lacks, or reads otherwise, in operators that it has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .onnx_nodes import Facts, Nodes
from .onnx_norms import batch_norm, group_norm, layer_norm, lp_normalization, rms_norm
from .onnx_recurrent import CELLS, recurrent_nodes
from .onnx_resize import resize

Rewrite = Callable[[Nodes], bool]


def rewritten(onnx: Any, node: Any, facts: Facts) -> list[Any]:
    """The nodes in place of one.

    Raises:
        MeshTensorError: an option of it that is known to no importer.
    """
    if node.op_type in CELLS:
        return recurrent_nodes(onnx, node, facts)
    rewrite = REWRITES.get(node.op_type)
    if rewrite is None:
        return [node]
    nodes = Nodes(onnx, node, facts)
    return nodes.made if rewrite(nodes) else [*nodes.made, node]


def _topk(nodes: Nodes) -> bool:
    """With a count that is no vector, which TVM's importer can't take the number out of; it makes int32 of indices."""
    count = nodes.known(1)
    if count is None:
        return False
    (first, second), indices = nodes.node.output, f"{nodes.node.output[1]}_int32"
    count_name = nodes.constant(count.flatten()[0])
    options = {**nodes.options, "sorted": 1}  # any order will do where none is asked for
    made = nodes.onnx.helper.make_node("TopK", [nodes.operand(0), count_name], [first, indices], **options)
    nodes.made.append(made)
    nodes.emit("Cast", [indices], second, to=nodes.onnx.TensorProto.INT64)
    return True


def _one_hot(nodes: Nodes) -> bool:
    """With the indices that count from the end as those from the start, which TVM's importer does not know, and a depth
    that is no vector."""
    count = nodes.known(1)
    if count is None:
        return False
    depth = nodes.constant(count.flatten()[0])
    whole = nodes.emit("Cast", [nodes.operand(0)], to=nodes.onnx.TensorProto.INT64)
    negative = nodes.emit("Less", [whole, nodes.constant(0)])
    nodes.node.input[0] = nodes.emit("Where", [negative, nodes.emit("Add", [whole, depth]), whole])
    nodes.node.input[1] = depth
    return False


def _is_inf(nodes: Nodes) -> bool:
    """Of one sign, by a comparison: TVM's importer leaves out which signs count."""
    positive, negative = (nodes.options.get(f"detect_{sign}", 1) for sign in ("positive", "negative"))
    if positive and negative:
        return False
    dtype = nodes.facts.dtype(nodes.onnx, nodes.operand(0))
    if not positive and not negative:
        value = nodes.emit("Not", [nodes.emit("Equal", [nodes.operand(0), nodes.operand(0)])])
        nodes.emit("And", [value, nodes.emit("Not", [value])], nodes.node.output[0])
        return True
    infinite = nodes.constant(math.inf if positive else -math.inf, dtype)
    nodes.emit("Equal", [nodes.operand(0), infinite], nodes.node.output[0])
    return True


def _dropout(nodes: Nodes) -> bool:
    """As for inference, where nothing is dropped."""
    training, x = nodes.known(2), nodes.operand(0)
    if nodes.operand(2) and (training is None or training.any()):
        nodes.refuse("in training mode", "export the model in eval mode")
    nodes.emit("Identity", [x], nodes.node.output[0])
    for mask in nodes.facts.used & {*nodes.node.output[1:]}:
        if nodes.facts.opset < 12:
            nodes.refuse("with its mask as a result, as it was before opset 12", "export the model with a later opset")
        is_number = nodes.emit("Equal", [x, x])
        nodes.emit("Or", [is_number, nodes.emit("Not", [is_number])], mask)
    return True


def _pool(nodes: Nodes) -> bool:
    """With paddings that are numbers: TVM's importer pads too little where strides leave elements over, or a window has
    holes. Odd powers are of absolute values, which it leaves out."""
    pad, window = nodes.options.get("auto_pad", b"NOTSET").decode(), nodes.options["kernel_shape"]
    steps, apart = (nodes.options.get(name) or [1] * len(window) for name in ("strides", "dilations"))
    if pad == "VALID" and nodes.options.get("ceil_mode", 0) and max(steps) > 1:
        nodes.refuse("VALID with ceil_mode, whose size ONNX's documents and tools disagree on", "export it with pads")
    sizes = (nodes.facts.sizes(nodes.operand(0)) or [])[2:] or ["?"] * len(window)
    if nodes.node.op_type == "LpPool" and nodes.options.get("p", 2) % 2:
        nodes.node.input[0] = nodes.emit("Abs", [nodes.operand(0)])
    if not pad.startswith("SAME"):
        return False
    ends: list[list[int]] = [[], []]
    for size, one, step, far in zip(sizes, window, steps, apart, strict=True):
        if isinstance(size, str) and step > 1:
            nodes.refuse(f"{pad} paddings of an open size in steps of {step}", "settle its sizes by `shapes`")
        over = 1 if isinstance(size, str) else size - (-(-size // step) - 1) * step
        missing = max(0, (one - 1) * far + 1 - over)
        halves = (missing // 2, missing - missing // 2)
        for end, of in zip(ends, halves if pad == "SAME_UPPER" else halves[::-1], strict=True):
            end.append(of)
    options = {name: value for name, value in nodes.options.items() if name not in ("auto_pad", "pads")}
    made = nodes.onnx.helper.make_node(
        nodes.node.op_type, nodes.node.input, nodes.node.output, pads=[*ends[0], *ends[1]], **options
    )
    nodes.made.append(made)
    return True


def _prelu(nodes: Nodes) -> bool:
    """With a slope of no dims, or of several, as a choice."""
    sizes = nodes.facts.sizes(nodes.operand(1))
    if sizes is not None and len(sizes) == 1:
        return False
    x, slope = nodes.operand(0), nodes.operand(1)
    negative = nodes.emit("Less", [x, nodes.constant(0, nodes.facts.dtype(nodes.onnx, x))])
    nodes.emit("Where", [negative, nodes.emit("Mul", [slope, x]), x], nodes.node.output[0])
    return True


def _pow(nodes: Nodes) -> bool:
    """With both of the base's dtype."""
    base, power = (nodes.facts.dtype(nodes.onnx, nodes.operand(number)) for number in (0, 1))
    if base.kind != "f" or power == base:
        return False
    nodes.node.input[1] = nodes.emit("Cast", [nodes.operand(1)], to=nodes.onnx.helper.np_dtype_to_tensor_dtype(base))
    return False


def _swish(nodes: Nodes) -> bool:
    """x * sigmoid(alpha * x)."""
    x, alpha = nodes.operand(0), nodes.options.get("alpha", 1.0)
    scaled = x if alpha == 1 else nodes.emit("Mul", [x, nodes.constant(alpha, nodes.facts.dtype(nodes.onnx, x))])
    nodes.emit("Mul", [x, nodes.emit("Sigmoid", [scaled])], nodes.node.output[0])
    return True


# What a reduction of no dims makes of every element, where TVM's importer leaves it as it is.
_OF_ONE = {"ReduceL1": "Abs", "ReduceL2": "Abs", "ReduceLogSum": "Log"}


def _reduction(nodes: Nodes) -> bool:
    """Of no dims, if empty axes mean that."""
    axes, x = nodes.known(1), nodes.operand(0)
    none = axes is None and not nodes.operand(1) or axes is not None and not axes.size
    if not nodes.options.get("noop_with_empty_axes", 0) or not none or nodes.facts.opset < 18:
        return False
    if nodes.node.op_type == "ReduceSumSquare":
        nodes.emit("Mul", [x, x], nodes.node.output[0])
    else:
        nodes.emit(_OF_ONE[nodes.node.op_type], [x], nodes.node.output[0])
    return True


def _constant(nodes: Nodes) -> bool:
    """Numbers of any form as a tensor."""
    values = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    name, value = next(iter(nodes.options.items()), ("", None))
    if name not in values:
        return False
    tensor = nodes.onnx.numpy_helper.from_array(np.asarray(value, values[name]), nodes.node.output[0])
    nodes.made.append(nodes.onnx.helper.make_node("Constant", [], nodes.node.output[:1], value=tensor))
    return True


def _cum_sum(nodes: Nodes) -> bool:
    """Without an element itself: of the elements one place further, behind a zero."""
    if not nodes.options.get("exclusive", 0):
        return False
    x, axis, sizes = nodes.operand(0), nodes.known(1), nodes.facts.sizes(nodes.operand(0))
    if axis is None or sizes is None or nodes.facts.opset < 11:
        nodes.refuse("an exclusive sum along an unknown dim", "make its axis a constant")
    reverse, along = nodes.options.get("reverse", 0), int(axis.flatten()[0]) % len(sizes)
    bounds = ([1], [2**62]) if reverse else ([0], [-1])
    part = nodes.emit("Slice", [x, *map(nodes.constant, bounds), nodes.constant([along])])
    pads = np.zeros(2 * len(sizes), np.int64)
    pads[along + len(sizes) * bool(reverse)] = 1
    moved = nodes.emit("Pad", [part, nodes.constant(pads)])
    nodes.emit("CumSum", [moved, nodes.operand(1)], nodes.node.output[0], reverse=reverse)
    return True


def _reshape(nodes: Nodes) -> bool:
    """With a 0 that means no elements, only where there is none."""
    shape = nodes.known(1)
    if nodes.options.get("allowzero", 0) and shape is not None and shape.all():
        nodes.emit("Reshape", nodes.node.input, nodes.node.output[0])
        return True
    return False


def _split(nodes: Nodes) -> bool:
    """By sizes instead of a number of parts, of which the last may be smaller."""
    sizes, axis = nodes.facts.sizes(nodes.operand(0)), nodes.options.get("axis", 0)
    if "num_outputs" not in nodes.options or sizes is None or isinstance(sizes[axis], str):
        return False
    count, whole = nodes.options["num_outputs"], int(sizes[axis])
    part = -(-whole // count)
    parts = nodes.constant([max(0, min(part, whole - part * number)) for number in range(count)])
    made = nodes.onnx.helper.make_node("Split", [nodes.operand(0), parts], nodes.node.output, axis=axis)
    nodes.made.append(made)
    return True


def _pad(nodes: Nodes) -> bool:
    """Of all dims instead of some."""
    pads, axes, sizes = nodes.known(1), nodes.known(3), nodes.facts.sizes(nodes.operand(0))
    if axes is None or pads is None or sizes is None:
        return False
    every = np.zeros((2, len(sizes)), np.int64)
    every[:, axes] = pads.reshape(2, -1)
    nodes.node.input[1] = nodes.constant(every.flatten())
    del nodes.node.input[3:]
    return False


#: By operator: adds nodes; whether they are all, or the operator, changed, comes behind them.
REWRITES: dict[str, Rewrite] = {
    "AveragePool": _pool,
    "BatchNormalization": batch_norm,
    "Constant": _constant,
    "CumSum": _cum_sum,
    "Dropout": _dropout,
    "GroupNormalization": group_norm,
    "IsInf": _is_inf,
    "LayerNormalization": layer_norm,
    "LpNormalization": lp_normalization,
    "LpPool": _pool,
    "MaxPool": _pool,
    "OneHot": _one_hot,
    "PRelu": _prelu,
    "Pad": _pad,
    "Pow": _pow,
    "RMSNormalization": rms_norm,
    **dict.fromkeys((*_OF_ONE, "ReduceSumSquare"), _reduction),
    "Reshape": _reshape,
    "Resize": resize,
    "Split": _split,
    "Swish": _swish,
    "TopK": _topk,
    "Upsample": resize,
}
