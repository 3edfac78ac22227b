"""Collectives on MeshTensors: over any subset of axes, uneven tiles included, in a fixed order (bit-identical runs).

Reductions go in order of rank, in the tensor's dtype; float16, bfloat16 and 8-bit floats accumulate in float32 and are
rounded once. Results have memory of their own, except that devices that end with the same tile share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.sharding import Partial, Placement, Replicate, Shard, Sharding
from mesh_tensor.program.steps import CollectiveStep, Value
from mesh_tensor.redistribution.plan import DIRECT_KINDS, direct_move
from mesh_tensor.runtime.elementwise import clone
from mesh_tensor.runtime.placement import layout_of

from .mesh_tensor import MeshTensor, of_tiles

Axes = str | Iterable[str]


def all_reduce(tensor: MeshTensor, axes: Axes) -> MeshTensor:
    """Every device along `axes`, on which `tensor` is partial, gets the reduced tile: partial(op) -> replicated."""
    return _change(tensor, "all_reduce", axes, Partial, Replicate())


def reduce_scatter(tensor: MeshTensor, axes: Axes, dim: int) -> MeshTensor:
    """Every device along `axes` gets its share, along `dim`, of the reduced tile: partial(op) -> shard(dim)."""
    return _change(tensor, "reduce_scatter", axes, Partial, Shard(dim))


def all_gather(tensor: MeshTensor, axes: Axes) -> MeshTensor:
    """Every device along `axes` gets the tiles of all of them: shard(dim) -> replicated."""
    return _change(tensor, "all_gather", axes, Shard, Replicate())


def all_to_all(tensor: MeshTensor, axes: Axes, dim: int) -> MeshTensor:
    """`axes` split `dim` instead of the dims that they split: shard(other dim) -> shard(dim)."""
    return _change(tensor, "all_to_all", axes, Shard, Shard(dim))


def slice_(tensor: MeshTensor, axes: Axes, dim: int) -> MeshTensor:
    """Every device along `axes` keeps its share along `dim`; nothing is sent: replicated -> shard(dim)."""
    return _change(tensor, "slice", axes, Replicate, Shard(dim))


def to_partial(tensor: MeshTensor, axes: Axes, op: str) -> MeshTensor:
    """Coordinate 0 on `axes` keeps the tile, the others take `op`'s neutral element: replicated -> partial(op)."""
    return _change(tensor, "to_partial", axes, Replicate, Partial(op))


def broadcast(tensor: MeshTensor, axes: Axes, root: int | Mapping[str, int] = 0) -> MeshTensor:
    """Every device along `axes` gets the tile of the device at `root`: its place in the group, or its coordinates on
    `axes`. The layout stays; `tensor` must be one that is replicated along `axes` (and perhaps not yet equal)."""
    mesh, wanted = tensor.mesh, _check(tensor, "broadcast", axes, Replicate)
    if isinstance(root, Mapping):
        groups = mesh.groups(wanted)
        here = mesh.coordinate(groups[0][0]) | {axis: root.get(axis, -1) for axis in wanted}
        root = groups[0].index(mesh.rank(here))
    size = len(mesh.groups(wanted)[0])
    if not 0 <= root < size:
        refuse(f"root {root} is not in a group of {size} devices", where=f"broadcast over {listing(wanted)} of {mesh}")
    tiles = list(tensor.tiles())
    for group in mesh.groups(wanted):
        copy = clone(tiles[group[root]])
        for rank in group:
            tiles[rank] = copy
    return of_tiles(tiles, layout_of(tensor.shape, tensor.dtype, tensor.sharding))


