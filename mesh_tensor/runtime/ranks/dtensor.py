"""DTensors: their placements and ours, both ways, and MeshTensors as DTensors.

torch's DTensor module takes most of a second to import, so it is imported where the first DTensor is made; until then
nothing can be one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist

from mesh_tensor.base.blocks import ceildiv
from mesh_tensor.base.errors import MeshTensorError, listing, refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.placement import of_torch
from mesh_tensor.base.reductions import PARTIAL_OPS
from mesh_tensor.base.sharding import Placement, Replicate, Shard, Sharding
from mesh_tensor.runtime.ambient import undisturbed, why_not_plain
from mesh_tensor.runtime.placement import layout_of
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor, of_tiles

from .carriers import MOVED
from .device_meshes import named
from .faults import Faults, agree, digest_of
from .plan import Changes
from .ranks import Ranks, ranks_of
from .tiling import Tiling

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_SAME_SIZE = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}  # that every backend moves


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor."""
    if type(value) is torch.Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


@lru_cache(maxsize=1024)
def to_placements(sharding: Sharding) -> tuple[Any, ...]:
    """The placements of a DTensor that lies as `sharding` says, one per mesh axis."""
    if not sharding.is_in_mesh_order:
        refuse(
            f"a DTensor has no placements for '{sharding}'",
            why="in public placements of torch, axes split a dim in the mesh's order",
            fix=f"ask for another layout, such as '{major_only(sharding)}', or use a mesh with its axes in that order",
        )
    return tuple(map(_torch_placement, sharding.placements().values()))


def from_placements(mesh: Mesh | Mapping[str, int], ndim: int, placements: Sequence[Any]) -> Sharding:
    """The Sharding of a DTensor of `ndim` dims with these torch placements, one per axis of `mesh`."""
    return _sharding_of(Mesh(mesh), ndim, tuple(placements))


@lru_cache(maxsize=1024)
def _sharding_of(mesh: Mesh, ndim: int, placements: tuple[Any, ...]) -> Sharding:
    if len(placements) != len(mesh):
        refuse(f"{len(placements)} placements for {len(mesh)} axes", where=str(mesh), fix="give one placement per axis")
    ours = {axis: _our_placement(axis, p) for axis, p in zip(mesh, placements, strict=True)}
    return Sharding.of(mesh, ndim, ours)


def lies_like_torch(sharding: Sharding, shape: Sequence[int]) -> bool:
    """Whether a DTensor with the same placements has the same parts on all devices. Torch splits what the device has
    over the next axis, we split the tile: that differs where several axes split a dim that they don't divide. Another
    order of axes than the mesh's it has no public placements for."""
    if not sharding.is_in_mesh_order:
        return False
    for dim, axes in enumerate(sharding.dims):
        if len(axes) > 1 and shape[dim] % sharding.num_shards(dim):
            sizes = [sharding.mesh.size(axis) for axis in axes]
            if not _nested_alike(shape[dim], shape[dim], sizes):
                return False
    return True


def major_only(sharding: Sharding) -> Sharding:
    """The same, but every dim is split by the first of its axes only: a layout in which torch and we agree."""
    placements: dict[str, Placement] = dict(sharding.placements())
    placements |= {axis: Replicate() for axes in sharding.dims for axis in axes[1:]}
    return Sharding.of(sharding.mesh, sharding.ndim, placements)


def agreed(sharding: Sharding, shape: Sequence[int]) -> Sharding:
    """The layout; or, where torch and we split dims differently in it, one like it in which we don't."""
    return sharding if lies_like_torch(sharding, shape) else major_only(sharding)


def as_agreed(tensor: DTensor, sharding: Sharding, ranks: Ranks) -> tuple[DTensor, Sharding]:
    """The DTensor that lies as `sharding`, and how it lies, where its parts are those that we split it into."""
    ours = agreed(sharding, tensor.shape)
    return (tensor if ours == sharding else moved_by_torch(tensor, ours, ranks)), ours


def moved_by_torch(tensor: DTensor, sharding: Sharding, ranks: Ranks) -> DTensor:
    """The DTensor as `sharding` says, where torch has to cut or gather it, because we would split it otherwise.
    Nothing is reduced by that: what the process group has no dtype for is moved as another of its size. The collectives
    are torch's, so ranks make sure before that they all come to them."""
    ranks.meet_here()
    placements, dtype = to_placements(sharding), tensor.dtype
    check_order(tensor, placements, axes_out_of_order(tensor.device_mesh))
    if dtype in MOVED or dtype.itemsize not in _SAME_SIZE:
        return tensor.redistribute(placements=placements)
    moved = _seen_as(tensor, _SAME_SIZE[dtype.itemsize]).redistribute(placements=placements)
    return _seen_as(moved, dtype)


