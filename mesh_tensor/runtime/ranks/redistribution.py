"""redistribute: a tensor in another layout: MeshTensors in this process, DTensors on the ranks that hold them. resume:
ranks whose calls on a mesh have failed begin again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from mesh_tensor.base.errors import MeshTensorError, refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.base.topology import Topology
from mesh_tensor.runtime.ambient import undisturbed, why_not_plain
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor, ShardingLike, as_sharding

from .dtensor import (
    PART_FIX,
    as_agreed,
    as_dtensor,
    from_placements,
    is_dtensor,
    laid_dtensor,
    lies_like_torch,
    local_part,
    mesh_of,
    part_problem,
    to_placements,
)
from .faults import Faults, agree, digest_of
from .lane import Lane
from .plan import Changes
from .ranks import Ranks, known_on, ranks_of
from .tiling import Tiling

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@undisturbed
def redistribute(tensor: MeshTensor | DTensor, sharding: ShardingLike) -> Any:
    """Bring a MeshTensor or a DTensor into another layout on its mesh, by the steps that `plan_redistribution` shows.

    `sharding` is a dict from axis to dim, a list of placements, a text or a Sharding. The axes of a DTensor are those
    of its DeviceMesh, named `axis0`, `axis1`, ... if it has no names; the call is collective, and the result is a
    DTensor with the placements of `sharding`. A tensor that is in the layout already is returned itself; otherwise the
    result has memory of its own. Results have no gradient: a tensor that requires one is refused outside of
    `torch.no_grad()`.

    Raises:
        MeshTensorError: `tensor` is neither, the sharding does not fit it, or ranks ask for different layouts or fail.
    """
    if isinstance(tensor, MeshTensor):
        return tensor.redistribute(sharding)
    if not is_dtensor(tensor):
        refuse(
            f"redistribute takes a MeshTensor or a DTensor, not {type(tensor).__name__}",
            fix="give a plain tensor a layout with mt.distribute or torch.distributed.tensor.distribute_tensor",
        )
    mesh = mesh_of(tensor.device_mesh)
    ranks = ranks_of(mesh, tensor.device_mesh, tensor.device.type)
    return _changes_on(ranks, ranks.calls.lane()).redistribute(tensor, sharding)


class _Changes:
    """The redistributions that were asked for on some ranks: made ready once, agreed on unless it is the last again."""

    def __init__(self, ranks: Ranks, lane: Lane) -> None:
        self._ranks, self._lane, self._faults = ranks, lane, Faults(ranks, "mt.redistribute")
        self._agreed: tuple | None = None  # what the last call asked for
        self._digest = 0  # of that
        self._changes = Changes(ranks, self._faults)

    def redistribute(self, tensor: DTensor, sharding: ShardingLike) -> DTensor:
        with self._lane:
            return self._checked(tensor, sharding)

    def _checked(self, tensor: DTensor, sharding: ShardingLike) -> DTensor:
        mesh = self._ranks.mesh
        try:
            src = from_placements(mesh, tensor.ndim, tensor.placements)
            wanted = as_sharding(mesh, tensor.ndim, sharding)
            if found := why_not_plain(tensor):
                refuse(found[0], where=f"mt.redistribute on {mesh}", fix=found[1])
            if problem := part_problem(tensor, src, self._ranks.rank):
                refuse(problem, where=str(mesh), fix=PART_FIX)
        except MeshTensorError as error:
            if self._agreed is None:
                agree(self._ranks, self._faults, {}, refusal=str(error))
            raise
        self._agree(tensor, src, wanted)
        if src == wanted:
            return tensor
        with torch.no_grad():
            return self._redistributed(tensor, src, wanted)

    def _redistributed(self, tensor: DTensor, src: Sharding, wanted: Sharding) -> DTensor:
        tensor, src = as_agreed(tensor, src, self._ranks)
        local = local_part(tensor).resolve_conj().resolve_neg()  # memory is sent as it is
        tiling = Tiling(tuple(tensor.shape), tensor.dtype, src, self._ranks.rank)
        return laid_dtensor(local, tiling, wanted, self._ranks, self._changes)

    def _agree(self, tensor: DTensor, src: Sharding, wanted: Sharding) -> None:
        """All ranks ask for the same; found out whenever this one asks for something else than before."""
        key = (tensor.shape, tensor.dtype, src, wanted)
        if key != self._agreed:
            asked = f"{tuple(tensor.shape)} {tensor.dtype}, '{src}' -> '{wanted}'"
            facts = {"kernel": "mt.redistribute", "redistributions": asked}
            agree(self._ranks, self._faults, facts)
            self._agreed, self._digest = key, digest_of(facts)
        self._lane.run(self._digest)


@lru_cache(maxsize=64)
def _changes_on(ranks: Ranks, lane: Lane) -> _Changes:
    return _Changes(ranks, lane)


class Part:
    """This rank's part of a tensor of `shape` that lies in a layout which DTensors have: as `local`, or as the tile of
    a program, from which `leave` takes it.

    tile      the same memory, as programs take it whose values lie as `tiling` says, if one has asked or made it
    is_ready  that the tile serves has been looked at
    """

    __slots__ = ("_leave", "_local", "is_ready", "layout", "shape", "tile", "tiling")

    def __init__(
        self,
        local: torch.Tensor | None,
        layout: Sharding,
        shape: tuple[int, ...],
        tile: torch.Tensor | None = None,
        tiling: Any = None,
        leave: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._local, self.layout, self.shape = local, layout, shape
        self.tile, self.tiling, self._leave, self.is_ready = tile, tiling, leave, False

    @property
    def local(self) -> torch.Tensor:
        """What of the tensor is here."""
        if self._local is None:
            assert self._leave is not None
            assert self.tile is not None
            self._local = self._leave(self.tile)
        return self._local

    @property
    def memory(self) -> torch.Tensor:
        """The same memory, perhaps with padding."""
        return self.local if self.tile is None else self.tile

    def entered(self, tile: torch.Tensor, tiling: Tiling) -> None:
        """A program takes the local part's memory as this tile."""
        self.tile, self.tiling, self.is_ready = tile, tiling, True

    def serves(self) -> bool:
        """Whether there is a tile that programs can take as it is."""
        tile, tiling = self.tile, self.tiling
        self.is_ready = tile is not None and tile.dtype is tiling.dtype and tiling.serves(tile)
        return self.is_ready

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Part:
        """The part of a tensor that lies alike in the memory that `move` gives for its own."""
        if self._local is None:
            return Part(None, self.layout, self.shape, move(self.memory), self.tiling, self._leave)
        return Part(move(self._local), self.layout, self.shape)

    def lies_in(self, tiling: Tiling, layout: Sharding) -> bool:
        """Whether it is in a tile that lies so, and in no memory beside it, for a layout of DTensors."""
        return (
            self._local is None and self.tiling is tiling and self.layout is layout and (self.is_ready or self.serves())
        )

    def addable(self, other: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """What is here of both, in the same order: the first as it may be written to."""
        if self._local is None and self.tiling is other.tiling and other.tile is not None:
            assert self.tile is not None
            return self.tile, other.tile
        local, self.tile, self.tiling = self.local, None, None
        return local, other.local

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self.memory.dtype

    def dtensor(self, device_mesh: DeviceMesh) -> DTensor:
        """The DTensor of which it is a part."""
        return as_dtensor(self.local, device_mesh, self.layout, self.shape)

    def laid(self, layout: Sharding, device_mesh: DeviceMesh) -> Part:
        """The part of the tensor in another layout: itself, where it lies so. All ranks of the mesh have to ask."""
        if layout is self.layout or layout == self.layout or self._is_named(layout):
            return self
        return part_of(redistribute(self.dtensor(device_mesh), layout))

    def _is_named(self, layout: Sharding) -> bool:
        """Whether torch has the same placements for both."""
        ordered = layout.is_in_mesh_order and self.layout.is_in_mesh_order
        return ordered and to_placements(layout) == to_placements(self.layout)


def part_of(tensor: DTensor) -> Part:
    """This rank's part of a DTensor."""
    layout = from_placements(mesh_of(tensor.device_mesh), tensor.ndim, tensor.placements)
    return Part(local_part(tensor), layout, tuple(tensor.shape))


def rank_layout(layout: Sharding, shape: Sequence[int]) -> Sharding:
    """The layout, or replicated where DTensors don't have it; of equal ones always the same object."""
    return one_of(layout if lies_like_torch(layout, shape) else Sharding.of(layout.mesh, layout.ndim, {}))


@lru_cache(maxsize=4096)
def one_of(layout: Sharding) -> Sharding:
    """The first of the layouts that are equal to this one."""
    return layout


def resume(mesh: Mesh | Mapping[str, int] | DeviceMesh | Topology) -> None:
    """Make a mesh usable again after a call on its ranks has failed. Collective: all ranks have to call it, outside of
    calls on the mesh, and it returns when all have.

    Messages under way are dropped and connections made anew. Tensors that the failed call was updating in place stay as
    it left them.

    Args:
        mesh: the mesh of the kernels, or the DeviceMesh that they ran on; of a pipeline its topology.

    Raises:
        MeshTensorError: nothing ever ran on the mesh, or some rank doesn't call it in time.
    """
    given: Any = mesh
    if isinstance(mesh, Topology):
        found = _of_topology(mesh)
    else:
        found = known_on(None, given) if type(mesh).__name__ == "DeviceMesh" else known_on(Mesh(given), None)
    if not found:
        refuse(
            "there is nothing to resume",
            where=str(mesh),
            why="no call has run on ranks of this mesh",
            fix="pass the mesh of the kernels, or the DeviceMesh that they are called on; where the first call on it"
            " has failed, destroy the process group and initialize it again, or start all ranks again",
        )
    for ranks in found:
        ranks.calls.resume()


def _of_topology(topology: Topology) -> list[Ranks]:
    """All ranks as one mesh first, over which pipelines run, then the meshes that this rank is in."""
    found = known_on(Mesh({"ranks": topology.num_devices}), None)
    for name in topology:
        places = list(topology.devices(name))
        found += [ranks for ranks in known_on(topology[name], None) if list(ranks.calls.places) == places]
    return list(dict.fromkeys(found))
