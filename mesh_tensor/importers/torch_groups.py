"""Products of rows in groups, each with a matrix of its own, as experts compute. See torch_ops for what they take."""

from __future__ import annotations

from typing import Any

import torch
from tvm import relax

from mesh_tensor.rules.operator.linear_algebra import grouped_call

from .torch_args import arguments, emit, result_dtype
from .torch_general import general


def grouped(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """(S, K) rows, sorted by group, by (G, K, N) matrices; other forms are torch's."""
    x, weight, ends, bias, _ = arguments(node, importer, 2, offs=None, bias=None, out_dtype=None)
    if ends is None or bias is not None or [len(t.struct_info.shape) for t in (x, weight)] != [2, 3]:
        return general(node, importer)
    return emit(importer, grouped_call(x, weight, ends, result_dtype(node)))


GROUPS = {"_grouped_mm.default": grouped, "grouped_mm_fallback.default": grouped}
