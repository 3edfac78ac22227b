"""Products of matrices."""

from __future__ import annotations

import torch

from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.targets.dtypes import torch_dtype

from .table import Function, same_for_all, torch_op

same_for_all({"outer": torch.outer})


@torch_op("matmul")
def _matmul(call: OpCall) -> Function:
    """With an `out_dtype`, the operands are cast to it first."""
    dtype = torch_dtype(call.outputs[0].dtype)
    if all(torch_dtype(t.dtype) is dtype for t in call.inputs):
        return torch.matmul
    return lambda a, b: torch.matmul(a.to(dtype), b.to(dtype))


@torch_op("einsum")
def _einsum(call: OpCall) -> Function:
    subscripts = call.attr("subscripts")
    return lambda *tensors: torch.einsum(subscripts, *tensors)
