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


class Normed(nn.Module):
    """Two linear layers with batch norms, a loss, and, if it counts, a buffer that it multiplies with and writes."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fcs = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norms = nn.ModuleList([nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=0.3)])
        self.counts = counts
        if counts:
            self.register_buffer("calls", torch.ones(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norms[0](self.fcs[0](x)))
        if self.counts:
            x = self.fcs[1](x * self.calls.clone())
            self.calls.add_(x.detach()[0].abs() + 0.5)
        else:
            x = self.fcs[1](x)
        return nn.functional.mse_loss(self.fcs[2](torch.relu(self.norms[1](x))), y)


def batch(rows: int, words: int = 11, positions: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels."""
    return torch.randint(words, (rows, positions)), torch.randint(words, (rows, positions))


def imported(model: nn.Module, rows: int, open_size: bool = False) -> mt.ImportedModule:
    """The model over so many rows at a time, or over any number of them."""
    dim = torch.export.Dim("rows", min=1, max=64)
    shapes = {"tokens": {0: dim}, "labels": {0: dim}} if open_size else None
    return mt.from_torch(torch.export.export(model, batch(rows), dynamic_shapes=shapes))


def chain(layers: int = 4, width: int = 6, rows: int = 3) -> tuple[mt.ImportedModule, dict[str, torch.Tensor]]:
    """Linear layers with a tanh between, and the mean of squared errors, as a module that needs no export. The first
    and the last layer have one weight."""
    from tvm import relax

    builder = relax.BlockBuilder()
    params = {name: relax.Var(name, relax.TensorStructInfo((rows, width), "float32")) for name in ("x", "y")} | {
        f"w{i}": relax.Var(f"w{i}", relax.TensorStructInfo((width, width), "float32")) for i in range(layers - 1)
    }
    with builder.function("main", list(params.values())):
        with builder.dataflow():
            value = params["x"]
            for i in range(layers):
                weight = params[f"w{i % (layers - 1)}"]
                value = builder.emit(relax.op.tanh(relax.op.matmul(value, weight)), f"layer{i}")
            error = relax.op.subtract(value, params["y"])
            loss = builder.emit_output(relax.op.mean(relax.op.multiply(error, error)), "loss")
        builder.emit_func_output(loss)
    weights = {name: torch.randn(width, width) / 2 for name in list(params)[2:]}
    return mt.ImportedModule(builder.get(), weights), weights


def chain_loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of `chain`, by torch."""
    for i in range(len(weights) + 1):
        x = torch.tanh(x @ weights[f"w{i % len(weights)}"])
    return ((x - y) ** 2).mean()
