"""Operators that sort, or look up where a value would stand in a sorted tensor."""

from __future__ import annotations

import torch

from mesh_tensor.rules.operator.call import OpCall

from .table import Function, torch_op

Tensor = torch.Tensor


@torch_op("sort", "argsort")
def _sort(call: OpCall) -> Function:
    """Stable."""
    dim, descending, field = call.attr("axis"), bool(call.attr("descending")), int(call.name == "argsort")
    return lambda x: torch.sort(x, dim=dim, descending=descending, stable=True)[field]


@torch_op("topk")
def _topk(call: OpCall) -> Function:
    """By a stable sort: of equal elements the first come first."""
    dim, largest = call.axis(call.attr("axis")), bool(call.attr("largest"))
    k = call.outputs[0].shape[dim]
    fields = {"both": (0, 1), "values": (0,), "indices": (1,)}[call.attr("ret_type")]

    def topk(x: Tensor) -> tuple[Tensor, ...]:
        found = torch.sort(x, dim=dim, descending=largest, stable=True)
        return tuple(found[field].narrow(dim, 0, k) for field in fields)

    return topk


@torch_op("bucketize")
def _bucketize(call: OpCall) -> Function:
    right = bool(call.attr("right"))
    return lambda x, boundaries: torch.bucketize(x, boundaries, right=right)
