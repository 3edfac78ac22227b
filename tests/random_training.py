"""Random training: a small model with a random layout on a mesh, by any optimizer, with ZeRO, clipping, accumulation,
recomputation, loss scaling, a schedule, frozen parameters, in any dtype, going on from its state on another mesh,
beside torch. One case per number, for `make fuzz`."""

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
_CLOSE = {"rtol": 3e-4, "atol": 3e-4}
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, RATE),
    "momentum": lambda parameters: torch.optim.SGD(parameters, RATE, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, RATE),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, RATE),
}


def _heavy(parameter: Any, gradient: Any, lr: Any, step: Any, *, speed: Any, before: Any) -> Any:
    """By norms of the whole parameter; what it is given is written."""
    gradient.mul_(torch.clamp(parameter.norm() / (gradient.norm() + 1e-3), max=2.0))
    speed.mul_(0.9).add_(torch.where(step > 1, gradient, 0.5 * gradient))
    return parameter.sub_(lr * (speed + 0.1 * before)), {"speed": speed, "before": gradient}


def _signs(parameter: Any, gradient: Any, lr: Any, step: Any) -> Any:
    return parameter - lr * gradient / (1 + gradient.abs()), {}


_OWN: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "heavy": (_heavy, ("speed", "before")),
    "signs": (_signs, ()),
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
        self.kind = random.choice(("plain", "attention", "gates", "tied", "places", "shared", "rare", "empty"))
        self.end, self.activation = _ENDS[random.choice(list(_ENDS))], random.choice(_ACTIVATIONS)
        self.norm = random.choice((nn.LayerNorm, nn.RMSNorm))(width)
        self.up = nn.Linear(width, 2 * width, bias=random.random() < 0.7)
        self.down, self.classes = nn.Linear(2 * width, width), nn.Linear(width, CLASSES)
        self.heads = random.choice((1, 2))
        if self.kind == "attention":
            self.qkv = nn.Linear(width, 3 * width)
        if self.kind == "places":
            self.places = nn.Parameter(torch.randn(7, width) * 0.3)
        if self.kind == "shared":
            self.again = nn.Linear(width, 2 * width, bias=False)
            self.again.weight = self.up.weight
        if self.kind == "rare":  # of few rows, or of none
            self.rare = nn.Parameter(torch.randn(width))
        if self.kind == "empty":
            self.empty = nn.Parameter(torch.randn(0, width))
            self.register_buffer("count", torch.tensor(3))
            self.register_buffer("also", self.up.weight.detach())  # the memory of a parameter

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
        if self.kind == "shared":
            h = h + self.again(x).tanh()
        if self.kind == "rare":
            x = torch.where(x[:, :1, :1] > 1.2, x * self.rare, x)
        if self.kind == "empty":
            x = torch.cat([x, self.empty.expand(len(x), 0, -1)], 1) + self.count * (
                self.empty.sum() + 0 * self.also.sum()
            )
        return self.classes(self.end(x + self.down(h)))


@dataclass(frozen=True)
class TrainingCase:
    """A model of a number, how its batch and parameters lie on a mesh, and how it is trained; `other`: the mesh that it
    goes on with after a step."""

    number: int
    width: int
    batch: tuple[int, int]
    mesh: dict[str, int]
    other: dict[str, int] | None
    layouts: dict[str, dict[str, int]]
    optimizer: str
    options: dict[str, Any]
    reduction: str
    dtype: torch.dtype
    frozen: frozenset[str]

    def model(self) -> Model:
        torch.manual_seed(self.number)
        model = Model(Random(self.number), self.width).to(self.dtype)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return model

    def loss(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(found.float() if self.dtype.itemsize < 4 else found, wanted, reduction=self.reduction)

    @property
    def rule(self) -> str | Callable[..., Any]:
        """The optimizer: a name, or a function."""
        return _OWN[self.optimizer][0] if self.optimizer in _OWN else self.optimizer

    def step(self) -> mt.TrainingStep:
        return mt.training_step(self.model(), self.loss, data(self), optimizer=self.rule, **self.options)


def make_training_case(number: int) -> TrainingCase:
    """The case with this number."""
    random = Random(f"training {number}")
    meshes = ({"d": 2}, {"d": 2, "m": 2}, {"d": 3}, {"d": 1, "m": 2})
    width, mesh = random.choice((4, 6, 8)), random.choice(meshes)
    optimizer = random.choice([*_OPTIMIZERS, *_OWN])
    options: dict[str, Any] = {"lr": RATE, **({"momentum": 0.9} if optimizer == "momentum" else {})}
    dtype = random.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16))
    drawn = {
        "clip_norm": random.choice((0.1, 1.0)),
        "zero": random.choice((1, 2, 3)),
        "accumulate": 2,
        "recompute": "selective",
        "loss_scale": random.choice((8.0, "dynamic")),
        "schedule": random.choice((_warmup, _turning)),
    }
    options |= {name: value for name, value in drawn.items() if random.random() < 0.4}
    if dtype.itemsize < 4 and random.random() < 0.5:
        options["reduce_dtype"] = dtype
    parameters = dict(Model(Random(number), width).named_parameters())
    frozen = frozenset(name for name in parameters if random.random() < 0.1 and name != "classes.weight")
    layouts: dict[str, dict[str, int]] = {"x": {"d": 0}}
    for name, parameter in parameters.items():
        axis = "m" if "m" in mesh and random.random() < 0.5 else "d" if random.random() < 0.1 else ""
        if axis:
            layouts[name] = {axis: random.randrange(parameter.ndim)}
    batch = random.choice((4, 6, 8)), random.choice((3, 4, 5))
    other = random.choice(meshes) if random.random() < 0.4 else None
    reduction = random.choice(("mean", "sum"))
    return TrainingCase(number, width, batch, mesh, other, layouts, optimizer, options, reduction, dtype, frozen)


