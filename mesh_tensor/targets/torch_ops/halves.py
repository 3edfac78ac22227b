"""Operators whose gradients need what the operator has computed beside its results, as torch's own two functions: one
that gives that, too, and one that takes it. Autograd runs the same ones, so all bits are those that it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mesh_tensor.rules.operator import OpCall

from .nn import is_causal, last_dims

Tensor = torch.Tensor
_aten = torch.ops.aten
_FLASH = 1  # torch's number of the way that computes attention block by block, and keeps sums of exponentials
_WIDE = {"float32", "float64"}


@dataclass(frozen=True)
class Recorded:
    """A call and its gradients, where these take what is kept of that.

    forward   of the call's operands: its results, and what is kept
    backward  of the operands, the gradients of results, and what is kept: the gradients
    """

    forward: Callable[..., tuple[tuple[Tensor, ...], Any]]
    backward: Callable[..., tuple[Tensor, ...]]


def halves(call: OpCall, wanted: Sequence[int], other: Recorded) -> Recorded | None:
    """The call, and the gradients of the operands `wanted`, by torch's functions for both; None where it has none.
    `other` serves operands that these don't take."""
    alike = {tensor.dtype for tensor in (*call.inputs, *call.outputs)}
    make = HALVES.get(call.name)
    return make(call, wanted, other) if make is not None and len(alike) == 1 and alike <= _WIDE else None


def _layer_norm(call: OpCall, wanted: Sequence[int], _: Recorded) -> Recorded | None:
    shape, eps = last_dims(call), call.attr("epsilon")
    if shape is None or not (call.attr("scale") and call.attr("center")):
        return None
    mask = [number in wanted for number in range(3)]

    def forward(x: Tensor, gamma: Tensor, beta: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        y, mean, rate = torch.native_layer_norm(x, shape, gamma, beta, eps)
        return (y,), (mean, rate)

    def backward(x: Tensor, gamma: Tensor, beta: Tensor, seed: Tensor, kept: Any) -> tuple[Tensor, ...]:
        made = _aten.native_layer_norm_backward(seed, x, shape, *kept, gamma, beta, mask)
        return tuple([made[number] for number in wanted])

    return Recorded(forward, backward)


def _attention(call: OpCall, wanted: Sequence[int], other: Recorded) -> Recorded | None:
    scale, causal = call.attr("scale"), is_causal(call)
    masked = call.attr("causal_mask") is not None or call.attr("window_size") is not None
    if call.inputs[0].shape[2] != call.inputs[1].shape[2] or (masked and not causal):
        return None

    def forward(*given: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        q, k, v = (tensor.transpose(1, 2) for tensor in given)
        if q.device.type != "cpu" or torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale) != _FLASH:
            return other.forward(*given)
        y, sums = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return (y.transpose(1, 2),), (y, sums)

    def backward(*tensors: Any) -> tuple[Tensor, ...]:
        *given, kept = tensors
        if not isinstance(kept[0], Tensor):
            return other.backward(*tensors)
        q, k, v, seed = (tensor.transpose(1, 2) for tensor in given)
        made = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            seed, q, k, v, *kept, 0.0, causal, scale=scale
        )
        return tuple([made[number].transpose(1, 2) for number in wanted])

    return Recorded(forward, backward)


HALVES: dict[str, Callable[[OpCall, Sequence[int], Recorded], Recorded | None]] = {
    "nn.attention": _attention,
    "nn.layer_norm": _layer_norm,
}
