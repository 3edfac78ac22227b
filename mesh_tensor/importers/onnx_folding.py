"""fold: what sizes and constants alone say in an ONNX graph becomes constants.

Exporters compute sizes, axes and masks from shapes, node by node; TVM's importer has to know them as numbers."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .onnx_converters import opset_of
from .onnx_sizes import Sizes, inferred, sizes_of

_FEW = 64  # elements: sizes and axes, no tables
_ROUNDS = 8  # of sizes that tell values that tell sizes
_OPEN = -(2**62)  # in place of an open size
_PICKS = ("Gather", "Slice")  # of these, a result may be known although open sizes are among what it takes

Values = dict[str, np.ndarray]


def fold(onnx: Any, model: Any, shapes: Mapping[str, Sequence[int]]) -> Values:
    """Make constants, in place, of the nodes whose few elements follow from sizes and constants; all small constants
    that there are then.

    Args:
        shapes: sizes of inputs that replace the file's.
    """
    opset, known = opset_of(model), Values()
    for _ in range(_ROUNDS):
        sizes = {name: sizes for name, _, sizes in sizes_of(inferred(onnx, model, shapes))}
        known = {}
        nodes = [_folded(onnx, node, opset, sizes, known) for node in model.graph.node]
        if all(new is old for new, old in zip(nodes, model.graph.node, strict=True)):
            break
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    return {name: value for name, value in known.items() if not (value == _OPEN).any()}


def _folded(onnx: Any, node: Any, opset: int, sizes: Mapping[str, Sizes], known: Values) -> Any:
    """The node, or the constant that it computes. `known`: values of before, to which its own is added."""
    if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
        tensor = node.attribute[0].t
        if math.prod(tensor.dims) <= _FEW and tensor.data_type in _NUMBERS:
            known[node.output[0]] = onnx.numpy_helper.to_array(tensor)
        return node
    if (value := _value(onnx, node, opset, sizes, known)) is None:
        return node
    known[node.output[0]] = value
    if (value == _OPEN).any():
        return node
    tensor = onnx.numpy_helper.from_array(value, node.output[0])
    return onnx.helper.make_node("Constant", [], node.output[:1], value=tensor)


# onnx.TensorProto's float, whole numbers, bool, float16, double, and those without a sign
_NUMBERS = {1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13}


def _value(onnx: Any, node: Any, opset: int, sizes: Mapping[str, Sizes], known: Values) -> np.ndarray | None:
    """What a node computes, if that is known; of a shape, open sizes are `_OPEN`."""
    if node.domain not in ("", "ai.onnx") or len(node.output) != 1 or not node.input:
        return None
    if node.op_type in ("Shape", "Size"):
        shape = sizes.get(node.input[0])
        if shape is None:
            return None
        given = np.array([size if isinstance(size, int) else _OPEN for size in shape], np.int64)
        if node.op_type == "Size":
            return None if (given == _OPEN).any() else np.array(given.prod(), np.int64)
        ends = {attribute.name: attribute.i for attribute in node.attribute}
        return given[ends.get("start", 0) : ends.get("end", len(given))]
    inputs = [known.get(name) for name in node.input]
    if any(value is None for value, name in zip(inputs, node.input, strict=True) if name):
        return None
    partly = [value is not None and bool((value == _OPEN).any()) for value in inputs]
    if any(partly[1:]) or (partly[0] and node.op_type not in _PICKS):
        return None
    made = sizes.get(node.output[0], ["?"])
    if math.prod(size if isinstance(size, int) else _FEW + 1 for size in made) > _FEW:
        return None
    return _evaluated(onnx, node, opset, inputs)


def _evaluated(onnx: Any, node: Any, opset: int, inputs: Sequence[np.ndarray | None]) -> np.ndarray | None:
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        if schema.node_determinism == schema.NodeDeterminism.NonDeterministic:
            return None
        evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator(node, opsets={"": opset})
        feeds = {name: value for name, value in zip(node.input, inputs, strict=True) if name}
        with np.errstate(all="ignore"):
            (result,) = evaluator.run(None, feeds)
    except Exception:  # what the reference's functions happen to raise: TVM's importer says what is wrong with it
        return None
    if not isinstance(result, (np.ndarray, np.generic)) or result.dtype.kind not in "biuf":
        return None
    return np.asarray(result)
