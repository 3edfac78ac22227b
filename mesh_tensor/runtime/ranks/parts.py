"""Parts: what one rank has of a tensor. Between programs that know how values lie, no DTensor has to be made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from mesh_tensor.base.sharding import Sharding

from .dtensor import as_dtensor, from_placements, lies_like_torch, local_part, mesh_of, to_placements
from .redistribution import redistribute

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(eq=False, slots=True)  # not frozen: that would take most of the time of what every action makes
class Part:
    """This rank's part of a tensor of `shape` that lies in a layout which DTensors have."""

    local: torch.Tensor
    layout: Sharding
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self.local.dtype

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
