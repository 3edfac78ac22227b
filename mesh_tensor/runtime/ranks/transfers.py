"""Transfers between meshes of ranks: boxes go from a rank of the one mesh straight to those that need them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.base.topology import Topology
from mesh_tensor.redistribution.transfer import SMALL, TransferPlan

from .calls import Calls, indented
from .dtensor import lies_like_torch
from .lane import Work
from .ranks import Ranks, ranks_of
from .redistribution import Part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ALL = 1 << 62  # bytes: everything counts as small


class NeverCame(RuntimeError):
    """What this rank waited for never came, or what it sent was never taken."""


def never_came(error: BaseException) -> bool:
    """Whether something never came, here or on a rank of the same mesh, which then ended the mesh and said so."""
    return isinstance(error, NeverCame) or f"raised {NeverCame.__name__}: " in str(error)


@dataclass(frozen=True, eq=False)
class Arrival:
    """A tensor on its way from another mesh: `parts` are regions of `local` that don't lie in one piece, with what they
    come into."""

    plan: TransferPlan
    local: torch.Tensor
    works: tuple[Work, ...]
    parts: tuple[tuple[torch.Tensor, torch.Tensor], ...]


class RankTopology:
    """The meshes of a topology as DeviceMeshes: device i of the topology is rank i. All ranks have to make it.

    name      the mesh that this rank is in; `rank` is its number there
    """

    def __init__(self, topology: Topology) -> None:
        from torch.distributed.device_mesh import DeviceMesh as TorchMesh

        _check(topology)
        self.topology = topology
        self._world: Ranks = ranks_of(Mesh({"ranks": topology.num_devices}), None, "cpu")
        self.device_meshes = {
            name: TorchMesh(
                "cpu",
                torch.tensor(topology.devices(name)).view(tuple(topology[name].shape.values())),
                mesh_dim_names=topology[name].axis_names,
            )
            for name in topology
        }
        self.name, self.rank = topology.places(self.world.rank)[0]

    @property
    def world(self) -> Ranks:
        """All ranks, as long as their process group is the one that there is."""
        if self._world.is_gone():
            refuse(
                "the process group that this was made in was destroyed",
                where=str(self.topology),
                why="there is another process group now",
                fix="make the pipeline anew, and load the state_dict() that it gave before",
            )
        return self._world

    @property
    def mine(self) -> DeviceMesh:
        """The DeviceMesh of this rank's mesh."""
        return self.device_meshes[self.name]

    def send(self, plan: TransferPlan, part: Part, to: str, number: int) -> list[tuple[Work, torch.Tensor | None]]:
        """Begin to send a tensor of this rank's mesh to another mesh, as message `number` of the call. All ranks of
        the mesh have to. What is given with the work stays as it is until that is done."""
        local = part.laid(plan.before.dst, self.mine).local
        works = list[tuple[Work, torch.Tensor | None]]()
        for send in plan.sends:
            if send.source == self.rank:
                data = _bytes(local[send.source_region])
                work = self._send(data, self.topology.devices(to)[send.target], number)
                works.append((work, None if self._wire.copies else data))
        return works

    def expect(self, plan: TransferPlan, dtype: torch.dtype, source: str, number: int) -> Arrival:
        """Begin to receive message `number` from another mesh."""
        local = torch.empty(plan.after.src.valid_extent(plan.shape, self.rank), dtype=dtype)
        works, parts = [], []
        for send in plan.sends:
            if send.target == self.rank:
                region = local[send.target_region]
                whole = region.numel() == local.numel()
                data = _bytes(local) if whole else torch.empty(region.numel() * dtype.itemsize, dtype=torch.uint8)
                place = self.topology.devices(source)[send.source]
                works.append(self._receive(data, place, number))
                if not whole:
                    parts.append((region, data))
        return Arrival(plan, local, tuple(works), tuple(parts))

    def arrived(self, arrival: Arrival) -> Part:
        """What is received, once it is there. All ranks of this mesh have to ask, in the same order."""
        self.wait(arrival.works)
        for region, data in arrival.parts:
            region.copy_(data.view(arrival.local.dtype).view(region.shape))
        return Part(arrival.local, arrival.plan.after.src, arrival.plan.shape).laid(arrival.plan.dst, self.mine)

    def share(self, tensor: torch.Tensor | None, owner: str, number: int, like: torch.Tensor) -> torch.Tensor:
        """A whole tensor that the ranks of mesh `owner` have, on all ranks; the others know its shape and dtype."""
        first, *_ = members = self.topology.devices(owner)
        if self.world.rank == first:
            assert tensor is not None
            data = _bytes(tensor)
            others = [rank for rank in range(self.topology.num_devices) if rank not in members]
            self.wait([self._send(data, other, number) for other in others])
        elif self.name != owner:
            data = torch.empty(like.numel() * like.dtype.itemsize, dtype=torch.uint8)
            self.wait([self._receive(data, first, number)])
            return data.view(like.dtype).view(like.shape)
        assert tensor is not None
        return tensor

    def wait(self, works: Sequence[Work]) -> None:
        """Wait until all are done."""
        lane = self.world.calls.lane()
        lane.opened += 1
        try:
            lane.wait(list(works))
        except RuntimeError as error:
            raise NeverCame(str(error)) from error

    def tell(self, error: Exception) -> None:
        """Let the other ranks of this rank's mesh know that it refuses a call; if they do so, too, all go on."""
        calls = self._calls
        if not calls.ended:
            with suppress(type(error)), calls.lane():
                raise error

    def end(self, error: BaseException, doing: str) -> None:
        """Let the other ranks of this rank's mesh know why it takes part no longer."""
        words = indented(f"{type(error).__name__}: {str(error).strip()}", doing)
        self._calls.end(f"rank {self.world.rank} raised {words}")

    @property
    def _calls(self) -> Calls:
        return ranks_of(self.topology[self.name], self.mine, "cpu").calls

    def _send(self, data: torch.Tensor, to: int, number: int) -> Work:
        try:
            return self._wire.send(data, to, self._tag(number))
        except RuntimeError as error:
            raise NeverCame(str(error)) from error

    def _receive(self, data: torch.Tensor, source: int, number: int) -> Work:
        try:
            return self._wire.receive(data, source, self._tag(number))
        except RuntimeError as error:
            raise NeverCame(str(error)) from error

    @property
    def _wire(self) -> Any:
        wire = self.world.calls.wire
        assert wire is not None
        return wire

    def _tag(self, number: int) -> int:
        return self.world.calls.lane().message(number)


@lru_cache(maxsize=1024)
def rank_transfer(shape: tuple[int, ...], dtype: torch.dtype, src: Sharding, dst: Sharding) -> TransferPlan:
    """The plan between layouts that DTensors have; parts on the way are such that DTensors have them, too."""
    name = str(dtype).removeprefix("torch.")
    for small in (SMALL, _ALL):
        plan = TransferPlan.make(shape, name, dtype.itemsize, src, dst, small)
        if all(lies_like_torch(layout, shape) for layout in (plan.before.dst, plan.after.src)):
            break
    return plan


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _check(topology: Topology) -> None:
    problems = []
    if not topology.is_disjoint:
        problems.append("its meshes share devices, but a rank is one device of one mesh")
    there = dist.get_world_size() if dist.is_initialized() else 0
    if there != topology.num_devices:
        problems.append(f"it has {topology.num_devices} devices, but there are {there} ranks")
    if problems:
        refuse(
            problems,
            where=str(topology),
            fix=f"start {topology.num_devices} ranks with torchrun, for meshes of devices of their own, and call"
            " torch.distributed.init_process_group()",
        )
