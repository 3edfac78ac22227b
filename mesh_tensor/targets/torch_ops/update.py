"""`mesh.update`: the formulas of torch.optim, on one parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mesh_tensor.rules.operator import OpCall
from mesh_tensor.rules.operator.update import UPDATE, optimizer_of, slots_of

from ..tile_memory import empty_tile
from .table import Function, torch_op

Tensor = torch.Tensor
# (parameter, gradient, slots, learning rate, number of the step from 1 on): the new parameter, the new slots
Step = Callable[[Tensor, Tensor, list[Tensor], float, float], tuple[Tensor, list[Tensor]]]


@torch_op(UPDATE)
def _update(call: OpCall) -> Function:
    """The parameter's value in float32, where it is kept, is what is updated."""
    optimizer, count = optimizer_of(call)
    dtype = call.inputs[0].dtype
    kept = len(slots_of(optimizer, dtype)) > len(optimizer.slots)
    step = _STEPS[optimizer.name](optimizer.options)

    def update(parameter: Tensor, gradient: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        slots, (numbers, *scale) = list(rest[:count]), rest[count:]
        value = slots.pop() if kept else parameter
        gradient = gradient.to(value.dtype)
        if scale:  # of gradients one of which is NaN; that one says so itself
            gradient = gradient * scale[0].to(value.dtype).nan_to_num(nan=1.0)
        lr, *_, number = numbers.tolist()
        value, slots = step(value, gradient, slots, lr, number)
        return (value.to(parameter.dtype), *slots, *([value] if kept else []))

    return update


def _sgd(options: Any) -> Step:
    decay = options["weight_decay"]

    def step(p: Tensor, g: Tensor, slots: list[Tensor], lr: float, _: float) -> tuple[Tensor, list[Tensor]]:
        return torch.add(p, _decayed(g, p, decay), alpha=-lr, out=_like(p)), []

    return step


def _momentum(options: Any) -> Step:
    decay, momentum, nesterov = options["weight_decay"], options["momentum"], options["nesterov"]

    def step(p: Tensor, g: Tensor, slots: list[Tensor], lr: float, _: float) -> tuple[Tensor, list[Tensor]]:
        g = _decayed(g, p, decay)
        moved = torch.mul(slots[0], momentum, out=_like(g)).add_(g)
        along = torch.add(g, moved, alpha=momentum, out=_like(g)) if nesterov else moved
        return torch.add(p, along, alpha=-lr, out=_like(p)), [moved]

    return step


def _adam(fused: Callable[..., None]) -> Callable[[Any], Step]:
    """By torch's kernel, which reads and writes each element once."""

    def make(options: Any) -> Step:
        (first, second), decay, eps = options["betas"], options["weight_decay"], options["eps"]

        def step(p: Tensor, g: Tensor, slots: list[Tensor], lr: float, number: float) -> tuple[Tensor, list[Tensor]]:
            new, mean, square = (_like(tensor).copy_(tensor) for tensor in (p, *slots))
            count = torch.tensor(number, dtype=torch.float32, device=p.device)
            fused(
                [new], [g.contiguous()], [mean], [square], [], [count],
                lr=lr, beta1=first, beta2=second, weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
            )  # fmt: skip
            return new, [mean, square]

        return step

    return make


def _lion(options: Any) -> Step:
    (first, second), decay = options["betas"], options["weight_decay"]

    def step(p: Tensor, g: Tensor, slots: list[Tensor], lr: float, _: float) -> tuple[Tensor, list[Tensor]]:
        direction = torch.lerp(slots[0], g, 1 - first, out=_like(g)).sign_()
        moved = torch.lerp(slots[0], g, 1 - second, out=_like(g))
        return torch.mul(p, 1 - lr * decay, out=_like(p)).add_(direction, alpha=-lr), [moved]

    return step


def _like(tensor: Tensor) -> Tensor:
    """Memory for a result: what the state of an earlier step has left, where it is large."""
    return empty_tile(tensor.shape, tensor.dtype, tensor.device)


def _decayed(g: Tensor, p: Tensor, decay: float) -> Tensor:
    return torch.add(g, p, alpha=decay, out=_like(g)) if decay else g


_STEPS: dict[str, Callable[[Any], Step]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adam": _adam(torch._fused_adam_),
    "adamw": _adam(torch._fused_adamw_),
    "lion": _lion,
}
