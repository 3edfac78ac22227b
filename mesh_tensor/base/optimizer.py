"""Optimizer: what is kept per parameter, and the numbers of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from .errors import did_you_mean, listing, refuse, shown

MASTER = "master"
# Slots that are finite wherever another one is: a mean of gradients, where that of their squares is.
IMPLIED = {"exp_avg": "exp_avg_sq"}
GROWING = {"momentum_buffer"}  # slots that are no means
# Norms from which an optimizer that `stays_finite` makes finite numbers in float32, times what it multiplies them with.
PARAMETER_NORM, GRADIENT_NORM, SCALE_NORM, SLOT_NORM, MOST_LR = 2.0**60, 2.0**30, 2.0**10, 2.0**40, 2.0**10


@dataclass(frozen=True)
class Optimizer:
    """A rule that makes new parameters from old ones and their gradients; formulas are those of torch.optim.

    name      one of `OPTIMIZERS`
    options   its numbers, as torch calls them ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")

    >>> Optimizer.make("adamw", lr=1e-3).slots
    ('exp_avg', 'exp_avg_sq')
    """

    name: str
    options: Mapping[str, float | bool | tuple[float, float]] = field(default_factory=dict)

    @staticmethod
    def make(name: str, **options: float | bool | tuple[float, float]) -> Optimizer:
        """The optimizer of that name; options that are left out are torch's. Refused where there is no such optimizer,
        it does not have an option, or one has no such value."""
        if name not in OPTIMIZERS:
            refuse(
                f"there is no optimizer {name!r}{did_you_mean(name, OPTIMIZERS)}",
                fix=f"use {listing(list(OPTIMIZERS))}",
            )
        defaults = OPTIMIZERS[name][1]
        unknown = [option for option in options if option not in defaults]
        if unknown:
            refuse(
                [f"{name!r} has no option {option!r}{did_you_mean(option, list(defaults))}" for option in unknown],
                fix=f"it has {listing(list(defaults))}",
            )
        wrong = [f"{option}={shown(options[option])}" for option in options if not _fits(option, options[option])]
        if wrong:
            refuse(
                f"{name!r} with {', '.join(wrong)}",
                fix="use numbers from 0 on, betas as two numbers below 1, and True or False for nesterov",
            )
        made = {option: tuple(value) if isinstance(value, list) else value for option, value in options.items()}
        return Optimizer(name, {**defaults, **made})

    @property
    def slots(self) -> tuple[str, ...]:
        """What is kept per parameter, in its shape; zero at first."""
        return OPTIMIZERS[self.name][0]

    @property
    def stays_finite(self) -> bool:
        """Whether it makes finite numbers of parameters, gradients, scales and a learning rate within the norms above,
        and of slots that were once: means of gradients are no larger than these (2**40), those of squares than 2**80,
        so that a mean over a root with `eps` is at most 2**100. A momentum buffer has to be looked at every time."""
        betas = self.options.get("betas")
        return (
            all(beta <= 1 - 2.0**-20 for beta in (betas if isinstance(betas, tuple) else ()))
            and self._number("eps", 1.0) >= 2.0**-40
            and max(self._number("weight_decay", 0.0), self._number("momentum", 0.0)) <= 2.0**10
        )

    def _number(self, option: str, default: float) -> float:
        value = self.options.get(option, default)
        assert isinstance(value, (int, float))
        return value

    def numbers(self, step: int, lr: float) -> tuple[float, ...]:
        """The numbers of step 1, 2, ...: the learning rate; where there are betas, 1 - beta1^step and the root of
        1 - beta2^step; and the step."""
        betas = self.options.get("betas")
        if not isinstance(betas, tuple):
            return lr, 1.0, 1.0, float(step)
        first, second = betas
        return lr, 1 - first**step, math.sqrt(1 - second**step), float(step)


def _fits(option: str, value: object) -> bool:
    if option == "nesterov":
        return isinstance(value, bool)
    if option == "betas":
        return isinstance(value, (tuple, list)) and len(value) == 2 and all(is_number(x) and x < 1 for x in value)
    return is_number(value)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number, from 0 on."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


Options = dict[str, "float | bool | tuple[float, float]"]
_ADAM: Options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
# name -> slots, options with their defaults
OPTIMIZERS: dict[str, tuple[tuple[str, ...], Options]] = {
    "sgd": ((), {"lr": 1e-3, "weight_decay": 0.0}),
    "momentum": (("momentum_buffer",), {"lr": 1e-3, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0}),
    "adam": (("exp_avg", "exp_avg_sq"), _ADAM),
    "adamw": (("exp_avg", "exp_avg_sq"), _ADAM | {"weight_decay": 1e-2}),
    "lion": (("exp_avg",), {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}),
}
