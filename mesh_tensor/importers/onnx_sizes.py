"""Sizes in an ONNX model: what ONNX infers of them. Those that no tensor has are refused before anything is made."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

from mesh_tensor.base.errors import refuse

from .imported import identifiers

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
