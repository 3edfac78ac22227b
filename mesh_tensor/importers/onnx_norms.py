"""ONNX's norms in operators that TVM's importer has, and reads right."""

from __future__ import annotations

import numpy as np

from .onnx_nodes import Nodes


def layer_norm(nodes: Nodes) -> bool:
    """With a bias: without one, TVM's importer takes the wrong size. Its mean and rate are computed beside it."""
    sizes = nodes.facts.sizes(nodes.operand(1))
    _statistics(nodes)
    del nodes.node.output[1:]
    if not nodes.operand(2) and sizes is not None and all(isinstance(size, int) for size in sizes):
        zeros = np.zeros(tuple(map(int, sizes)))
        nodes.node.input[2:] = [nodes.constant(zeros, nodes.facts.dtype(nodes.onnx, nodes.operand(1)))]
    return False


def _statistics(nodes: Nodes) -> None:
    """The mean of what is normalised, and one by its deviation."""
    wanted = [name for name in nodes.node.output[1:] if name in nodes.facts.used]
    if not wanted:
        return
    x, sizes, axis = nodes.operand(0), nodes.facts.sizes(nodes.operand(0)), nodes.options.get("axis", -1)
    if sizes is None:
        nodes.refuse("the number of dims is unknown", "settle its sizes by `shapes`")
    inside = nodes.options.get("stash_type", nodes.onnx.TensorProto.FLOAT)
    dtype = np.dtype(nodes.onnx.helper.tensor_dtype_to_np_dtype(inside))
    axes = range(axis - len(sizes) if axis >= 0 else axis, 0)
    wide = nodes.emit("Cast", [x], to=inside)
    mean = nodes.reduced("ReduceMean", wide, axes)
    apart = nodes.emit("Sub", [wide, mean])
    variance = nodes.reduced("ReduceMean", nodes.emit("Mul", [apart, apart]), axes)
    epsilon = nodes.constant(nodes.options.get("epsilon", 1e-5), dtype)
    root = nodes.emit("Sqrt", [nodes.emit("Add", [variance, epsilon])])
    for name in wanted:
        is_mean = name == nodes.node.output[1]
        nodes.emit(*(("Identity", [mean]) if is_mean else ("Reciprocal", [root])), name)


def rms_norm(nodes: Nodes) -> bool:
    """x / sqrt(mean(x * x) + epsilon) * scale over the last dims, in float32 unless that is said otherwise."""
    x, sizes, axis = nodes.operand(0), nodes.facts.sizes(nodes.operand(0)), nodes.options.get("axis", -1)
    if axis >= 0:
        if sizes is None:
            nodes.refuse("the number of dims is unknown", "state an axis that counts from the end")
        axis -= len(sizes)
    types = nodes.onnx.TensorProto
    inside = nodes.options.get("stash_type", types.FLOAT)
    wide = nodes.emit("Cast", [x], to=inside)
    dtype = np.dtype(nodes.onnx.helper.tensor_dtype_to_np_dtype(inside))
    square = nodes.emit("Mul", [wide, wide])
    mean = nodes.reduced("ReduceMean", square, range(axis, 0))
    total = nodes.emit("Add", [mean, nodes.constant(nodes.options.get("epsilon", 1e-5), dtype)])
    unit = nodes.emit("Div", [wide, nodes.emit("Sqrt", [total])])
    back = nodes.emit("Cast", [unit], to=nodes.facts.types.get(x, (types.FLOAT, []))[0])
    nodes.emit("Mul", [back, nodes.operand(1)], nodes.node.output[0])
    return True


def group_norm(nodes: Nodes) -> bool:
    """As instances of a channel per group, whose results are scaled per channel."""
    sizes = nodes.facts.sizes(nodes.operand(0))
    if sizes is None or isinstance(sizes[1], str) or sum(isinstance(size, str) for size in sizes[2:]) > 1:
        nodes.refuse(f"a group norm of a tensor of shape {sizes}", "settle its sizes by `shapes`")
    groups, dtype = nodes.options["num_groups"], nodes.facts.dtype(nodes.onnx, nodes.operand(1))
    grouped = nodes.emit("Reshape", [nodes.operand(0), nodes.constant([0, groups, -1])])
    per_group = nodes.facts.opset < 21  # of scale and bias
    ones, zeros = (nodes.constant([value] * groups, dtype) for value in (1.0, 0.0))
    scale, bias = nodes.node.input[1:] if per_group else (ones, zeros)
    unit = nodes.emit("InstanceNormalization", [grouped, scale, bias], epsilon=nodes.options.get("epsilon", 1e-5))
    whole = nodes.constant([0, sizes[1], *(-1 if isinstance(size, str) else size for size in sizes[2:])])
    if per_group:
        nodes.emit("Reshape", [unit, whole], nodes.node.output[0])
        return True
    back = nodes.emit("Reshape", [unit, whole])
    column = nodes.constant([-1, *[1] * (len(sizes) - 2)])
    scale, bias = (nodes.emit("Reshape", [nodes.operand(number), column]) for number in (1, 2))
    nodes.emit("Add", [nodes.emit("Mul", [back, scale]), bias], nodes.node.output[0])
    return True


def batch_norm(nodes: Nodes) -> bool:
    """With the statistics that it is given."""
    if nodes.options.get("training_mode", 0):
        nodes.refuse("in training mode", "export the model in eval mode")
    return False


def lp_normalization(nodes: Nodes) -> bool:
    """By the norm along a dim; zeros stay zeros."""
    kind = "ReduceL1" if nodes.options.get("p", 2) == 1 else "ReduceL2"
    dtype = nodes.facts.dtype(nodes.onnx, nodes.operand(0))
    norm = nodes.reduced(kind, nodes.operand(0), [nodes.options.get("axis", -1)])
    is_zero = nodes.emit("Equal", [norm, nodes.constant(0, dtype)])
    norm = nodes.emit("Where", [is_zero, nodes.constant(1, dtype), norm])
    nodes.emit("Div", [nodes.operand(0), norm], nodes.node.output[0])
    return True
