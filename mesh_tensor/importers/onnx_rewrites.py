"""rewrite: operators of ONNX that TVM's importer lacks, or reads otherwise, in operators that it has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from mesh_tensor.base.errors import refuse

from .onnx_recurrent import CELLS, recurrent_nodes
from .onnx_sizes import Sizes


@dataclass(frozen=True)
class Facts:
    """What is known of a graph's values: the numbers of constants; the element types and sizes."""

    opset: int
    constants: Mapping[str, np.ndarray]
    types: Mapping[str, tuple[int, Sizes]]
    used: frozenset[str] = frozenset()  # values that something takes, or that are results

    def dtype(self, onnx: Any, name: str) -> np.dtype:
        """The dtype of a value; float32 where nothing tells."""
        kind = self.types.get(name, (onnx.TensorProto.FLOAT, []))[0]
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind or onnx.TensorProto.FLOAT))

    def sizes(self, name: str) -> Sizes | None:
        """The sizes of a value, if their number is known."""
        return self.types[name][1] if name in self.types else None


class Nodes:
    """Nodes in the making; what they give has names that begin with that of the operator's first result."""

    def __init__(self, onnx: Any, node: Any, facts: Facts) -> None:
        self.onnx, self.node, self.facts = onnx, node, facts
        self.options = {option.name: onnx.helper.get_attribute_value(option) for option in node.attribute}
        self.made: list[Any] = []
        self._prefix = next((name for name in node.output if name), "none")
        self._count = itertools.count()

    def operand(self, number: int) -> str:
        """The operand's name; "" where there is none."""
        return self.node.input[number] if number < len(self.node.input) else ""

    def known(self, number: int) -> np.ndarray | None:
        """The operand's numbers, if it is a constant."""
        return self.facts.constants.get(self.operand(number))

    def emit(self, op: str, inputs: Sequence[str], name: str = "", **options: Any) -> str:
        """The name of what an operator with one result gives."""
        name = name or f"{self._prefix}_{op.lower()}_{next(self._count)}"
        self.made.append(self.onnx.helper.make_node(op, list(inputs), [name], **options))
        return name

    def reduced(self, op: str, name: str, axes: Sequence[int]) -> str:
        """The name of a reduction over dims, which stay."""
        since = 13 if op == "ReduceSum" else 18  # axes are operands since then
        if self.facts.opset < since:
            return self.emit(op, [name], axes=list(axes))
        return self.emit(op, [name, self.constant(axes)])

    def constant(self, values: Any, dtype: Any = np.int64) -> str:
        """The name of a constant."""
        name = f"{self._prefix}_constant_{next(self._count)}"
        tensor = self.onnx.numpy_helper.from_array(np.asarray(values, dtype), name)
        self.made.append(self.onnx.helper.make_node("Constant", [], [name], value=tensor))
        return name

    def refuse(self, what: str, fix: str) -> NoReturn:
        """Refuse the operator."""
        refuse(what, where=f"node {self.node.name or self._prefix!r} ({self.node.op_type})", fix=fix)


Rewrite = Callable[[Nodes], bool]


def rewritten(onnx: Any, node: Any, facts: Facts) -> list[Any]:
    """The nodes in place of one.

    Raises:
        MeshTensorError: an option of it that is known to no importer.
    """
    if node.op_type in CELLS:
        return recurrent_nodes(onnx, node, facts.sizes(node.input[0]))
    rewrite = REWRITES.get(node.op_type)
    if rewrite is None:
        return [node]
    nodes = Nodes(onnx, node, facts)
    return nodes.made if rewrite(nodes) else [*nodes.made, node]


def _layer_norm(nodes: Nodes) -> bool:
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


def _topk(nodes: Nodes) -> bool:
    """With a count that is no vector, which TVM's importer can't take the number out of; it makes int32 of indices."""
    count = nodes.known(1)
    if count is None:
        return False
    (first, second), indices = nodes.node.output, f"{nodes.node.output[1]}_int32"
    count_name = nodes.constant(count.flatten()[0])
    options = dict(nodes.options)
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


def _rms_norm(nodes: Nodes) -> bool:
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


def _dropout(nodes: Nodes) -> bool:
    """As for inference, where nothing is dropped."""
    training = nodes.known(2)
    if (nodes.operand(2) and (training is None or training.any())) or nodes.facts.used & {*nodes.node.output[1:]}:
        nodes.refuse("in training mode, or with its mask as a result", "export the model in eval mode")
    nodes.emit("Identity", [nodes.operand(0)], nodes.node.output[0])
    return True


def _group_norm(nodes: Nodes) -> bool:
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


def _constant(nodes: Nodes) -> bool:
    """Numbers of any form as a tensor."""
    values = {
        "value_float": np.float32,
        "value_floats": np.float32,
        "value_int": np.int64,
        "value_ints": np.int64,
    }
    name, value = next(iter(nodes.options.items()), ("", None))
    if name not in values:
        return False
    tensor = nodes.onnx.numpy_helper.from_array(np.asarray(value, values[name]), nodes.node.output[0])
    nodes.made.append(nodes.onnx.helper.make_node("Constant", [], nodes.node.output[:1], value=tensor))
    return True


def _lp_normalization(nodes: Nodes) -> bool:
    """By the norm along a dim."""
    kind = "ReduceL1" if nodes.options.get("p", 2) == 1 else "ReduceL2"
    norm = nodes.reduced(kind, nodes.operand(0), [nodes.options.get("axis", -1)])
    nodes.emit("Div", [nodes.operand(0), norm], nodes.node.output[0])
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
    "Constant": _constant,
    "CumSum": _cum_sum,
    "Dropout": _dropout,
    "GroupNormalization": _group_norm,
    "IsInf": _is_inf,
    "LayerNormalization": _layer_norm,
    "LpNormalization": _lp_normalization,
    "OneHot": _one_hot,
    "Pad": _pad,
    "RMSNormalization": _rms_norm,
    "Reshape": _reshape,
    "Split": _split,
    "TopK": _topk,
}