def permute(tensor: MeshTensor, axis: str, pairs: Sequence[tuple[int, int]]) -> MeshTensor:
    """For each (source, target) of `pairs`, the device at coordinate `target` on `axis` gets the tile of the one at
    `source`. The layout stays; a device that gets nothing holds zeros. Every device gets at most one tile."""
    mesh, layout = tensor.mesh, layout_of(tensor.shape, tensor.dtype, tensor.sharding)
    size = mesh.size(axis)
    targets = [target for _, target in pairs]
    problems = [f"pair {pair} leaves 0..{size - 1}" for pair in pairs if not all(0 <= place < size for place in pair)]
    problems += [f"target {target} gets several tiles" for target in sorted(set(targets)) if targets.count(target) > 1]
    if problems:
        refuse(problems, where=f"permute over axis {axis!r} of {mesh}", fix="give (source, target) coordinates")
    tiles, source_of = tensor.tiles(), {target: source for source, target in pairs}
    moved = [torch.zeros_like(tile) for tile in tiles]
    for group in mesh.groups(axis):
        for target, source in source_of.items():
            given, taken = tensor.tile(group[source]), layout.valid_part(moved, group[target])
            if given.shape != taken.shape:
                refuse(
                    f"device {group[source]} holds {tuple(given.shape)}, device {group[target]} {tuple(taken.shape)}",
                    where=f"permute of {tensor} over axis {axis!r}",
                    fix="permute tiles of one size, or pad the tensor to a multiple of the axis",
                )
            taken.copy_(given)
    return of_tiles(moved, layout)


def _change(tensor: MeshTensor, kind: str, axes: Axes, before: type[Placement], after: Placement) -> MeshTensor:
    wanted = _check(tensor, kind, axes, before)
    placements = tensor.sharding.placements() | dict.fromkeys(wanted, after)
    return tensor.redistribute(Sharding.of(tensor.mesh, len(tensor.shape), placements))


def _check(tensor: MeshTensor, kind: str, axes: Axes, before: type[Placement]) -> tuple[str, ...]:
    wanted = tensor.mesh.in_order(axes)
    wrong = [axis for axis in wanted if not isinstance(tensor.sharding.placement(axis), before)]
    if wrong:
        refuse(
            [f"axis {axis!r} is {tensor.sharding.placement(axis)}, not {_WORDS[before]}" for axis in wrong],
            where=f"{kind} over {listing(wanted)} of {tensor}",
            fix=f"{kind} takes axes along which the tensor is {_WORDS[before]}",
        )
    return wanted


_WORDS: dict[type, str] = {Partial: "partial", Shard: "sharded", Replicate: "replicated"}

_KINDS: dict[str, Callable[[CollectiveStep], tuple[Placement, ...]]] = {
    "all_reduce": lambda step: (Partial(str(step.op)), Replicate()),
    "reduce_scatter": lambda step: (Partial(str(step.op)), Shard(_dim(step.dst_dim))),
    "all_gather": lambda step: (Shard(_dim(step.src_dim)), Replicate()),
    "all_to_all": lambda step: (Shard(_dim(step.src_dim)), Shard(_dim(step.dst_dim))),
    "slice": lambda step: (Replicate(), Shard(_dim(step.dst_dim))),
    "to_partial": lambda step: (Replicate(), Partial(str(step.op))),
}


def check_step(step: CollectiveStep, src: Value, dst: Value) -> None:
    """A program's collective says what its values' layouts say."""
    if step.kind in DIRECT_KINDS:
        _check_direct(step, src, dst)
        return
    if step.kind not in _KINDS:
        known = listing((*_KINDS, *DIRECT_KINDS))
        refuse(f"unknown collective {step.kind!r}", where=f"{step.src} -> {step.dst}", fix=f"use one of {known}")
    before, after = _KINDS[step.kind](step)
    placements = src.sharding.placements()
    if any(placements[axis] != before for axis in step.axes):
        raise AssertionError(f"{step.kind} over {step.axes} takes {before} of {step.src}, which is {src.sharding}")
    if (expected := placements | dict.fromkeys(step.axes, after)) != dst.sharding.placements():
        raise AssertionError(f"{step.kind} over {step.axes} gives {step.dst} {expected}, but it is {dst.sharding}")


def _check_direct(step: CollectiveStep, src: Value, dst: Value) -> None:
    if src.sharding.partial != dst.sharding.partial:
        raise AssertionError(f"{step.kind} of {step.src} can't change what is partial: {src.sharding}, {dst.sharding}")
    expected = direct_move(src.sharding, dst.sharding)
    if (step.kind, step.axes) != (expected.kind, expected.axes):
        leads = f"{expected.kind} over {expected.axes}"
        raise AssertionError(f"{step.kind} over {step.axes} of {step.src}, but {leads} leads to {dst.sharding}")


def _dim(dim: int | None) -> int:
    return -1 if dim is None else dim
