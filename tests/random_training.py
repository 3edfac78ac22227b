"""Random training: a small model with a random layout on a mesh, by any optimizer, with ZeRO, clipping, accumulation
and recomputation, beside torch. One case per number, for `make fuzz`."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import mesh_tensor as mt
from tests.random_kernels.check import RIGHT, Outcome

CLASSES, STEPS, RATE = 5, 2, 0.05
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, RATE),
    "momentum": lambda parameters: torch.optim.SGD(parameters, RATE, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, RATE),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, RATE),
}
_ENDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x.mean(1),
    "largest": lambda x: x.amax(1),
    "last": lambda x: x[:, -1],
    "logarithm of a sum": lambda x: x.logsumexp(1),
}
_ACTIVATIONS = (torch.relu, F.gelu, torch.tanh, F.silu, torch.sin, torch.abs)


class Model(nn.Module):
    """A block of a transformer of `width`, or something like it, and what makes classes of it."""

    def __init__(self, random: Random, width: int) -> None:
        super().__init__()
        self.kind = random.choice(("plain", "attention", "gates", "tied", "places"))
        self.end, self.activation = _ENDS[random.choice(list(_ENDS))], random.choice(_ACTIVATIONS)
        self.norm = random.choice((nn.LayerNorm, nn.RMSNorm))(width)
        self.up = nn.Linear(width, 2 * width, bias=random.random() < 0.7)
        self.down, self.classes = nn.Linear(2 * width, width), nn.Linear(width, CLASSES)
        self.heads = random.choice((1, 2))
        if self.kind == "attention":
            self.qkv = nn.Linear(width, 3 * width)
        if self.kind == "places":
            self.places = nn.Parameter(torch.randn(7, width) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "places":
            x = x + self.places[: x.shape[1]]
        if self.kind == "attention":
            q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = self.activation(self.up(self.norm(x)))
        if self.kind == "gates":
            h = h * torch.sigmoid(h.roll(1, -1))
        if self.kind == "tied":
            h = h @ self.up.weight @ self.up.weight.T * 0.3
        return self.classes(self.end(x + self.down(h)))


@dataclass(frozen=True)
class TrainingCase:
    """A model of a number, how its batch and parameters lie on a mesh, and how it is trained."""

    number: int
    width: int
    batch: tuple[int, int]
    mesh: dict[str, int]
    layouts: dict[str, dict[str, int]]
    optimizer: str
    options: dict[str, Any]
    reduction: str

    def model(self) -> Model:
        torch.manual_seed(self.number)
        return Model(Random(self.number), self.width)

    def loss(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(found, wanted, reduction=self.reduction)


def make_training_case(number: int) -> TrainingCase:
    """The case with this number."""
    random = Random(f"training {number}")
    width, mesh = random.choice((4, 6, 8)), random.choice(({"d": 2}, {"d": 2, "m": 2}, {"d": 3}, {"d": 1, "m": 2}))
    optimizer = random.choice(list(_OPTIMIZERS))
    options: dict[str, Any] = {"lr": RATE, **({"momentum": 0.9} if optimizer == "momentum" else {})}
    drawn = {
        "clip_norm": random.choice((0.1, 1.0)),
        "zero": random.choice((1, 2, 3)),
        "accumulate": 2,
        "recompute": "selective",
    }
    options |= {name: value for name, value in drawn.items() if random.random() < 0.4}
    layouts: dict[str, dict[str, int]] = {"x": {"d": 0}}
    for name, parameter in Model(Random(number), width).named_parameters():
        axis = "m" if "m" in mesh and random.random() < 0.5 else "d" if random.random() < 0.1 else ""
        if axis:
            layouts[name] = {axis: random.randrange(parameter.ndim)}
    batch = random.choice((4, 6, 8)), random.choice((3, 4, 5))
    return TrainingCase(number, width, batch, mesh, layouts, optimizer, options, random.choice(("mean", "sum")))


def run(case: TrainingCase) -> Outcome:
    """A few steps beside torch's. Adam divides gradients that are 0 but for rounding (of the biases of keys) by as
    little, so that of it losses are compared only."""
    model = case.model()
    try:
        step = mt.training_step(model, case.loss, _data(case), optimizer=case.optimizer, **case.options)
        trained = mt.distribute_module(step, case.mesh, case.layouts)
    except mt.MeshTensorError as error:
        return Outcome("refused", str(error))
    except Exception:  # a crash is neither right nor refused, whatever its class
        return Outcome("wrong", traceback.format_exc())
    reference = copy.deepcopy(model)
    optimizer = _OPTIMIZERS[case.optimizer](reference.parameters())
    try:
        for _ in range(STEPS):
            x, y = _data(case)
            torch.testing.assert_close(trained(x, y), _step(case, reference, optimizer, x, y), rtol=2e-4, atol=2e-4)
        state = trained.state_dict()
        for name, value in reference.named_parameters() if "adam" not in case.optimizer else ():
            torch.testing.assert_close(state[name], value.detach(), rtol=3e-4, atol=3e-4, msg=lambda m, n=name: n + m)
    except Exception:  # what was not refused has to run
        return Outcome("wrong", traceback.format_exc())
    return RIGHT


def _data(case: TrainingCase) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*case.batch, case.width), torch.randint(0, CLASSES, case.batch[:1])


def _step(
    case: TrainingCase, model: Model, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = case.loss(model(x), y)
    loss.backward()
    if "clip_norm" in case.options:
        nn.utils.clip_grad_norm_(model.parameters(), case.options["clip_norm"])
    optimizer.step()
    return loss.detach()