def axes_out_of_order(device_mesh: DeviceMesh) -> tuple[int, ...]:
    """The axes along which ranks do not ascend. Torch's groups have ranks in order: what torch gathers there is not."""
    places = device_mesh.mesh
    return tuple(axis for axis in range(places.ndim) if bool((places.diff(dim=axis) < 0).any()))


def check_order(tensor: DTensor, placements: Sequence[Any], out_of_order: Sequence[int]) -> None:
    """Raise a MeshTensorError if torch would get it wrong to redistribute the DTensor so."""
    pairs = enumerate(zip(tensor.placements, placements, strict=True))
    axes = [axis for axis, (old, new) in pairs if axis in out_of_order and old != new and not old.is_replicate()]
    if axes:
        refuse(
            f"a DTensor as {tuple(tensor.placements)} can't be brought to {tuple(placements)} by torch",
            where=named(tensor.device_mesh),
            why=f"torch gathers in the order of ranks, and axis {axes[0]} of the DeviceMesh has them in another",
            fix="use a DeviceMesh whose ranks ascend along every axis, or redistribute with mt.redistribute before",
        )


def _seen_as(tensor: DTensor, dtype: torch.dtype) -> DTensor:
    from torch.distributed.tensor import DTensor

    local = local_part(tensor).view(dtype)
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tensor.shape
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=tensor.stride())


def local_part(tensor: DTensor) -> torch.Tensor:
    """This rank's part of a DTensor, as a plain tensor on the same memory."""
    local = tensor.to_local()
    wait = getattr(local, "wait", None)  # a collective of torch's may still be under way
    return local.detach() if wait is None else wait()


def with_local_part(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """The same with another part on this rank, which lies as that of `tensor`."""
    from torch.distributed.tensor import DTensor

    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def part_problem(tensor: DTensor, sharding: Sharding, rank: int) -> str:
    """What is wrong with a rank's part of a DTensor that lies as `sharding`, if there is something: it is not as large
    as torch cuts it. DTensor.from_local takes parts of any size."""
    at, expected = sharding.mesh.coordinate(rank), list(tensor.shape)
    for dim, axes in enumerate(sharding.dims):
        for axis in axes:
            chunk = ceildiv(expected[dim], sharding.mesh.size(axis))
            expected[dim] = max(0, min(chunk, expected[dim] - at[axis] * chunk))
    with torch.no_grad():
        found = tensor.to_local().shape
    if found == torch.Size(expected) or (found.numel() == 0 and 0 in expected):
        return ""
    return f"this rank's part is {tuple(found)}, but expected {tuple(expected)}, of {tuple(tensor.shape)} '{sharding}'"


PART_FIX = "make the DTensor from parts as torch.chunk cuts them, or with distribute_tensor"


def as_dtensor(local: torch.Tensor, device_mesh: DeviceMesh, sharding: Sharding, shape: Sequence[int]) -> DTensor:
    """The DTensor of global `shape` whose part on this rank is `local`."""
    return dtensor_maker(device_mesh, sharding, shape)(local)


def dtensor_maker(
    device_mesh: DeviceMesh, sharding: Sharding, shape: Sequence[int]
) -> Callable[[torch.Tensor], DTensor]:
    """From this rank's part to the DTensor of global `shape`; torch.compile can trace it."""
    from torch.distributed.tensor import DTensor

    placements, size = to_placements(sharding), torch.Size(shape)
    stride = tuple(math.prod(max(extent, 1) for extent in size[dim + 1 :]) for dim in range(len(size)))

    def make(local: torch.Tensor) -> DTensor:
        whole = local.contiguous()
        return DTensor.from_local(whole, device_mesh, placements, run_check=False, shape=size, stride=stride)

    return make


def laid_dtensor(local: torch.Tensor, tiling: Tiling, layout: Sharding, ranks: Ranks, changes: Changes) -> DTensor:
    """The DTensor that lies as `layout`, of this rank's part of what lies as `tiling`. All ranks have to ask."""
    ours = agreed(layout, tiling.shape)
    made = as_dtensor(changes.part(tiling, ours, local), ranks.device_mesh, ours, tiling.shape)
    return made if ours == layout else moved_by_torch(made, layout, ranks)


def gradient_like(gradient: Any, placements: Sequence[Any] | None) -> Any:
    """The gradient of a DTensor that lies as `placements`, lying so, but whole where that is partial; what is none of
    a DTensor stays as it is."""
    if gradient is None or placements is None:
        return gradient
    from torch.distributed import tensor

    whole = [tensor.Replicate() if p.is_partial() else p for p in placements]
    return gradient.redistribute(placements=whole)


@undisturbed
def to_dtensor(tensor: MeshTensor, device_mesh: DeviceMesh | None = None) -> DTensor:
    """The MeshTensor, which every rank has as a whole, as a DTensor: each rank keeps its own tile. Nothing is sent.

    Without `device_mesh`, the devices of the tensor's mesh are all ranks there are, in their order."""
    sharding = tensor.sharding
    if not lies_like_torch(sharding, tensor.shape):
        axes = [axes for axes in sharding.dims if len(axes) > 1]
        refuse(
            f"a DTensor has no placements for {tensor}",
            why=f"{listing(axes[0])} split a dim of a size that they don't divide, or not in mesh order; "
            "torch splits it differently",
            fix=f"redistribute it first, for example to '{major_only(sharding)}'",
        )
    ranks = ranks_of(tensor.mesh, device_mesh, tensor.device.type)
    return as_dtensor(tensor.tile(ranks.rank).clone(), ranks.device_mesh, sharding, tensor.shape)


@undisturbed
def from_dtensor(tensor: DTensor, mesh: Mesh | Mapping[str, int] | None = None) -> MeshTensor:
    """The DTensor as a MeshTensor: every rank gets the parts of all ranks. The axes are the DeviceMesh's, or
    `mesh`'s."""
    if not is_dtensor(tensor):
        refuse(f"from_dtensor takes a DTensor, not {type(tensor).__name__}", fix="use mt.distribute for a plain tensor")
    ranks = ranks_of(
        mesh_of(tensor.device_mesh) if mesh is None else Mesh(mesh), tensor.device_mesh, tensor.device.type
    )
    faults, facts = Faults(ranks, "mt.from_dtensor"), {"kernel": "mt.from_dtensor"}
    with ranks.calls.lane() as lane:
        try:
            if found := why_not_plain(tensor):
                refuse(found[0], where=f"mt.from_dtensor on {ranks.mesh}", fix=found[1])
            sharding = from_placements(ranks.mesh, tensor.ndim, tensor.placements)
            if problem := part_problem(tensor, sharding, ranks.rank):
                refuse(problem, where=str(ranks.mesh), fix=PART_FIX)
        except MeshTensorError as error:
            agree(ranks, faults, facts, refusal=str(error))
            raise
        facts |= {"tensors": f"{tuple(tensor.shape)} {tensor.dtype}, '{sharding}'"}
        agree(ranks, faults, facts)
        lane.run(digest_of(facts))
        tensor, sharding = as_agreed(tensor, sharding, ranks)
        layout = layout_of(tuple(tensor.shape), tensor.dtype, sharding)
        mine = torch.zeros(layout.tile_shape, dtype=tensor.dtype, device=tensor.device)
        local = local_part(tensor)
        mine[tuple(slice(0, size) for size in local.shape)] = local
        try:
            return of_tiles(_gathered(mine, ranks), layout)
        except RuntimeError as error:
            faults.blame(error, "gathering a tensor", range(ranks.mesh.num_devices))


@lru_cache(maxsize=64)
def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """The Mesh with the axes of a DeviceMesh; `axis0`, `axis1` ... where they have no names."""
    sizes = tuple(device_mesh.mesh.shape)
    names = device_mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(len(sizes)))
    return Mesh(dict(zip(names, sizes, strict=True)))


