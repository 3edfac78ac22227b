"""Indices that a module is called with: which parameters are looked up in which dims, so that calls can be checked.

On tiles an index out of range may be padding; what is looked up for it is poison there. Whole arguments have none.
"""

from __future__ import annotations

from dataclasses import dataclass

from .ir import Graph, Value

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
    origin: dict[Value, str] = {param: param.name for param in graph.params if param.type.dtype in ("int32", "int64")}
    checks = []
    for node in graph.nodes:
        name, operands = node.call.name, node.inputs
        if (name in _SAME_ELEMENTS or node.is_annotation) and operands and operands[0] in origin:
            if node.outputs[0].type.dtype in (operands[0].type.dtype, "int64"):
                origin[node.outputs[0]] = origin[operands[0]]
        elif name == "take" and len(operands) == 2 and operands[1] in origin:
            mode, axis = node.call.attr("mode", "fast"), node.call.attr("axis")
            if mode in ("fast", "nan") and axis is not None:
                size = operands[0].type.shape[node.call.axis(axis)]
                lowest = 0 if mode == "nan" else -size
                checks.append(IndexCheck(origin[operands[1]], size, lowest, node.where))
    return tuple(dict.fromkeys(checks))
