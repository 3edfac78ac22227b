"""What a call of an operator computes."""

from __future__ import annotations

import math

from .call import OpCall


def count_flops(call: OpCall) -> int:
    """Floating-point operations: 2 per multiply-add of what contracts; 1 per element of the largest tensor else."""
    if call.name == "matmul":
        return 2 * call.outputs[0].elements * call.inputs[0].shape[-1]
    if call.name.startswith("nn.conv") and len(call.inputs) > 1:
        weight = call.inputs[1]
        return 2 * call.outputs[0].elements * weight.elements // max(1, weight.shape[0])
    if call.name.startswith("nn.attention"):
        batch, queries, heads, size = call.inputs[0].shape
        return 4 * batch * heads * queries * call.inputs[1].shape[1] * size
    return max((math.prod(tensor.shape) for tensor in (*call.inputs, *call.outputs)), default=0)
