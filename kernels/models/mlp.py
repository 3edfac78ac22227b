"""A perceptron with one hidden layer: gelu(x @ weight1) @ weight2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from kernels.models import Shardings


@dataclass(frozen=True)
class Config:
    """Sizes."""

    batch: int = 12
    width: int = 16
    hidden: int = 32


class MLP(nn.Module):
    """Weights are (in, out)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight1 = nn.Parameter(torch.randn(config.width, config.hidden) / config.width**0.5)
        self.weight2 = nn.Parameter(torch.randn(config.hidden, config.width) / config.hidden**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width) -> (batch, width)."""
        hidden = nn.functional.gelu(x @ self.weight1)
        return hidden @ self.weight2


def build(config: Config = Config()) -> MLP:
    """The model with random weights."""
    return MLP(config).eval()


def example_inputs(config: Config = Config()) -> tuple[torch.Tensor]:
    """x."""
    return (torch.randn(config.batch, config.width),)


def data_parallel(axis: str) -> Shardings:
    """The batch is split."""
    return {"x": {axis: 0}}


def tensor_parallel(axis: str) -> Shardings:
    """The hidden layer is split: one all-reduce."""
    return {"weight1": {axis: 1}, "weight2": {axis: 0}}
