"""MeshTensor: a tensor that lies on a virtual mesh as tiles; `distribute`, which makes one; `transfer`, which brings
one to another mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.redistribution.plan import RedistributionPlan
from mesh_tensor.redistribution.transfer import SMALL, TransferPlan
from mesh_tensor.runtime.ambient import memory_span, undisturbed, why_not_plain
from mesh_tensor.runtime.elementwise import clone, copy
from mesh_tensor.runtime.placement import Layout, layout_of
from mesh_tensor.runtime.reshard import reshard_of
from mesh_tensor.targets.dtypes import dtype_name

from .mesh_arithmetic import Arithmetic, compute

ShardingLike = Sharding | Mapping[str, Any] | Sequence[Any] | str


class MeshTensor(Arithmetic):
    """A tensor that is distributed over a virtual mesh: one contiguous tile per device, all of one shape. It supports
    arithmetic and torch's element-wise functions with numbers and with MeshTensors of the same layout.

    Devices that hold the same elements may share memory. Where a dim is not divided evenly, tiles end in padding, which
    nothing reads.

    >>> mesh = Mesh({"x": 2})
    >>> a = distribute(torch.arange(5), mesh, {"x": 0})
    >>> a, a.tile(1), a.full()
    (MeshTensor((5,), int64, S[0], Mesh({"x": 2})), tensor([3, 4]), tensor([0, 1, 2, 3, 4]))
    """

    __slots__ = ("_layout", "_tiles")

    def __init__(self, tiles: Sequence[torch.Tensor], shape: Sequence[int], sharding: Sharding) -> None:
        tiles = list(tiles)
        if len(tiles) != sharding.mesh.num_devices:
            refuse(
                f"{len(tiles)} tiles for {sharding.mesh.num_devices} devices",
                where=str(sharding.mesh),
                fix="give one tile per device; mt.distribute cuts a whole tensor into them",
            )
        layout = layout_of(tuple(shape), tiles[0].dtype, sharding)
        wrong = [
            f"the tile of device {rank} is {tuple(tile.shape)} {tile.dtype} on {tile.device}"
            for rank, tile in enumerate(tiles)
            if (tile.shape, tile.dtype, tile.device) != (layout.tile_shape, layout.dtype, tiles[0].device)
            or not tile.is_contiguous()
        ]
        if wrong:
            expected = f"contiguous, {layout.tile_shape}, {layout.dtype}, on {tiles[0].device}"
            refuse(wrong, where=f"tensor {layout.shape} as '{sharding}'", fix=f"make every tile {expected}")
        lost = {found[0]: found[1] for tile in tiles if (found := why_not_plain(tile))}
        if lost:
            refuse([f"a tile {what}" for what in lost], where=f"tensor {layout.shape}", fix="; ".join(lost.values()))
        self._tiles, self._layout = [tile.detach() for tile in tiles], layout

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self._layout.shape

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self._layout.shape)

    def dim(self) -> int:
        """The number of dims, as of a torch tensor."""
        return len(self._layout.shape)

    def numel(self) -> int:
        """The number of elements of the global tensor."""
        return math.prod(self._layout.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype."""
        return self._layout.dtype

    @property
    def device(self) -> torch.device:
        """The torch device that the tiles are on."""
        return self._tiles[0].device

    @property
    def layout(self) -> Layout:
        """Shape, dtype and sharding together, which tensors of the same layout share."""
        return self._layout

    @property
    def sharding(self) -> Sharding:
        """How the tensor is distributed over the mesh."""
        return self._layout.sharding

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self._layout.sharding.mesh

    def tile(self, device: int | Mapping[str, int]) -> torch.Tensor:
        """The elements that a device (by rank, or by its coordinate on every axis) holds: a view without padding."""
        return self._layout.valid_part(self._tiles, self._rank(device))

    def padded_tile(self, device: int | Mapping[str, int]) -> torch.Tensor:
        """A device's whole tile, padding included, of shape `sharding.tile_shape(shape)`."""
        return self._tiles[self._rank(device)]

    def tiles(self) -> tuple[torch.Tensor, ...]:
        """The padded tiles of all devices, by rank. Devices that hold the same elements may share one."""
        return tuple(self._tiles)

    def parts(self) -> list[torch.Tensor]:
        """Views of the tiles without padding that together are the tensor: each element once."""
        return self._layout.parts(self._tiles)

    @property
    def tiles_are_apart(self) -> bool:
        """Whether no two devices share memory."""
        spans = sorted(map(memory_span, self._tiles))
        return all(end <= start for (_, end), (start, _) in pairwise(spans))

    def overwrite(self, results: Sequence[torch.Tensor]) -> None:
        """Replace every device's tile by its result, one per device, by rank: in place, or in new memory where devices
        that share memory now hold different elements (or different contributions to a partial tensor)."""
        layout = self._layout
        apart = {(layout.holder(rank), tile.data_ptr()): tile for rank, tile in enumerate(self._tiles)}
        if not of_tiles(list(apart.values()), layout).tiles_are_apart:
            self._tiles = [clone(result) for result in results]
            return
        for tile, result in zip(self._tiles, results, strict=True):
            if tile is not result:
                copy(tile, result)

    @undisturbed
    def full(self) -> torch.Tensor:
        """The global tensor, in memory of its own: partial values are reduced, and one of equal replicas is taken."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self._layout.collect(self._tiles, out)
        return out

    @undisturbed
    def clone(self) -> MeshTensor:
        """A copy. Devices that share a tile share its copy."""
        known = {tile.data_ptr(): tile for tile in self._tiles}
        made = {place: clone(tile) for place, tile in known.items()}
        return of_tiles([made[tile.data_ptr()] for tile in self._tiles], self._layout)

    @undisturbed
    def redistribute(self, sharding: ShardingLike) -> MeshTensor:
        """The tensor in another layout on its mesh, bit for bit what the steps of `plan_redistribution` give.

        Raises:
            MeshTensorError: the sharding doesn't fit the tensor or its mesh.
        """
        if sharding is self.sharding:
            return self
        wanted = as_sharding(self.mesh, len(self.shape), sharding)
        made = self
        for before, after in pairwise(_planned(self.shape, self.dtype, self.sharding, wanted).stages):
            layout = layout_of(self.shape, self.dtype, after)
            tiles = layout.allocate(self.device)
            reshard_of(self.shape, self.dtype, before, after)(made._tiles, tiles, share=True)
            made = of_tiles(tiles, layout)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> MeshTensor:
        """torch's element-wise functions, tile by tile."""
        return of_tiles(*compute(func, args, kwargs or {}))

    def _rank(self, device: int | Mapping[str, int]) -> int:
        if isinstance(device, Mapping):
            return self.mesh.rank(device)
        self.mesh.coordinate(device)  # refuses ranks that the mesh lacks
        return device

    def __repr__(self) -> str:
        return f"MeshTensor({self.shape}, {dtype_name(self.dtype)}, {self.sharding}, {self.mesh})"


