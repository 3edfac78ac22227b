"""A MeshTensor goes from one mesh to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.redistribution.transfer import SMALL, TransferPlan
from mesh_tensor.runtime.ambient import undisturbed
from mesh_tensor.runtime.elementwise import copy
from mesh_tensor.runtime.placement import layout_of

from .mesh_tensor import MeshTensor, ShardingLike, as_sharding, of_tiles


def plan_transfer(
    shape: Sequence[int],
    dtype: torch.dtype,
    src: Sharding,
    mesh: Mesh | Mapping[str, int],
    sharding: ShardingLike,
    *,
    small: int = SMALL,
) -> TransferPlan:
    """How `transfer` brings a tensor of global `shape` and `dtype` from layout `src` to `sharding` on `mesh`; `print`
    shows it. Up to `small` bytes it is sent to all who need it, larger ones cross once."""
    dst = as_sharding(Mesh(mesh), len(shape), sharding)
    return TransferPlan.make(shape, str(dtype).removeprefix("torch."), dtype.itemsize, src, dst, small)


@undisturbed
def transfer(tensor: MeshTensor, mesh: Mesh | Mapping[str, int], sharding: ShardingLike) -> MeshTensor:
    """The tensor in a layout on another mesh: the same bits, in memory of their own.

    >>> from mesh_tensor.runtime.virtual.mesh_tensor import distribute
    >>> there = transfer(distribute(torch.arange(6), {"x": 2}, {"x": 0}), {"y": 3}, {"y": 0})
    >>> there, there.tile(2)
    (MeshTensor((6,), int64, S[0], Mesh({"y": 3})), tensor([4, 5]))
    """
    plan = plan_transfer(tensor.shape, tensor.dtype, tensor.sharding, mesh, sharding)
    return run_transfer(plan, tensor)


def run_transfer(plan: TransferPlan, tensor: MeshTensor) -> MeshTensor:
    """What the plan makes of a tensor that lies as its `src`."""
    layout = layout_of(tensor.shape, tensor.dtype, plan.after.src)
    source, tiles = tensor.redistribute(plan.before.dst), layout.allocate(tensor.device)
    for send in plan.sends:
        copy(tiles[send.target][send.target_region], source.padded_tile(send.source)[send.source_region])
    return of_tiles(tiles, layout).redistribute(plan.dst)
