"""Sizes in an ONNX model: what ONNX infers of them. Those that no tensor has are refused before anything is made.

fold: what sizes and constants alone say in an ONNX graph becomes constants.

Exporters compute sizes, axes and masks from shapes, node by node; TVM's importer has to know them as numbers.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from mesh_tensor.base.errors import refuse

from .imported import identifiers
from .onnx_converters import opset_of

_SMALL = 1024  # initializers of more elements than this are sizes of nothing


def check_sizes(onnx: Any, model: Any, shapes: Mapping[str, Sequence[int]], path: str) -> None:
    """Refuse sizes below 0, and values that do not fit into memory, as far as ONNX can infer them.

    Args:
        shapes: sizes of inputs that replace the file's.
    """
    problems = [
        f"`shapes` has {str(shape)[:80]} for input {name!r}, which are no sizes"
        for name, shape in shapes.items()
        if not isinstance(shape, Sequence) or not all(map(_is_size, shape))
    ]
    problems += [
        f"input {value.name!r} has size {size} in dim {dim}"
        for value in model.graph.input
        if value.name not in shapes
        for dim, size in enumerate(_sizes(value))
        if isinstance(size, int) and size < 0
    ]
    if problems:
        refuse(problems, where=path, fix="give the inputs' sizes by `shapes`, or export the model again")
    limit = memory() // 2
    for name, kind, sizes in sizes_of(inferred(onnx, model, shapes)):
        known = [size for size in sizes if isinstance(size, int)]
        count = math.prod(known) * _bytes_of(onnx, kind)
        if count > limit or min(known, default=0) < 0:
            what = f"takes {count:,} bytes" if count > limit else f"has a size of {min(known)}"
            refuse(
                f"value {name!r:.80} {what}",
                where=path,
                why=f"its sizes are {sizes}, and half of this machine's memory is {limit:,} bytes",
                fix="check the sizes in the model; open ones are settled by `shapes`",
            )


def memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def settle_names(graph: Any) -> None:
    """Give open sizes names that are identifiers: TVM reads others as expressions. Equal ones stay equal."""
    dims = [
        dim
        for value in (*graph.input, *graph.output, *graph.value_info)
        for dim in value.type.tensor_type.shape.dim
        if dim.dim_param
    ]
    names = identifiers(list(dict.fromkeys(dim.dim_param for dim in dims)), [])
    for dim in dims:
        dim.dim_param = names[dim.dim_param]


def _is_size(size: object) -> bool:
    return isinstance(size, Integral) and int(size) >= 0


def inferred(onnx: Any, model: Any, shapes: Mapping[str, Sequence[int]]) -> Any:
    """The model's graph without its weights, and with the sizes of all values that ONNX can tell."""
    bare = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    graph, full = bare.graph, model.graph
    graph.name = full.name or "graph"
    graph.node.extend(full.node)
    graph.output.extend(onnx.ValueInfoProto(name=value.name) for value in full.output)  # what it states may be wrong
    known = {value.name for value in full.input}
    for value in full.input:
        shape = shapes.get(value.name)
        kind = value.type.tensor_type.elem_type
        graph.input.append(value if shape is None else onnx.helper.make_tensor_value_info(value.name, kind, shape))
    for tensor in full.initializer:
        if math.prod(tensor.dims) <= _SMALL:
            graph.initializer.append(tensor)
        elif tensor.name not in known:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    try:
        return onnx.shape_inference.infer_shapes(bare, data_prop=True).graph
    except Exception:  # what it can't infer is not known, and found out by those who compute it
        return graph


Sizes = list[int | str]  # open ones by name, or "?"


def sizes_of(graph: Any) -> Iterator[tuple[str, int, Sizes]]:
    """Name, element type and sizes of every value whose number of dims is known."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.HasField("shape"):
            yield value.name, value.type.tensor_type.elem_type, _sizes(value)


def _sizes(value: Any) -> Sizes:
    return [
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in value.type.tensor_type.shape.dim
    ]


def _bytes_of(onnx: Any, kind: int) -> int:
    try:
        return int(onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize)
    except (KeyError, TypeError, ValueError):  # text, or no known type
        return 1


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
