"""Operators and their gradients by torch's own functions for both, where gradients take what the operator has kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mesh_tensor.rules.operator import OpCall

from ..cpu import attention as own
from ..dtypes import wide
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
    make = _HALVES.get(call.name)
    return make(call, wanted, other) if make is not None and len(alike) == 1 and alike <= _WIDE else None


def has_halves(call: OpCall) -> bool:
    """Whether there are such functions of the operator, on some operands."""
    return call.name in _HALVES


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


def _rms_norm(call: OpCall, wanted: Sequence[int], _: Recorded) -> Recorded | None:
    """torch has no backward of it on CPUs: by autograd it is that of what it is made of, and as much is kept of it as
    it gives."""
    shape, eps = last_dims(call), call.attr("epsilon")
    if shape is None:
        return None
    rows = tuple(range(call.inputs[0].ndim - len(shape)))
    last = tuple(range(len(rows), call.inputs[0].ndim))

    def forward(x: Tensor, weight: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        return (torch.rms_norm(x, shape, weight, eps),), ()

    def backward(*given: Any) -> tuple[Tensor, ...]:
        x, weight, seed = map(wide, given[:3])  # squares of 16 bits may be infinite, or 0
        rate = torch.rsqrt(x.square().mean(last, keepdim=True).add_(eps))
        made: list[Tensor] = []
        for number in wanted:
            if number == 0:
                d = seed * weight
                share = (d * x).mean(last, keepdim=True).mul_(rate).mul_(rate).mul_(rate)  # the cube may be 0
                made.append(d.mul_(rate).addcmul_(x, share, value=-1))
            else:
                d = (x * rate).mul_(seed)
                made.append(d.sum(rows) if rows else d)
        return tuple([gradient.to(given[number].dtype) for number, gradient in zip(wanted, made, strict=True)])

    return Recorded(forward, backward)


def _attention(call: OpCall, wanted: Sequence[int], other: Recorded) -> Recorded | None:
    scale, causal = call.attr("scale"), is_causal(call)
    masked = call.attr("causal_mask") is not None or call.attr("window_size") is not None
    if call.inputs[0].shape[2] != call.inputs[1].shape[2] or (masked and not causal):
        return None

    def forward(*given: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        q, k, v = given
        if causal and own.takes(q, k, v):
            y, sums = own.causal_attention(q, k, v, scale)
            return (y,), (y.transpose(1, 2), sums)  # as torch's keeps them
        q, k, v = (tensor.transpose(1, 2) for tensor in given)
        if q.device.type != "cpu" or torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale) != _FLASH:
            return other.forward(*given)
        y, sums = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return (y.transpose(1, 2),), (y, sums)

    def backward(*tensors: Any) -> tuple[Tensor, ...]:
        *given, kept = tensors
        if not isinstance(kept[0], Tensor):
            return other.backward(*tensors)
        (q, k, v, seed), (y, sums) = given, kept
        if causal and own.takes(q, k, v):
            made = own.causal_attention_backward(seed, q, k, v, y.transpose(1, 2), sums, scale)
            return tuple([made[number] for number in wanted])
        q, k, v, seed = (tensor.transpose(1, 2) for tensor in given)
        made = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            seed, q, k, v, y, sums, 0.0, causal, scale=scale
        )
        return tuple([made[number].transpose(1, 2) for number in wanted])

    return Recorded(forward, backward)


_HALVES: dict[str, Callable[[OpCall, Sequence[int], Recorded], Recorded | None]] = {
    "nn.attention": _attention,
    "nn.layer_norm": _layer_norm,
    "nn.rms_norm": _rms_norm,
}
