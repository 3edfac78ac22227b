"""Indices that a module is called with: which parameters are looked up in which dims, so that calls can be checked
before anything runs. What else is looked up is checked where that happens, in what is no padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from .ir import Graph, Node, Value

_SAME_ELEMENTS = ("astype", "reshape", "flatten", "expand_dims", "squeeze", "permute_dims", "broadcast_to")


@dataclass(frozen=True)
class IndexCheck:
    """Elements of `parameter` are looked up in a dim of `size`: from `lowest` to size - 1."""

    parameter: str
    size: int
    lowest: int
    where: str


def index_checks(graph: Graph) -> tuple[IndexCheck, ...]:
    """The parameters that operators look up as they are, or with their elements in other places."""
    origin: dict[Value, tuple[str, bool]] = {
        param: (param.name, True) for param in graph.params if param.type.dtype in ("int32", "int64")
    }
    checks, below_zero = [], dict[Value, Value]()
    for node in graph.nodes:
        if node.call.name == "less" and number_of(node.inputs[1]) == 0:
            below_zero[node.outputs[0]] = node.inputs[0]
        elif node.inputs and node.inputs[0] in origin and _keeps_elements(node):
            origin[node.outputs[0]] = origin[node.inputs[0]]
        elif _without_sign(node, below_zero) and node.inputs[2] in origin:
            origin[node.outputs[0]] = origin[node.inputs[2]][0], False
        for index, size, from_end in _look_ups(node):
            if index in origin:
                parameter, signed = origin[index]
                checks.append(IndexCheck(parameter, size, -size if from_end and signed else 0, node.where))
    return tuple(dict.fromkeys(checks))


def _keeps_elements(node: Node) -> bool:
    same = node.call.name in _SAME_ELEMENTS or node.is_annotation
    return same and node.outputs[0].type.dtype in (node.inputs[0].type.dtype, "int64")


def _without_sign(node: Node, below_zero: Mapping[Value, Value]) -> bool:
    """Whether it makes negative elements larger than any dim, and leaves others as they are: they don't count from the
    end."""
    if node.call.name != "where" or below_zero.get(node.inputs[0]) is not node.inputs[2]:
        return False
    dtype = node.outputs[0].type.dtype
    return dtype in ("int32", "int64") and number_of(node.inputs[1]) == np.iinfo(dtype).max


def number_of(value: Value) -> int | float | None:
    """What a constant of no dims is; None of any other value."""
    known = value.data.data.numpy() if value.data is not None else None
    return known.item() if known is not None and known.ndim == 0 else None


def _look_ups(node: Node) -> Iterator[tuple[Value, int, bool]]:
    """Operands that are looked up: in a dim of that size, and whether negative ones count from its end."""
    call = node.call
    if call.name == "take" and len(node.inputs) == 2:
        mode, axis = call.attr("mode", "fast"), call.attr("axis")
        if mode in ("fast", "nan") and axis is not None:
            yield node.inputs[1], call.inputs[0].shape[call.axis(axis)], mode == "fast"
    elif call.name in ("gather_elements", "scatter_elements"):
        yield node.inputs[1], call.inputs[0].shape[call.axis(call.attr("axis"))], True
    elif call.name == "index_tensor":
        for index, size in zip(node.inputs[1:], call.inputs[0].shape, strict=False):
            yield index, size, True
