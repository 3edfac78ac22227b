"""`mesh.update`: the formulas of torch.optim, on one parameter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mesh_tensor.rules.operator import OpCall
from mesh_tensor.rules.operator.update import UPDATE, UPDATE_IN_PLACE, optimizer_of, slots_of

from ..tile_memory import empty_tile
from .table import Function, torch_op

Tensor = torch.Tensor
# (parameter, gradient, slots, learning rate, number of the step from 1 on): the parameter and its slots become new
Update = Callable[[Tensor, Tensor, list[Tensor], float, float], None]


@torch_op(UPDATE)
def _update(call: OpCall) -> Function:
    """The parameter's value in float32, where it is kept, is what is updated."""
    in_place, count = _update_in_place(call), optimizer_of(call)[1]

    def update(parameter: Tensor, gradient: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return in_place(_copy(parameter), gradient, *map(_copy, rest[:count]), *rest[count:])

    return update


@torch_op(UPDATE_IN_PLACE)
def _update_in_place(call: OpCall) -> Function:
    """As `_update`, in the memory of the parameter and its slots."""
    optimizer, count = optimizer_of(call)
    kept = len(slots_of(optimizer, call.inputs[0].dtype)) > len(optimizer.slots)
    step = _STEPS[optimizer.name](optimizer.options)

    def update(parameter: Tensor, gradient: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        slots, (numbers, *scale) = list(rest[:count]), rest[count:]
        value = slots[-1] if kept else parameter
        gradient = gradient.to(value.dtype)
        if scale:  # of gradients one of which is NaN; that one says so itself
            gradient = gradient * scale[0].to(value.dtype).nan_to_num(nan=1.0)
        lr, *_, number = numbers.tolist()
        step(value, gradient, slots, lr, number)
        return (parameter.copy_(value) if kept else parameter, *slots)

    return update


def _sgd(options: Any) -> Update:
    decay = options["weight_decay"]

    def step(p: Tensor, g: Tensor, slots: list[Tensor], lr: float, _: float) -> None:
        p.add_(_decayed(g, p, decay), alpha=-lr)

    return step


def _momentum(options: Any) -> Update:
    decay, momentum, nesterov = options["weight_decay"], options["momentum"], options["nesterov"]

    def step(p: Tensor, g: Tensor, slots: list[Tensor], lr: float, _: float) -> None:
        g = _decayed(g, p, decay)
        moved = slots[0].mul_(momentum).add_(g)
        p.add_(torch.add(g, moved, alpha=momentum, out=_like(g)) if nesterov else moved, alpha=-lr)

    return step


def _adam(fused: Callable[..., None], options: Any) -> Update:
    """By torch's kernel, which reads and writes each element once."""
    (first, second), decay, eps = options["betas"], options["weight_decay"], options["eps"]

    def step(p: Tensor, g: Tensor, slots: list[Tensor], lr: float, number: float) -> None:
        count = torch.tensor(number, dtype=torch.float32, device=p.device)
        fused(
            [p], [g.contiguous()], [slots[0]], [slots[1]], [], [count],
            lr=lr, beta1=first, beta2=second, weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip

    return step


def _lion(options: Any) -> Update:
    (first, second), decay = options["betas"], options["weight_decay"]

    def step(p: Tensor, g: Tensor, slots: list[Tensor], lr: float, _: float) -> None:
        direction = torch.lerp(slots[0], g, 1 - first, out=_like(g)).sign_()
        slots[0].lerp_(g, 1 - second)
        p.mul_(1 - lr * decay).add_(direction, alpha=-lr)

    return step


def _copy(tensor: Tensor) -> Tensor:
    return _like(tensor).copy_(tensor)


def _like(tensor: Tensor) -> Tensor:
    """Memory for a result: what an earlier step has left, where it is large."""
    return empty_tile(tensor.shape, tensor.dtype, tensor.device)


def _decayed(g: Tensor, p: Tensor, decay: float) -> Tensor:
    return torch.add(g, p, alpha=decay, out=_like(g)) if decay else g


_STEPS: dict[str, Callable[[Any], Update]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adam": partial(_adam, torch._fused_adam_),
    "adamw": partial(_adam, torch._fused_adamw_),
    "lion": _lion,
}
