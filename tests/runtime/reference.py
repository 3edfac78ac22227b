"""An independent account of layouts: what each device must hold of a tensor, by slicing axis after axis."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from mesh_tensor import Mesh, Partial, Replicate, Shard, Sharding
from mesh_tensor.base.window import Window
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor

FOLDS = {
    "sum": lambda a, b: a + b,
    "prod": lambda a, b: a * b,
    "max": torch.maximum,
    "min": torch.minimum,
    "bitand": lambda a, b: a & b,
    "bitor": lambda a, b: a | b,
    "bitxor": lambda a, b: a ^ b,
}


def cut(tensor: torch.Tensor, sharding: Sharding, rank: int) -> torch.Tensor:
    """The part of `tensor` that device `rank` holds: every axis, in mesh order, cuts what the axes before it left."""
    at = sharding.mesh.coordinate(rank)
    parents = dict(enumerate(tensor.shape))
    for axis, place in sharding.placements().items():
        if isinstance(place, Shard):
            step = -(-parents[place.dim] // sharding.mesh.size(axis))
            start = min(at[axis] * step, tensor.shape[place.dim])
            tensor = tensor.narrow(place.dim, start, min(step, tensor.shape[place.dim] - start))
            parents[place.dim] = step
    return tensor


def scatter(tensor: torch.Tensor, sharding: Sharding) -> tuple[MeshTensor, torch.Tensor]:
    """A MeshTensor with padding that must not matter, and its global value. Where an axis is partial, every device
    along it gets numbers of its own, so the value is not `tensor` but what the op makes of them."""
    mesh, axes = sharding.mesh, [axis for axis, _ in sharding.partial]
    layers = {}
    for rank in range(mesh.num_devices):
        at = mesh.coordinate(rank)
        key = tuple(at[axis] for axis in axes)
        layers.setdefault(key, tensor if not any(key) else tensor.roll(sum(key) * 3, 0) if tensor.ndim else tensor)
    total = None
    for key in sorted(layers):
        total = layers[key] if total is None else FOLDS[sharding.partial[0][1]](total, layers[key])
    assert total is not None
    tiles = []
    for rank in range(mesh.num_devices):
        at = mesh.coordinate(rank)
        part = cut(layers[tuple(at[axis] for axis in axes)], sharding, rank)
        tile = garbage(sharding.tile_shape(tuple(tensor.shape)), tensor.dtype)
        tile[tuple(slice(0, size) for size in part.shape)] = part
        tiles.append(tile)
    return MeshTensor(tiles, tensor.shape, sharding), total


def garbage(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What padding may hold."""
    return torch.full(shape, float("nan")).to(dtype) if dtype.is_floating_point else torch.full(shape, 113, dtype=dtype)


def assert_holds(result: MeshTensor, expected: torch.Tensor) -> None:
    """Every device holds its part of `expected`; where an axis is partial, the devices together do."""
    sharding = result.sharding
    partial = [axis for axis, _ in sharding.partial]
    for rank in range(result.mesh.num_devices):
        part = cut(expected, sharding, rank)
        tile = result.tile(rank)
        assert tile.shape == part.shape, f"device {rank} of {sharding}"
        if not partial:
            assert torch.equal(tile, part), f"device {rank} of {sharding}"
    assert torch.equal(result.full(), expected), str(sharding)


def shardings(mesh: Mesh, ndim: int, op: str | None = "sum") -> Iterator[Sharding]:
    """Every layout of a tensor of `ndim` dims on `mesh`."""
    choices = [Replicate(), *(Shard(dim) for dim in range(ndim)), *([Partial(op)] if op else [])]
    for places in itertools.product(choices, repeat=len(mesh)):
        yield Sharding.of(mesh, ndim, dict(zip(mesh, places, strict=True)))


def layouts(mesh: Mesh, ndim: int) -> list[Sharding]:
    """Every layout of a tensor of `ndim` dims on `mesh`, with sums, and a few with maxima."""
    plain = list(shardings(mesh, ndim))
    maxima = [s for s in shardings(mesh, ndim, "max") if s.partial]
    return plain + maxima[:: max(1, len(maxima) // 3)]


def windowed(mesh: Mesh, shape: tuple[int, int]) -> Iterator[Sharding]:
    """Layouts of a matrix with windows of its rows, its columns or both: narrower and wider than tiles, at either side,
    steps of 2, around the end."""
    for layout in shardings(mesh, 2):
        split = [dim for dim, axes in enumerate(layout.dims) if axes]
        for first, more, stride, wraps in ((-1, 2, 1, False), (-4, 9, 1, True), (3, 1, 2, False)):
            tiles = layout.tile_shape(shape)
            windows = [(d, Window(shape[d], stride, first, stride * tiles[d] + more, wraps)) for d in split]
            if windows and not layout.partial:
                yield layout.with_windows(windows)


def elements_of(tensor: torch.Tensor, layout: Sharding, rank: int) -> torch.Tensor:
    """What the device has in windows of a matrix, element by element."""
    starts, lengths = layout.tile_offset(tensor.shape, rank), layout.tile_shape(tensor.shape)
    rows, columns = (
        [_source(start + i, size, layout.window(dim)) for i in range(length)]
        for dim, (start, length, size) in enumerate(zip(starts, lengths, tensor.shape, strict=True))
    )
    return torch.tensor([[0 if r is None or c is None else tensor[r, c] for c in columns] for r in rows])


def _source(at: int, size: int, window: Window | None) -> int | None:
    if window is not None and window.wraps:
        return at % size
    return at if 0 <= at < size else None
