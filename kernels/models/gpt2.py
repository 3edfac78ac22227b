"""A GPT-2-like language model: learned positions, pre-norm blocks of causal attention and a gelu MLP, residual sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from kernels.models import Shardings


@dataclass(frozen=True)
class Config:
    """Sizes. `fused`: one linear layer makes queries, keys and values, as in GPT-2."""

    vocabulary: int = 48
    width: int = 32
    heads: int = 4
    layers: int = 2
    batch: int = 4
    positions: int = 8
    fused: bool = False


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        if config.fused:
            self.qkv = nn.Linear(config.width, 3 * config.width)
        else:
            self.q = nn.Linear(config.width, config.width)
            self.k = nn.Linear(config.width, config.width)
            self.v = nn.Linear(config.width, config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, positions, width) -> the same."""
        batch, positions, _ = x.shape
        if hasattr(self, "qkv"):
            q, k, v = self.qkv(x).view(batch, positions, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            layers = (self.q, self.k, self.v)
            q, k, v = (layer(x).view(batch, positions, self.heads, -1).transpose(1, 2) for layer in layers)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, positions, -1))


class Block(nn.Module):
    """Attention and MLP, each on the normed residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln2 = nn.LayerNorm(config.width)
        self.fc = nn.Linear(config.width, 4 * config.width)
        self.proj = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, positions, width) -> the same."""
        x = x + self.attn(self.ln1(x))
        return x + self.proj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Token ids to logits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.wpe = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, positions) ids -> (batch, positions, vocabulary) logits."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(config: Config = Config()) -> GPT2:
    """The model with random weights."""
    return GPT2(config).eval()


def example_inputs(config: Config = Config()) -> tuple[torch.Tensor]:
    """Token ids."""
    return (torch.randint(config.vocabulary, (config.batch, config.positions)),)


def data_parallel(axis: str) -> Shardings:
    """The batch is split."""
    return {"tokens": {axis: 0}}


def tensor_parallel(config: Config, axis: str, *, vocabulary: bool = False) -> Shardings:
    """Megatron's: heads and hidden features are split, two all-reduces per block. `vocabulary`: the embedding and the
    head are split over the vocabulary, too, and so are the logits."""
    names = ("attn.qkv",) if config.fused else ("attn.q", "attn.k", "attn.v")
    result: Shardings = {}
    for block in (f"blocks.{i}" for i in range(config.layers)):
        for name in (*names, "fc"):
            result |= {f"{block}.{name}.weight": {axis: 0}, f"{block}.{name}.bias": {axis: 0}}
        for name in ("attn.proj", "proj"):
            result |= {f"{block}.{name}.weight": {axis: 1}, f"{block}.{name}.bias": {}}
    return result | ({"wte.weight": {axis: 0}, "head.weight": {axis: 0}} if vocabulary else {})


def sequence_parallel(config: Config, axis: str) -> Shardings:
    """The positions of the residual stream are split between blocks (and so in norms and sums), on top of
    `tensor_parallel` over the same axis: all-reduces become all-gathers and reduce-scatters."""
    return {f"blocks.{i}": {axis: 1} for i in range(config.layers)} | {"norm": {axis: 1}}
