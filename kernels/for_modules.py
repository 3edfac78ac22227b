"""Kernels that stand in for operators of Relax modules where they were measured faster than torch on a CPU.

mt.distribute_module(mod, mesh, shardings, kernels=FASTER_ON_CPU)
"""

from __future__ import annotations

import math

from tilelang import tvm

from kernels.rms_norm import rms_norm
from mesh_tensor.rules.operator import OpCall

_SMALLEST = 1 << 12  # elements: below, a call's own cost decides


def rms_norm_for(call: OpCall) -> tvm.tirx.PrimFunc | None:
    """The kernel for float32 rows normalised over the last dim (torch takes several passes over memory)."""
    x, weight = call.inputs
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    over_rows = call.axes(call.attr("axes")) == (x.ndim - 1,) and weight.shape == (width,)
    if not over_rows or {x.dtype, weight.dtype} != {"float32"} or x.elements < _SMALLEST:
        return None
    return rms_norm(rows, width, eps=call.attr("epsilon"))


FASTER_ON_CPU = {"nn.rms_norm": rms_norm_for}
