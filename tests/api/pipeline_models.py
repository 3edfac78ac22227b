"""Models that pipelines are tested with."""

from __future__ import annotations

import torch
from torch import nn

import mesh_tensor as mt


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(nn.functional.gelu(self.fc(self.norm(x))))


class Net(nn.Module):
    """A stack of blocks between an embedding and a head, which may share their weight; gives logits or a loss."""

    def __init__(self, blocks: int = 3, width: int = 8, words: int = 11, tied: bool = False, loss: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)
        self.loss = loss
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) if self.loss else logits


def batch(rows: int, words: int = 11, positions: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels."""
    return torch.randint(words, (rows, positions)), torch.randint(words, (rows, positions))


def imported(model: nn.Module, rows: int, open_size: bool = False) -> mt.ImportedModule:
    """The model over so many rows at a time, or over any number of them."""
    dim = torch.export.Dim("rows", min=1, max=64)
    shapes = {"tokens": {0: dim}, "labels": {0: dim}} if open_size else None
    return mt.from_torch(torch.export.export(model, batch(rows), dynamic_shapes=shapes))