def _warmup(step: int) -> torch.Tensor:
    return torch.tensor((step + 1) / STEPS)


def _turning(step: int) -> float:
    return 1.0 - 1.5 * step


def run(case: TrainingCase) -> Outcome:
    """A few steps beside torch's. Adam divides gradients that are 0 but for rounding (of the biases of keys) by as
    little, so that of it losses are compared only; and where 16 bits round, the gradients' first mean instead of what
    comes after: one whose sign is rounded away moves its parameter by twice the rate."""
    model = case.model()
    try:
        step = case.step()
        trained = mt.distribute_module(step, case.mesh, case.layouts)
    except mt.MeshTensorError as error:
        return Outcome("refused", str(error))
    except Exception:  # a crash is neither right nor refused, whatever its class
        return Outcome("wrong", traceback.format_exc())
    reference = Reference(case, model)
    wide = case.dtype.itemsize >= 4
    close = {"rtol": 2e-4, "atol": 2e-4} if wide else {"rtol": 2e-2, "atol": 2e-2}
    try:
        for n in range(STEPS):
            x, y = data(case)
            skipped, loss = trained.skipped, trained(x, y).float()
            taken = trained.skipped == skipped  # under a dynamic loss scale steps may be left out
            torch.testing.assert_close(loss, reference.step(x, y, taken).float(), **close)
            if n == 0 and case.other is not None:
                trained = _gone_on(case, step, trained)
            if "adam" in case.optimizer and not wide:
                reference.compare_means(trained.state_dict())
                break
        if "adam" not in case.optimizer:
            reference.compare(trained.state_dict())
    except Exception:  # what was not refused has to run
        return Outcome("wrong", traceback.format_exc())
    return RIGHT


def _gone_on(case: TrainingCase, step: mt.TrainingStep, trained: Any) -> Any:
    """The same training on another mesh."""
    assert case.other is not None
    layouts = {n: {a: d for a, d in one.items() if a in case.other} for n, one in case.layouts.items()}
    other = mt.distribute_module(step, case.other, {name: one for name, one in layouts.items() if one})
    other.load_state_dict(trained.state_dict())
    return other


def data(case: TrainingCase) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch."""
    return torch.randn(*case.batch, case.width).to(case.dtype), torch.randint(0, CLASSES, case.batch[:1])


class Reference:
    """Training by torch; of parameters in 16 bits a value in float32 is updated."""

    def __init__(self, case: TrainingCase, model: Model) -> None:
        self.case, self.model, self.steps = case, copy.deepcopy(model), 0
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.first = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.masters = {name: nn.Parameter(self._wide(p.detach().clone())) for name, p in self.trained.items()}
        self.optimizer = None
        if case.optimizer in _OPTIMIZERS:
            self.optimizer = _OPTIMIZERS[case.optimizer](self.masters.values())
        slots = _OWN[case.optimizer][1] if self.optimizer is None else ()
        self.kept = {n: {slot: torch.zeros_like(p.detach()) for slot in slots} for n, p in self.masters.items()}

    @staticmethod
    def _wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.itemsize < 4 else tensor

    def step(self, x: torch.Tensor, y: torch.Tensor, taken: bool) -> torch.Tensor:
        """The loss of a step, which may be left out."""
        loss = self.case.loss(self.model(x), y)
        if not taken:
            return loss.detach()
        for parameter, gradient in zip(
            self.masters.values(), torch.autograd.grad(loss, list(self.trained.values())), strict=True
        ):
            parameter.grad = self._wide(gradient)
        if "clip_norm" in self.case.options:
            nn.utils.clip_grad_norm_(self.masters.values(), self.case.options["clip_norm"])
        rate = RATE * float(self.case.options.get("schedule", lambda step: 1.0)(self.steps))
        self.steps += 1
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.masters.items():
                if self.optimizer is None:
                    given = parameter.clone(), parameter.grad, torch.tensor(rate), torch.tensor(float(self.steps))
                    new, self.kept[name] = _OWN[self.case.optimizer][0](*given, **self.kept[name])
                    parameter.copy_(new)
                self.trained[name].copy_(parameter)
        return loss.detach()

    def compare_means(self, state: dict[str, torch.Tensor]) -> None:
        """Raise where the means of Adam's gradients are others: by how large gradients are."""
        assert self.optimizer is not None
        means = {n: self.optimizer.state[p]["exp_avg"] for n, p in self.masters.items() if self.steps and p.numel()}
        large = max([1e-4, *(float(mean.abs().max()) for mean in means.values())])
        for name, mean in means.items():
            assert float((state[f"opt.exp_avg.{name}"] - mean).abs().max()) <= 0.02 * large, name

    def compare(self, state: dict[str, torch.Tensor]) -> None:
        """Raise where the state is another one. In 16 bits gradients are rounded: by how far parameters moved."""
        moved = max(1e-4, *(float((p - self.first[n]).abs().max()) for n, p in self.masters.items() if p.numel()))
        for name, value in self.model.named_parameters():
            if name not in self.trained:
                assert torch.equal(state[name], self.first[name]), name
            elif self.case.dtype.itemsize >= 4:
                torch.testing.assert_close(
                    state[name], value.detach(), rtol=3e-4, atol=3e-4, msg=lambda m, n=name: n + m
                )
            else:
                master = state[f"opt.master.{name}"]
                assert torch.equal(state[name], master.to(value.dtype)), name
                assert not value.numel() or float((master - self.masters[name]).abs().max()) <= 0.15 * moved, name
