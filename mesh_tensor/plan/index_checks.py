"""Indices that a module is called with: which parameters are looked up in which dims, so that calls can be checked
before anything runs. What else is looked up is checked where that happens, in what is no padding.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    checks = []
    for node in graph.nodes:
        source = origin.get(node.inputs[0]) if node.inputs else None
        if source is not None and (_keeps_elements(node) or _without_sign(node)):
            origin[node.outputs[0]] = source[0], source[1] and not _without_sign(node)
        for index, size, from_end in _look_ups(node):
            if index in origin:
                parameter, signed = origin[index]
                checks.append(IndexCheck(parameter, size, -size if from_end and signed else 0, node.where))
    return tuple(dict.fromkeys(checks))


def _keeps_elements(node: Node) -> bool:
    same = node.call.name in _SAME_ELEMENTS or node.is_annotation
    return same and node.outputs[0].type.dtype in (node.inputs[0].type.dtype, "int64")


def _without_sign(node: Node) -> bool:
    """Whether it makes negative elements larger than any dim, and leaves others as they are: they don't count from the
    end."""
    if node.call.name != "bitwise_and" or node.inputs[1].data is None:
        return False
    mask = node.inputs[1].data.data.numpy()
    return mask.ndim == 0 and int(mask) == np.iinfo(mask.dtype).max


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
