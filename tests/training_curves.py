"""`python -m tests.training_curves [model ...]`: 50 steps of AdamW on many meshes; each step's loss beside torch's.

Queries and keys have no biases: gradients of such are 0 but for rounding, which AdamW makes as large as any other."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor import strategies

WIDTH, HEADS, LENGTH, CLASSES, ROWS = 16, 2, 6, 11, 6
LOSS, PARAMETERS = 1e-5, 1e-4
MESHES: dict[str, tuple[dict[str, int], int]] = {
    "one device": ({"one": 1}, 0),
    "data 2": ({"data": 2}, 0),
    "data 3": ({"data": 3}, 0),
    "model 2": ({"model": 2}, 0),
    "data 2, model 2": ({"data": 2, "model": 2}, 0),
    "zero 1": ({"data": 2}, 1),
    "zero 3": ({"data": 2}, 3),
}


class Attention(nn.Module):
    def __init__(self, causal: bool, turned: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.causal, self.turned = causal, turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.turned:
            q, k = (_turned(t) for t in (q, k))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(-2))


def _turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] / 10.0 ** torch.arange(half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Two of four experts for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 4) for shape in ((WIDTH, 32), (32, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x)
        chosen = scores >= scores.topk(2, -1).values[..., 1:]
        weights = scores.masked_fill(~chosen, -torch.inf).softmax(-1)
        each = torch.einsum("...eh,ehw->...ew", F.gelu(torch.einsum("...w,ewh->...eh", x, self.up)), self.down)
        return (each * weights[..., None]).sum(-2)


class Block(nn.Module):
    def __init__(self, attention: nn.Module, inner: nn.Module, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.inner = norm(WIDTH), attention, norm(WIDTH), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.inner(self.norm2(x))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))


class Tokens(nn.Module):
    """A language model of two blocks, of whose positions each has a class."""

    def __init__(self, block: Callable[[], nn.Module], positions: bool) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(CLASSES, WIDTH), nn.Sequential(block(), block())
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) / 4) if positions else None
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x) if self.positions is None else self.table(x) + self.positions
        return self.head(self.blocks(x)).transpose(1, 2)


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.first = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.block, self.head = Block(Attention(False), _mlp(), nn.LayerNorm), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.block(torch.cat([self.first.expand(len(x), -1, -1), patches], 1))[:, 0])


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        return self.head(F.relu(x + self.norm2(self.conv2(x))).mean((2, 3)))


def _tokens() -> tuple[torch.Tensor, ...]:
    return torch.randint(CLASSES, (ROWS, LENGTH)), torch.randint(CLASSES, (ROWS, LENGTH))


def _images() -> tuple[torch.Tensor, ...]:
    return torch.randn(ROWS, 3, 8, 8), torch.randint(CLASSES, (ROWS,))


def _rows() -> tuple[torch.Tensor, ...]:
    return torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "MLP": (lambda: nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, CLASSES)), _rows),
    "GPT": (lambda: Tokens(lambda: Block(Attention(True), _mlp(), nn.LayerNorm), True), _tokens),
    "LLaMA": (lambda: Tokens(lambda: Block(Attention(True, True), Gated(), nn.RMSNorm), False), _tokens),
    "BERT": (lambda: Tokens(lambda: Block(Attention(False), _mlp(), nn.LayerNorm), True), _tokens),
    "ViT": (ViT, _images),
    "ResNet": (ResNet, _images),
    "MoE": (lambda: Tokens(lambda: Block(Attention(True), Experts(), nn.LayerNorm), True), _tokens),
}


def differences(name: str, meshes: list[str], steps: int = 50) -> Iterator[tuple[str, float, float]]:
    """Per mesh the largest difference of a loss from torch's, and of a parameter in the end."""
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model, given = make(), batch()
    theirs = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    expected = []
    for _ in range(steps):
        optimizer.zero_grad()
        expected.append(F.cross_entropy(theirs(given[0]), given[1]))
        expected[-1].backward()
        optimizer.step()
    for title in meshes:
        mesh, zero = MESHES[title]
        step = mt.training_step(model, F.cross_entropy, given, optimizer="adamw", lr=1e-3, zero=zero, check=False)
        run = mt.distribute_module(step, mesh, _layouts(step, mesh))
        losses = [abs(float(run(*given)) - float(loss.detach())) for loss in expected]
        state = run.state_dict()
        off = (float((state[n] - p.detach()).abs().max()) for n, p in theirs.named_parameters())
        yield title, max(losses), max(off)


def _layouts(step: Any, mesh: dict[str, int]) -> dict[str, Any]:
    """The batch over "data"; over "model" Megatron's pairs, or experts, or output channels."""
    parts = [strategies.data_parallel(step)] if "data" in mesh else []
    if "model" in mesh:
        try:
            parts.append(strategies.tensor_parallel(step))
        except mt.MeshTensorError:
            names = [n for n, ours in step.names.items() if ours in step.state and step.state[ours].ndim > 2]
            parts.append({n: {"model": 0} for n in names if not n.startswith("opt.")})
    return strategies.combine(*parts) if len(parts) > 1 else dict(*parts)


def main() -> int:
    """A line each; 1 if one differs by more than it may."""
    wrong = 0
    for name in sys.argv[1:] or MODELS:
        for title, loss, parameter in differences(name, list(MESHES)):
            fine = loss <= LOSS and parameter <= PARAMETERS
            wrong += not fine
            print(
                f"{name:7} {title:16} loss {loss:.1e} parameters {parameter:.1e}{'' if fine else ' WRONG'}", flush=True
            )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
