"""A small convolutional classifier: two stages of convolution, batch norm, relu, pooling; then a linear layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from kernels.models import Shardings


@dataclass(frozen=True)
class Config:
    """Sizes; images are (channels, size, size)."""

    batch: int = 4
    channels: int = 3
    size: int = 8
    width: int = 8
    classes: int = 10


class ConvNet(nn.Module):
    """Images to logits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(config.channels, config.width, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(config.width)
        self.conv2 = nn.Conv2d(config.width, 2 * config.width, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, 2 * config.width)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(2 * config.width, config.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, channels, size, size) -> (batch, classes)."""
        x = torch.relu(self.norm1(self.conv1(images)))
        x = self.pool(torch.relu(self.norm2(self.conv2(x))))
        return self.fc(x.mean(dim=(2, 3)))


def build(config: Config = Config()) -> ConvNet:
    """The model with random weights, and statistics of the batch norm that are not 0 and 1."""
    model = ConvNet(config).eval()
    model.norm1.running_mean.uniform_(-1, 1)
    model.norm1.running_var.uniform_(0.5, 2)
    return model


def example_inputs(config: Config = Config()) -> tuple[torch.Tensor]:
    """Images."""
    return (torch.randn(config.batch, config.channels, config.size, config.size),)


def data_parallel(axis: str) -> Shardings:
    """The batch is split."""
    return {"images": {axis: 0}}


def tensor_parallel(axis: str) -> Shardings:
    """The channels between the convolutions are split, then those after them: gathered for the last layer only."""
    return {"conv1.weight": {axis: 0}, "conv2.weight": {axis: 1}, "fc.weight": {axis: 1}}
