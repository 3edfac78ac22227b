"""A parameter or a result of a module as one rank has it: from what callers know to that part, and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.importers.weight_files import StoredTensor
from mesh_tensor.runtime.ranks import is_dtensor, redistribute
from mesh_tensor.runtime.ranks.dtensor import as_dtensor, lies_like_torch, local_part, to_placements
from mesh_tensor.runtime.ranks.rank_launch import RankLaunch
from mesh_tensor.runtime.ranks.ranks import Ranks
from mesh_tensor.runtime.ranks.redistribution import Part, rank_layout
from mesh_tensor.runtime.ranks.tiling import Tiling
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor

from .module_ports import ModulePort

MESH_FIX = "pass a DTensor of the module's DeviceMesh, or a global tensor"


class RankPort:
    """`port` on one of `ranks`, of the run `run`. A part is what is valid of the rank's tile, over atoms."""

    def __init__(self, port: ModulePort, ranks: Ranks, run: RankLaunch) -> None:
        self.port, self._ranks, self._run = port, ranks, run

    @cached_property
    def names(self) -> tuple[Sharding, Sharding]:
        """The layout over atoms, and over the caller's dims, in which DTensors can have it."""
        if lies_like_torch(self.port.named, self.port.shape):
            return self.port.nameable, self.port.named
        return self._whole, Sharding.of(self._ranks.mesh, len(self.port.shape), {})

    @property
    def stays(self) -> bool:
        """Whether it lies in a layout that DTensors have."""
        return self.port.order is None and self.names[0] == self.port.sharding

    @cached_property
    def plain(self) -> Sharding | None:
        """The layout over the caller's dims in which the rank's part is that of a DTensor, if there is one."""
        plain = self.port.plain
        return plain if plain is not None and lies_like_torch(plain, self.port.shape) else None

    def enter(self, parameter: str, tensor: Any, keep: bool = False, alike: bool = False) -> torch.Tensor:
        """The part of an argument. `keep`: its memory does not change with the argument's. `alike`: a DTensor is known
        to lie so on all ranks, where it lies as it has to."""
        if isinstance(tensor, MeshTensor):
            refuse(
                f"parameter {parameter!r}: a MeshTensor, which lies on a virtual mesh, but the module runs on ranks",
                fix="pass a DTensor, or a global tensor: tensor.full()",
            )
        if is_dtensor(tensor) and (words := self._ranks.elsewhere(tensor)):
            refuse(f"parameter {parameter!r}: {words}", fix=MESH_FIX)
        port = self.port
        if is_dtensor(tensor) and self.plain is not None:
            if not (alike and tuple(tensor.placements) == to_placements(self.plain)):
                tensor = redistribute(tensor, self.plain)
            return local_part(tensor).reshape(self._valid)
        if isinstance(tensor, StoredTensor):
            if port.order is None:
                return tensor.read_atoms(port.dims, self._box)
            tensor = tensor.read()
        part = port.arranged(local_part(redistribute(tensor, {})) if is_dtensor(tensor) else tensor)[self._box]
        return part.clone(memory_format=torch.contiguous_format) if keep else part.contiguous()

    def entry(self, parameter: str) -> Callable[[Part], torch.Tensor]:
        """From this rank's part of a tensor of callers' to what the program takes."""
        port, device_mesh = self.port, self._ranks.device_mesh
        layout, valid = rank_layout(port.named, port.shape), self._valid

        def plain(part: Part) -> torch.Tensor:
            local = part.local if part.layout is layout else part.laid(layout, device_mesh).local
            return local if local.shape == valid else local.reshape(valid)

        def other(part: Part) -> torch.Tensor:
            return self.enter(parameter, part.dtensor(device_mesh), alike=True)

        return other if self.plain is None else plain

    def held(self, part: torch.Tensor) -> Any:
        """The part as a DTensor on the same memory, if there is one."""
        if self.plain is None:
            return None
        merged = part.reshape(self._merged(self.port.sharding))
        return as_dtensor(merged, self._ranks.device_mesh, self.plain, self.port.shape)

    def leave(self, local: torch.Tensor, as_dtensor_: bool) -> Any:
        """What callers get of a part (or tile): a DTensor, or the whole. All ranks have to ask."""
        if not as_dtensor_:
            return self.port.restored(self._changed(local, self._whole))
        nameable, named = self.names
        part = self._changed(local, nameable).reshape(self._merged(nameable))
        part = part if self.port.order is None else self.port.restored(part)
        return as_dtensor(part, self._ranks.device_mesh, named, self.port.shape)

    def exit(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """From what the program makes to this rank's part of what callers get."""
        port, (nameable, _) = self.port, self.names
        merged = self._merged(nameable)
        if port.order is not None:
            return lambda local: port.restored(self._changed(local, nameable))
        if nameable != port.sharding:
            return lambda local: self._changed(local, nameable).reshape(merged)
        valid = self._tiling.valid_shape

        def leave(local: torch.Tensor) -> torch.Tensor:
            local = local if local.shape == valid else self._changed(local, nameable)
            return local if local.shape == merged else local.reshape(merged)

        return leave

    @property
    def _whole(self) -> Sharding:
        return Sharding.of(self.port.sharding.mesh, len(self.port.refined), {})

    @cached_property
    def _tiling(self) -> Tiling:
        return Tiling(self.port.refined, self.port.torch_dtype(), self.port.sharding, self._ranks.rank)

    def _changed(self, local: torch.Tensor, to: Sharding) -> torch.Tensor:
        """The part (or tile) in another layout. All ranks have to ask."""
        return self._run.changes.part(self._tiling, to, local)

    @cached_property
    def _valid(self) -> tuple[int, ...]:
        return self.port.sharding.valid_extent(self.port.refined, self._ranks.rank)

    def _merged(self, sharding: Sharding) -> tuple[int, ...]:
        """A part's shape with the caller's dims."""
        atoms = iter(sharding.valid_extent(self.port.refined, self._ranks.rank))
        return tuple(math.prod(next(atoms) for _ in dim) for dim in self.port.dims)

    @cached_property
    def _box(self) -> tuple[slice, ...]:
        """Where the part lies in the refined tensor."""
        return self.port.sharding.box(self.port.refined, self._ranks.rank)
