"""Between a global tensor and its tiles in this process: `Layout.spread` cuts, `Layout.collect` puts together.

Nothing is copied that need not be: a tile whose elements lie together in the global tensor can be a view into it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from mesh_tensor.base.dtypes import ALIGNMENT, poison_value
from mesh_tensor.base.reductions import neutral
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.targets.dtypes import dtype_name
from mesh_tensor.targets.tile_memory import LARGE, empty_tile

from .elementwise import combiner, copy, fill
from .reshard import Tiles


@dataclass(frozen=True)
class _Tile:
    """One device's tile: `box` of the global tensor is its part `valid`; `owner` is the first device with that part,
    `holder` the first that contributes the same to it, where the tensor is partial.

    `start` is the element of the global tensor where the tile lies as a whole and in one piece, if it does."""

    box: tuple[slice, ...]
    valid: tuple[slice, ...]
    full: bool
    start: int | None
    owner: int
    holder: int
    blank: bool


class Layout:
    """How a global tensor of `shape` and `dtype` lies on the devices of a virtual mesh under `sharding`."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, sharding: Sharding) -> None:
        self.shape, self.dtype, self.sharding = tuple(shape), dtype, sharding
        self.tile_shape: tuple[int, ...] = sharding.tile_shape(self.shape)
        self.tile_bytes = math.prod(self.tile_shape) * self.dtype.itemsize
        self._strides = _strides(self.tile_shape)
        self._op = sharding.partial[0][1] if sharding.partial else None
        self._tiles = self._describe()
        self._owners = sorted({tile.owner for tile in self._tiles})
        self._is_one = sharding.mesh.num_devices == 1
        in_one = all(tile.start is not None and not tile.blank for tile in self._tiles)
        self._side_by_side = in_one and self.tile_shape != self.shape and self.tile_bytes >= LARGE
        self._contributors = self._partials() if self._op else {}

    def _describe(self) -> list[_Tile]:
        first: dict[tuple, int] = {}
        strides, tiles = _strides(self.shape), []
        partial = [axis for axis, _ in self.sharding.partial]
        for rank, (offset, extent) in enumerate(self.sharding.tiles(self.shape)):
            full = extent == self.tile_shape
            start = sum(o * s for o, s in zip(offset, strides, strict=True))
            lies = full and _contiguous(extent, self.shape) and start * self.dtype.itemsize % ALIGNMENT == 0
            owner, at = first.setdefault((offset, extent), rank), self.sharding.mesh.coordinate(rank)
            part = [at[axis] for axis in partial]
            tiles.append(
                _Tile(
                    box=tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True)) if all(extent) else (),
                    valid=tuple(slice(0, e) for e in extent),
                    full=full,
                    start=start if lies else None,
                    owner=owner,
                    holder=first.setdefault((offset, extent, *part), rank),
                    blank=any(part),
                )
            )
        return tiles

    def _partials(self) -> dict[int, tuple[int, ...]]:
        axes = [axis for axis, _ in self.sharding.partial]
        return {rank: self.sharding.mesh.group_of(rank, axes) for rank in self._owners}

    def allocate(self, device: torch.device, poison: bool = False) -> Tiles:
        """A tile of its own for every device, uninitialised (poisoned, if so)."""
        return [self.new(device, poison) for _ in self._tiles]

    def new(self, device: torch.device, poison: bool) -> torch.Tensor:
        """A tile, uninitialised (poisoned, if so)."""
        new = empty_tile(self.tile_shape, self.dtype, device)
        return fill(new, poison_value(dtype_name(self.dtype))) if poison else new

    def spread(self, tensor: torch.Tensor, *, borrow: bool = False, share: bool = False, poison: bool = False) -> Tiles:
        """The devices' tiles of `tensor`, padded with zeros (or poison). With `borrow`, a tile may be a view into
        `tensor`: each part once, or as often as needed with `share`. With `share`, devices that hold the same have one
        memory. Large ones lie as in the tensor, if they can: what neighbours exchange is then in its place."""
        if self._side_by_side and share and not borrow:
            return self._copied(tensor)
        borrow = borrow and tensor.data_ptr() % ALIGNMENT == 0
        if borrow and self._is_one:
            return [tensor]
        made: dict[int, torch.Tensor] = {}
        tiles = []
        for tile in self._tiles:
            if not share or tile.holder not in made:
                view = self._view(tensor, tile) if borrow and tile.holder not in made else None
                made[tile.holder] = self._cut(tensor, tile, poison) if view is None else view
            tiles.append(made[tile.holder])
        return tiles

    def spread_blank(self, tensor: torch.Tensor, poison: bool = False) -> Tiles:
        """Tiles for a result that is to end up in `tensor`: views into it where possible; contents uninitialised."""
        borrow = tensor.data_ptr() % ALIGNMENT == 0
        if borrow and self._is_one and not poison:
            return [tensor]
        tiles = []
        for rank, tile in enumerate(self._tiles):
            view = self._view(tensor, tile) if borrow and tile.owner == rank else None
            if view is not None and poison:
                fill(view, poison_value(dtype_name(self.dtype)))
            tiles.append(self.new(tensor.device, poison) if view is None else view)
        return tiles

    def collect(self, tiles: Tiles, out: torch.Tensor) -> None:
        """Write into `out` the global tensor that `tiles` are; views into `out` are there already."""
        if self._is_one and tiles[0] is out:
            return
        for rank in self._owners:
            tile = self._tiles[rank]
            if self.shape and not tile.box:
                continue
            target = out[tile.box] if self.shape else out
            is_there = tile.start is not None and tiles[rank].data_ptr() == target.data_ptr()
            if self._op:
                parts = [tiles[other][tile.valid] for other in self._contributors[rank]]
                # Of dims of size 1 the two may have other strides; torch takes that for a partial overlap.
                combiner(self._op, self.dtype)(parts[0] if is_there else target, parts)
            elif not is_there:
                copy(target, tiles[rank][tile.valid])

    def valid_part(self, tiles: Tiles, rank: int) -> torch.Tensor:
        """The part of the tile of `rank` that holds elements of the tensor, as a view."""
        tile = self._tiles[rank]
        return tiles[rank] if tile.full else tiles[rank][tile.valid]

    def parts(self, tiles: Tiles) -> list[torch.Tensor]:
        """The valid parts that together are the tensor, each once, as views."""
        return [self.valid_part(tiles, rank) for rank in self._owners]

    def owner(self, rank: int) -> int:
        """The first device that holds the same part of the tensor as `rank`."""
        return self._tiles[rank].owner

    def holder(self, rank: int) -> int:
        """The first device that holds the same as `rank`: of a partial tensor the same contributions."""
        return self._tiles[rank].holder

    def poisoned(self, tile: torch.Tensor, rank: int) -> torch.Tensor:
        """The tile of `rank` with poison for its padding. It lies in memory as before, where elements have memory of
        their own: torch's products of matrices and sums may differ in the last bit by that."""
        if self._tiles[rank].full:
            return tile
        new, valid = self.new(tile.device, poison=True), self._tiles[rank].valid
        if not tile.is_contiguous() and _is_apart(tile):
            new = torch.empty_strided(tile.shape, tile.stride(), dtype=tile.dtype, device=tile.device).copy_(new)
        copy(new[valid], tile[valid])
        return new

    def _view(self, tensor: torch.Tensor, tile: _Tile) -> torch.Tensor | None:
        if tile.start is None or tile.blank:
            return None
        if self.tile_shape == self.shape:
            return tensor
        return tensor.as_strided(self.tile_shape, self._strides, tensor.storage_offset() + tile.start)

    def _copied(self, tensor: torch.Tensor) -> Tiles:
        """The devices' tiles in one copy of `tensor`; torch takes them for tensors that have nothing in common."""
        memory = empty_tile(self.shape, self.dtype, tensor.device)
        copy(memory, tensor)
        made = {
            tile.owner: torch.empty(0, dtype=self.dtype, device=tensor.device).set_(
                memory.untyped_storage(), tile.start, self.tile_shape, self._strides
            )
            for tile in self._tiles
            if tile.start is not None
        }
        return [made[tile.owner] for tile in self._tiles]

    def _cut(self, tensor: torch.Tensor, tile: _Tile, poison: bool) -> torch.Tensor:
        new = empty_tile(self.tile_shape, self.dtype, tensor.device)
        if tile.blank:
            return fill(new, neutral(str(self._op), dtype_name(self.dtype)))
        if not tile.full:
            fill(new, poison_value(dtype_name(self.dtype)) if poison else 0)
        if all(self.shape) and (tile.box or not self.shape):
            copy(new[tile.valid], tensor[tile.box])
        return new


@lru_cache(maxsize=256)
def layout_of(shape: tuple[int, ...], dtype: torch.dtype, sharding: Sharding) -> Layout:
    """The Layout of these, described once."""
    return Layout(shape, dtype, sharding)


def _is_apart(tensor: torch.Tensor) -> bool:
    """Whether no two of its elements have the same memory, as those of windows, and what is expanded, do."""
    span = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= span:
            return False
        span += stride * (size - 1) if size > 1 else 0
    return True


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _contiguous(extent: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """A box of `extent` in a tensor of `shape` lies in one piece: full after its first dim that is longer than 1."""
    split = next((dim for dim, size in enumerate(extent) if size != 1), len(extent))
    return all(a == b for a, b in zip(extent[split + 1 :], shape[split + 1 :], strict=True))