def _gathered(mine: torch.Tensor, ranks: Ranks) -> list[torch.Tensor]:
    group = ranks.everybody()
    if group.tagged:
        return [tile.clone() for tile in ranks.calls.gather_tensors(mine)]
    ranks.calls.meet()
    count = len(group.members)
    sent = mine.view(-1).view(torch.uint8).repeat(count)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.process_group)
    tiles = received.view(count, -1)
    by_rank = {member: tiles[place].view(mine.dtype).view(mine.shape) for place, member in enumerate(group.members)}
    return [by_rank[rank].clone() for rank in range(count)]


def _nested_alike(ours: int, theirs: int, sizes: Sequence[int]) -> bool:
    """Whether splitting over these axes leaves every device with as much either way: `ours` is the tile to split,
    `theirs` what of it is there."""
    if not sizes:
        return True
    tile, chunk = ceildiv(ours, sizes[0]), ceildiv(theirs, sizes[0])
    parts = [
        (max(0, min(tile, theirs - place * tile)), max(0, min(chunk, theirs - place * chunk)))
        for place in range(sizes[0])
    ]
    return all(mine == torchs for mine, torchs in parts) and all(
        _nested_alike(tile, valid, sizes[1:]) for valid, _ in parts
    )


def _torch_placement(placement: Placement) -> Any:
    from torch.distributed import tensor

    if isinstance(placement, Shard):
        return tensor.Shard(placement.dim)
    return tensor.Replicate() if isinstance(placement, Replicate) else tensor.Partial(PARTIAL_OPS[placement.op])


def _our_placement(axis: str, placement: Any) -> Placement:
    found = of_torch(placement)
    if found is None:
        ops = listing(tuple(PARTIAL_OPS.values()))
        refuse(
            f"placement {placement} of axis {axis!r} has no counterpart",
            fix=f"redistribute the DTensor to Shard, Replicate, or Partial with one of {ops}",
        )
    return found
