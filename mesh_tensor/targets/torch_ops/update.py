"""`mesh.update`: the formulas of torch.optim, on one parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mesh_tensor.rules.operator import OpCall
from mesh_tensor.rules.operator.update import UPDATE, optimizer_of, slots_of

from .table import Function, torch_op

Tensor = torch.Tensor
# (parameter, gradient, slots, learning rate, first and second correction): the new parameter, the new slots
Step = Callable[[Tensor, Tensor, list[Tensor], float, float, float], tuple[Tensor, list[Tensor]]]


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
        value, slots = step(value, gradient, slots, *numbers.tolist())
        return (value.to(parameter.dtype), *slots, *([value] if kept else []))

    return update


def _sgd(options: Any) -> Step:
    decay = options["weight_decay"]

    def step(p: Tensor, g: Tensor, slots: list[Tensor], lr: float, *_: float) -> tuple[Tensor, list[Tensor]]:
        return p.add(_decayed(g, p, decay), alpha=-lr), slots

    return step


def _momentum(options: Any) -> Step:
    decay, momentum, nesterov = options["weight_decay"], options["momentum"], options["nesterov"]

    def step(p: Tensor, g: Tensor, slots: list[Tensor], lr: float, *_: float) -> tuple[Tensor, list[Tensor]]:
        g = _decayed(g, p, decay)
        moved = slots[0].mul(momentum).add_(g)
        return p.add(g.add(moved, alpha=momentum) if nesterov else moved, alpha=-lr), [moved]

    return step


def _adam(options: Any) -> Step:
    decay = options["weight_decay"]
    return _with_moments(options, lambda p, lr: p, lambda p, g: _decayed(g, p, decay))


def _adamw(options: Any) -> Step:
    decay = options["weight_decay"]
    return _with_moments(options, lambda p, lr: p.mul(1 - lr * decay), lambda p, g: g)


def _with_moments(
    options: Any, shrunk: Callable[[Tensor, float], Tensor], used: Callable[[Tensor, Tensor], Tensor]
) -> Step:
    (first, second), eps = options["betas"], options["eps"]

    def step(
        p: Tensor, g: Tensor, slots: list[Tensor], lr: float, correction: float, root: float
    ) -> tuple[Tensor, list[Tensor]]:
        g = used(p, g)
        mean = slots[0].lerp(g, 1 - first)
        square = slots[1].mul(second).addcmul_(g, g, value=1 - second)
        below = square.sqrt().div_(root).add_(eps)
        return shrunk(p, lr).addcdiv(mean, below, value=-lr / correction), [mean, square]

    return step


def _lion(options: Any) -> Step:
    (first, second), decay = options["betas"], options["weight_decay"]

    def step(p: Tensor, g: Tensor, slots: list[Tensor], lr: float, *_: float) -> tuple[Tensor, list[Tensor]]:
        direction = slots[0].lerp(g, 1 - first).sign_()
        return p.mul(1 - lr * decay).add_(direction, alpha=-lr), [slots[0].lerp(g, 1 - second)]

    return step


def _decayed(g: Tensor, p: Tensor, decay: float) -> Tensor:
    return g.add(p, alpha=decay) if decay else g


_STEPS: dict[str, Callable[[Any], Step]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adam": _adam,
    "adamw": _adamw,
    "lion": _lion,
}