_MOST_DEVICES = 2**16  # with a millisecond or two each, a call takes minutes


def check_count(mesh: Mesh) -> None:
    """Refuse a mesh of more devices than one process has tiles for in a reasonable time."""
    if mesh.num_devices > _MOST_DEVICES:
        refuse(
            f"a virtual mesh of {mesh.num_devices:,} devices",
            where=str(mesh),
            why=f"each of them has tiles of its own in this process, which takes at most {_MOST_DEVICES:,}",
            fix="run on fewer; mt.simulate tells what as many take, and explain() what they do",
        )


@undisturbed
def distribute(tensor: torch.Tensor, mesh: Mesh | Mapping[str, int], sharding: ShardingLike) -> MeshTensor:
    """Distribute a global tensor over the devices of a virtual mesh: each gets a copy of its tile.

    Along a partial axis, the device at coordinate 0 holds the value, and the others the neutral element of the op.

    Args:
        tensor: a global tensor that requires no gradient.
        mesh: the mesh, or a dict from the names of its axes to their sizes.
        sharding: a dict from axis to dim, a list of one placement per axis, a text or a Sharding.

    Raises:
        MeshTensorError: `tensor` is no plain tensor, or the sharding doesn't fit it.
    """
    if not isinstance(tensor, torch.Tensor):
        refuse(f"distribute takes a torch tensor, not {type(tensor).__name__}", fix="wrap it with torch.as_tensor")
    if problem := why_not_plain(tensor):
        refuse(problem[0], where="distribute", fix=problem[1])
    mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    check_count(mesh)
    layout = layout_of(tuple(tensor.shape), tensor.dtype, as_sharding(mesh, tensor.ndim, sharding))
    return of_tiles(layout.spread(tensor.detach(), share=True), layout)


def plan_redistribution(
    shape: Sequence[int], dtype: torch.dtype, src: Sharding, dst: ShardingLike
) -> RedistributionPlan:
    """The collectives by which `redistribute` brings a tensor of global `shape` and `dtype` from layout `src` to `dst`
    (a dict from axis to dim, a text or a Sharding) with the fewest bytes. `print` shows the steps with the bytes that a
    device receives.

    Raises:
        MeshTensorError: `src` is no Sharding, or `dst` is no layout of as many dims on its mesh.

    >>> mesh = Mesh({"x": 4})
    >>> print(plan_redistribution((64, 64), torch.float32, Sharding.make(mesh, 2, {"x": 0}), {"x": 1}))
    (64, 64) float32, 'S[0]' -> 'S[1]' on Mesh({"x": 4}): 3,072 bytes per device
      step        over  layout after  bytes per device
      all_to_all  x     S[1]          3,072
    """
    _check_described(shape, dtype, src, "plan_redistribution")
    return _planned(tuple(shape), dtype, src, as_sharding(src.mesh, src.ndim, dst))


