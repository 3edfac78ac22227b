"""How values lie on a rank: tiles, and their valid parts."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from mesh_tensor.base.dtypes import ALIGNMENT, poison_value
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.program.program import Program, ProgramValue
from mesh_tensor.runtime.elementwise import clone, copy, fill
from mesh_tensor.targets.dtypes import dtype_name, torch_dtype


class Tiling:
    """How a value lies on this rank: the tile that kernels take, and its valid part, which is all that others see."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, sharding: Sharding, rank: int) -> None:
        self.shape, self.dtype, self.sharding = shape, dtype, sharding
        self.tile_shape = torch.Size(sharding.tile_shape(shape))
        self.valid_shape = torch.Size(sharding.valid_extent(shape, rank))
        self.tile_bytes = math.prod(self.tile_shape) * dtype.itemsize
        self._full = self.tile_shape == self.valid_shape
        self._valid = () if self._full else tuple(slice(0, size) for size in self.valid_shape)

    def tile(self, local: torch.Tensor, poison: bool = False) -> torch.Tensor:
        """A padded tile of a local tensor, which is the valid part or a whole tile: itself, where it serves."""
        if local.shape == self.tile_shape:
            return local if self.serves(local) else clone(local)
        new = fill(
            torch.empty(self.tile_shape, dtype=self.dtype, device=local.device),
            poison_value(dtype_name(self.dtype)) if poison else 0,
        )
        if local.numel():
            copy(self.valid(new), local)
        return new

    def serves(self, local: torch.Tensor) -> bool:
        """Whether a kernel can work on this very tensor."""
        return (
            local.shape == self.tile_shape
            and local.is_contiguous()
            and local.data_ptr() % ALIGNMENT == 0
            and not local.is_neg()
        )

    def valid(self, tile: torch.Tensor) -> torch.Tensor:
        """The valid part of a tile, as a view."""
        return tile if self._full else tile[self._valid]


def tilings_of(program: Program, rank: int) -> dict[str, Tiling]:
    """How arguments for a program's parameters lie on a rank."""
    values = program.values
    return {p.name: tiling_of(values[str(p.input or p.output)], rank) for p in program.parameters}


def tiling_of(value: ProgramValue, rank: int) -> Tiling:
    """How a value of a program lies on a rank."""
    return _tiling(value.shape, str(value.dtype), value.sharding, rank)


@lru_cache(maxsize=4096)
def _tiling(shape: tuple[int, ...], dtype: str, sharding: Sharding, rank: int) -> Tiling:
    return Tiling(shape, torch_dtype(dtype), sharding, rank)
