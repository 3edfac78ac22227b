"""A LLaMA-like language model: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from kernels.models import Shardings


@dataclass(frozen=True)
class Config:
    """Sizes. Each of `key_heads` serves heads / key_heads query heads."""

    vocabulary: int = 48
    width: int = 32
    hidden: int = 64
    heads: int = 8
    key_heads: int = 4
    layers: int = 2
    batch: int = 4
    positions: int = 8

    @property
    def head_size(self) -> int:
        """Features per head."""
        return self.width // self.heads


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """The second half of the features, negated, before the first."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and fewer key than query heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = config.heads, config.key_heads, config.head_size
        self.q_proj = nn.Linear(config.width, config.heads * self.size, bias=False)
        self.k_proj = nn.Linear(config.width, config.key_heads * self.size, bias=False)
        self.v_proj = nn.Linear(config.width, config.key_heads * self.size, bias=False)
        self.o_proj = nn.Linear(config.heads * self.size, config.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(batch, positions, width) -> the same; cos and sin are (positions, head size)."""
        batch, positions, _ = x.shape
        q = self.q_proj(x).view(batch, positions, self.heads, self.size).transpose(1, 2)
        k = self.k_proj(x).view(batch, positions, self.key_heads, self.size).transpose(1, 2)
        v = self.v_proj(x).view(batch, positions, self.key_heads, self.size).transpose(1, 2)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).contiguous().view(batch, positions, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., width) -> the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and MLP, each on the normed residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(batch, positions, width) -> the same."""
        x = x + self.attn(self.input_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Token ids to logits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        frequencies = 10000 ** -(torch.arange(0, config.head_size, 2) / config.head_size)
        angles = torch.outer(torch.arange(config.positions), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, positions) ids -> (batch, positions, vocabulary) logits."""
        positions = tokens.shape[1]
        x, cos, sin = self.embed(tokens), self.cos[:positions], self.sin[:positions]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def build(config: Config = Config()) -> Llama:
    """The model with random weights."""
    return Llama(config).eval()


def example_inputs(config: Config = Config()) -> tuple[torch.Tensor]:
    """Token ids."""
    return (torch.randint(config.vocabulary, (config.batch, config.positions)),)


def data_parallel(axis: str) -> Shardings:
    """The batch is split."""
    return {"tokens": {axis: 0}}


def tensor_parallel(config: Config, axis: str, *, vocabulary: bool = False) -> Shardings:
    """Megatron's: heads and hidden features are split, two all-reduces per block. `vocabulary`: the embedding and the
    head are split over the vocabulary, too, and so are the logits."""
    result: Shardings = {}
    for block in (f"layers.{i}" for i in range(config.layers)):
        split_out = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        result |= {f"{block}.{name}.weight": {axis: 0} for name in split_out}
        result |= {f"{block}.{name}.weight": {axis: 1} for name in ("attn.o_proj", "mlp.down_proj")}
    return result | ({"embed.weight": {axis: 0}, "head.weight": {axis: 0}} if vocabulary else {})


def sequence_parallel(config: Config, axis: str) -> Shardings:
    """The positions of the residual stream are split between blocks (and so in norms and sums), on top of
    `tensor_parallel` over the same axis: all-reduces become all-gathers and reduce-scatters."""
    return {f"layers.{i}": {axis: 1} for i in range(config.layers)} | {"norm": {axis: 1}}


def fully_sharded(model: nn.Module, axis: str) -> Shardings:
    """FSDP: the batch is split, and so is every weight, over dim 0; a weight is gathered where it is used."""
    return {"tokens": {axis: 0}} | {name: {axis: 0} for name, _ in model.named_parameters()}