def _check_described(shape: Sequence[int], dtype: torch.dtype, src: Sharding, where: str) -> None:
    """Refuse what describes no tensor on a mesh."""
    problems: list[str] = [] if isinstance(src, Sharding) else [f"the layout {shown(src)} is of no mesh"]
    problems += [] if isinstance(dtype, torch.dtype) else [f"dtype={shown(dtype)} is no dtype of torch's"]
    sizes = isinstance(shape, Sequence) and all(isinstance(size, int) and size >= 0 for size in shape)
    problems += [] if sizes else [f"shape={shown(shape)} has something else than sizes of at least 0"]
    if problems:
        refuse(
            problems,
            where=where,
            fix="pass sizes, a dtype as torch.float32, and a Sharding (Sharding.make or Sharding.parse makes one, and "
            "tensors have one)",
        )


@lru_cache(maxsize=1024)
def _planned(shape: tuple[int, ...], dtype: torch.dtype, src: Sharding, dst: Sharding) -> RedistributionPlan:
    return RedistributionPlan.make(shape, dtype_name(dtype), dtype.itemsize, src, dst)


def as_sharding(mesh: Mesh, ndim: int, sharding: ShardingLike) -> Sharding:
    """A Sharding on `mesh` from any of its forms."""
    if isinstance(sharding, str):
        return Sharding.parse(mesh, ndim, sharding)
    if not isinstance(sharding, Sharding):
        return Sharding.make(mesh, ndim, sharding)
    if sharding.mesh != mesh:
        refuse(f"a sharding on {sharding.mesh} for a tensor on {mesh}", fix="make the sharding on the tensor's mesh")
    if sharding.ndim != ndim:
        refuse(f"a sharding of {sharding.ndim} dims for a tensor of {ndim}", fix="one entry per dim of the tensor")
    return sharding


def of_tiles(tiles: list[torch.Tensor], layout: Layout) -> MeshTensor:
    """A MeshTensor on tiles that are known to fit `layout`."""
    tensor = MeshTensor.__new__(MeshTensor)
    tensor._tiles, tensor._layout = tiles, layout
    return tensor


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
    shows it. Up to `small` bytes it is sent to all who need it, larger ones cross once.

    Raises:
        MeshTensorError: the sharding does not fit the mesh or the shape.
    """
    _check_described(shape, dtype, src, "plan_transfer")
    dst = as_sharding(Mesh(mesh), len(shape), sharding)
    return TransferPlan.make(shape, str(dtype).removeprefix("torch."), dtype.itemsize, src, dst, small)


@undisturbed
def transfer(tensor: MeshTensor, mesh: Mesh | Mapping[str, int], sharding: ShardingLike) -> MeshTensor:
    """The tensor in a layout on another mesh: the same bits, in memory of their own.

    Raises:
        MeshTensorError: the sharding does not fit the mesh or the tensor.

    >>> from mesh_tensor.runtime.virtual.mesh_tensor import distribute
    >>> there = transfer(distribute(torch.arange(6), {"x": 2}, {"x": 0}), {"y": 3}, {"y": 0})
    >>> there, there.tile(2)
    (MeshTensor((6,), int64, S[0], Mesh({"y": 3})), tensor([4, 5]))
    """
    if not isinstance(tensor, MeshTensor):
        refuse(
            f"tensor={shown(tensor)} is no MeshTensor",
            where="transfer",
            fix="lay it out on its mesh first: mt.distribute(tensor, mesh, sharding)",
        )
    plan = plan_transfer(tensor.shape, tensor.dtype, tensor.sharding, mesh, sharding)
    return run_transfer(plan, tensor)


def run_transfer(plan: TransferPlan, tensor: MeshTensor) -> MeshTensor:
    """What the plan makes of a tensor that lies as its `src`."""
    layout = layout_of(tensor.shape, tensor.dtype, plan.after.src)
    source, tiles = tensor.redistribute(plan.before.dst), layout.allocate(tensor.device)
    for send in plan.sends:
        copy(tiles[send.target][send.target_region], source.padded_tile(send.source)[send.source_region])
    return of_tiles(tiles, layout).redistribute(plan.dst)
