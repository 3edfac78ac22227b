"""A LLaMA that keeps its keys and values between calls, in the form that `mesh_tensor.generate` takes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from kernels.models import Shardings
from kernels.models.llama import Attention, Config, Llama, rotate_half, tensor_parallel


class Decoder(nn.Module):
    """`model` with a cache of config.positions columns for each of config.batch rows: `keys_0`, `values_0`, ...,
    (batch, key heads, positions, head size)."""

    def __init__(self, model: Llama, config: Config) -> None:
        super().__init__()
        self.model = model
        shape = (config.batch, config.key_heads, config.positions, config.head_size)
        for number in range(config.layers):
            self.register_buffer(f"keys_{number}", torch.zeros(shape))
            self.register_buffer(f"values_{number}", torch.zeros(shape))

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, start: torch.Tensor
    ) -> torch.Tensor:
        """(batch, n) ids, which go to the columns from `start` on -> (batch, vocabulary) logits after the last.
        `mask` (batch, config.positions): the columns with tokens; `positions` (batch, n): those of the ids."""
        columns = start + torch.arange(ids.shape[1])
        seen = torch.arange(mask.shape[1]) <= columns[:, None]
        seen = seen & mask[:, None, None, :].bool()
        rotation = [table[positions][:, None] for table in (self.model.cos, self.model.sin)]
        x = self.model.embed(ids)
        for number, layer in enumerate(self.model.layers):
            x = x + self._attention(layer.attn, number, layer.input_norm(x), columns, seen, rotation)
            x = x + layer.mlp(layer.mlp_norm(x))
        return self.model.head(self.model.norm(x[:, -1]))

    def _attention(
        self,
        layer: Attention,
        number: int,
        x: torch.Tensor,
        columns: torch.Tensor,
        seen: torch.Tensor,
        rotation: list[torch.Tensor],
    ) -> torch.Tensor:
        q, k, v = (
            proj(x).view(*x.shape[:2], -1, layer.size).transpose(1, 2)
            for proj in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        cos, sin = rotation
        q, k = (part * cos + rotate_half(part) * sin for part in (q, k))
        keys, values = getattr(self, f"keys_{number}"), getattr(self, f"values_{number}")
        keys.index_copy_(2, columns, k)
        values.index_copy_(2, columns, v)
        y = F.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=True)
        return layer.o_proj(y.transpose(1, 2).flatten(2))


def export(model: Llama, config: Config) -> torch.export.ExportedProgram:
    """The decoder, recorded for any number of ids."""
    size = min(5, config.positions)
    ids = (torch.arange(config.batch * size) % config.vocabulary).view(config.batch, size)
    mask = torch.ones((config.batch, config.positions), dtype=torch.long)
    some = {1: torch.export.Dim.DYNAMIC}
    inputs = (ids, mask, torch.arange(size).expand(config.batch, -1), torch.tensor(0))
    with torch.no_grad():
        return torch.export.export(Decoder(model, config).eval(), inputs, dynamic_shapes=(some, None, some, None))


def layout(config: Config, axis: str, *, vocabulary: bool = False) -> Shardings:
    """`tensor_parallel` of the model; keys and values are split by heads."""
    weights = tensor_parallel(config, axis, vocabulary=vocabulary)
    cache = {f"{what}_{number}": {axis: 1} for number in range(config.layers) for what in ("keys", "values")}
    return {**{f"model.{name}": sharding for name, sharding in weights.items()}, **cache}
