"""More modules whose plans are compared with those that people make by hand: blocks whose norms come last, and steps of
training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from kernels.models import llama

from .plan_modules import Case, Hand, Layouts, from_model, gathered, reduced


class NormedAfter(llama.Block):
    """A block whose norms come last, as in BERT and OLMo 2."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(batch, positions, width) -> the same."""
        x = self.input_norm(x + self.attn(x, cos, sin))
        return self.mlp_norm(x + self.mlp(x))


class Einsums(nn.Module):
    """Attention whose layers are einsums over heads, as in Flax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, size = nn.LayerNorm(width), width // heads
        self.q, self.k, self.v = (nn.Parameter(torch.randn(width, heads, size)) for _ in range(3))
        self.o = nn.Parameter(torch.randn(heads, size, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, positions, width) -> the same."""
        normed = self.norm(x)
        q, k, v = (torch.einsum("btw,whd->bhtd", normed, part) for part in (self.q, self.k, self.v))
        return x + torch.einsum("bhtd,hdw->btw", F.scaled_dot_product_attention(q, k, v), self.o)


def cases() -> list[Case]:
    """All rows."""
    return [*normed_after(), *einsums(), *few_key_heads()]


def trained(
    make: Callable[[], nn.Module], loss: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> Callable[[], mt.TrainingStep]:
    """A step of training by gradients alone."""
    return lambda: mt.training_step(make(), loss, inputs, optimizer="sgd", lr=0.1, check=False)


def _of_block(split: Layouts) -> dict[str, Any]:
    return {name.removeprefix("layers.0."): dims for name, dims in split.items() if name.startswith("layers.0.")}


def normed_after() -> list[Case]:
    """Positions beside heads, where no norm stands before the layers."""
    config = llama.Config(width=256, hidden=768, heads=8, key_heads=4, layers=1, batch=8, positions=64)
    stream = config.batch * config.positions * config.width
    x, tables = torch.randn(config.batch, config.positions, config.width), torch.randn(2, config.positions, 32)
    split = _of_block(llama.tensor_parallel(config, "m")) | {"x": {"m": 1}, "mlp_norm": {"m": 1}}
    make = partial(NormedAfter, config)
    why = "an all-gather before, a reduce-scatter after each part"
    forward = Hand(4 * gathered(stream, 4), 4, why)
    summed = reduced(2 * config.width + 1, 4)
    back = Hand(
        7 * gathered(stream, 4) + summed, 8, f"{why}; back, too, but for the input; norms' gradients are summed"
    )
    step = trained(make, F.mse_loss, x, *tables, torch.randn_like(x))
    name = "LLaMA block, norms last"
    return [
        Case(name, "TP + SP", partial(from_model, make, x, *tables), {"m": 4}, split, forward),
        Case(f"{name}, trained", "TP + SP", step, {"m": 4}, split | {"target": {"m": 1}}, back),
    ]


def einsums() -> list[Case]:
    """Positions, or a batch, beside heads, where each layer has a view of its own of what it takes."""
    x, make = torch.randn(8, 64, 256), partial(Einsums, 256, 8)
    split = {name: {"m": 1} for name in ("q", "k", "v")} | {"o": {"m": 0}, "x": {"m": 1}}
    hand = Hand(2 * gathered(x.numel(), 4), 2, "an all-gather before, a reduce-scatter after")
    beside = split | {"x": {"d": 0}, "target": {"d": 0}}
    norm, weights = reduced(2 * 256 + 1, 8), reduced(4 * 256 * 256 // 4, 2)
    why = "one after the layer; nobody asks for the gradient of x: those of its norm are summed with the gradients"
    trains = Hand(reduced(x.numel() // 2, 4) + weights + norm, 3, why)
    why = (
        "a gather and a reduce-scatter each way; what is gathered before the layer is gathered again for its gradients"
    )
    again = Hand(5 * gathered(x.numel(), 4) + reduced(2 * 256 + 1, 4), 6, why)
    step = trained(make, F.mse_loss, x, torch.randn_like(x))
    return [
        Case("attention by einsums", "TP + SP", partial(from_model, make, x), {"m": 4}, split, hand),
        Case("attention by einsums, trained", "DP x TP", step, {"d": 2, "m": 4}, beside, trains),
        Case("attention by einsums, trained", "TP + SP", step, {"m": 4}, split | {"target": {"m": 1}}, again),
    ]


def few_key_heads() -> list[Case]:
    """Fewer key heads than devices, in training."""
    config = llama.Config(
        vocabulary=512, width=512, hidden=1024, heads=16, key_heads=4, layers=1, batch=8, positions=64
    )
    stream = config.batch * config.positions * config.width
    keys = stream // 4

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(y.flatten(0, 1), target.flatten())

    why = "pairs of devices exchange the halves of a key head, and of its gradient"
    hand = Hand(4 * reduced(stream, 8) + 4 * gathered(2 * keys // 8, 2), 8, why)
    ids = torch.randint(512, (2, config.batch, config.positions))
    step = trained(partial(llama.build, config), loss, *ids)
    return [Case("LLaMA, 4 key heads, trained", "TP on 8", step, {"m": 8}, llama.tensor_parallel(config, "m"), hand)]
