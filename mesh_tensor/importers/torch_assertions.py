"""What a torch program asserts about its data, which is left out; and what depends on data, which is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

_aten = torch.ops.aten
ASSERTIONS = {
    _aten._assert_async.msg,
    _aten._assert_scalar.default,
    _aten._assert_tensor_metadata.default,
    _aten.sym_constrain_range.default,
    _aten.sym_constrain_range_for_size.default,
}


def drop_assertions(program: torch.export.ExportedProgram) -> None:
    """Take assertions out of the program's graph, and what is only computed for them."""
    for node in reversed(program.graph.nodes):
        unused = node.op == "call_function" and not node.users
        if node.target in ASSERTIONS or (unused and (_reads_number(node) or not node.is_impure())):
            program.graph.erase_node(node)
    program.graph_module.recompile()


def depends_on_data(node: torch.fx.Node) -> bool:
    """Whether the node gives a number, or a tensor of a size, that only data tell."""
    values = node.meta.get("val")
    return any(_is_unknown(value) for value in (values if isinstance(values, (tuple, list)) else [values]))


def _is_unknown(value: Any) -> bool:
    if isinstance(value, torch.Tensor):  # where it begins in memory doesn't matter
        return any(_is_unknown(size) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and bool(free_unbacked_symbols(value))


def _reads_number(node: torch.fx.Node) -> bool:
    return node.target is _aten._local_scalar_dense.default
