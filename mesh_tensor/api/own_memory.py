"""Whose memory tensors have, in any form that callers and runs know (whole, as a MeshTensor, as a DTensor), and copies
in memory of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mesh_tensor.importers.weight_files import StoredTensor
from mesh_tensor.runtime.ranks import is_dtensor
from mesh_tensor.runtime.ranks.dtensor import local_part, with_local_part
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor
from mesh_tensor.targets.tile_memory import memory_of


def apart(tensor: Any) -> Any:
    """A tensor as it is now, whatever its owner writes later; what is read from files is that."""
    if isinstance(tensor, MeshTensor):
        return tensor.clone()
    return tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor


def parts_of(tensor: Any) -> list[torch.Tensor]:
    """The parts of a tensor that this process has, without padding."""
    return tensor.parts() if isinstance(tensor, MeshTensor) else [local_part(tensor) if is_dtensor(tensor) else tensor]


def memories_of(tensors: Iterable[Any]) -> set[int]:
    """What tells the memory of tensors that this process has."""
    return {memory_of(part) for tensor in tensors for part in _in_memory(tensor)}


def in_own_memory(tensor: Any, taken: set[int]) -> Any:
    """The tensor, or a copy of it where some of its memory is `taken`; its memory is taken from now on. A rank asks by
    itself."""
    if not taken.isdisjoint(memories_of([tensor])):
        tensor = with_local_part(tensor, local_part(tensor).clone()) if is_dtensor(tensor) else apart(tensor)
    taken |= memories_of([tensor])
    return tensor


def kept_apart(state: Mapping[str, Any], others: Iterable[Any]) -> dict[str, Any]:
    """The state as a launch takes it, in memory that none of the others, which callers have, has."""
    outside = memories_of(others)
    return {
        name: tensor if outside.isdisjoint(memories_of([tensor])) else apart(tensor) for name, tensor in state.items()
    }


def _in_memory(tensor: Any) -> Iterable[torch.Tensor]:
    if isinstance(tensor, MeshTensor):
        return tensor.tiles()
    return [] if isinstance(tensor, StoredTensor) else [local_part(tensor) if is_dtensor(tensor) else tensor]
