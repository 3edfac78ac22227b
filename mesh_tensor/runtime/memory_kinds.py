"""Memory kinds: where a value lies while nothing computes with it. "device" is where it was made; "pinned_host" is
memory of the host that a device copies from and to while it computes. On a CPU both are the same memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mesh_tensor.base.errors import did_you_mean, listing, refuse, shown

DEVICE, PINNED_HOST = KINDS = ("device", "pinned_host")
Moved = Callable[[Any, Callable[[torch.Tensor], torch.Tensor]], Any]


@dataclass(frozen=True)
class PutAway:
    """A value whose memory is the host's, and the device that it is of."""

    value: Any
    device: torch.device


def checked_kind(kind: Any, what: str) -> str:
    """A memory kind; others are refused."""
    if kind not in KINDS:
        refuse(
            f"{what} is in memory of kind {shown(kind)}{did_you_mean(str(kind), KINDS)}", fix=f"use {listing(KINDS)}"
        )
    return kind


def put_away(value: Any, device: torch.device, kind: str, moved: Moved) -> Any:
    """A value that lies on a device, as it is kept in memory of this kind: itself, where that is the same. `moved`
    gives a value with other memory."""
    if kind == DEVICE or _is_host(device):
        return value
    return PutAway(moved(value, _to_host), device)


def fetched(value: Any, moved: Moved) -> Any:
    """A value to compute with."""
    if not isinstance(value, PutAway):
        return value
    device = value.device
    return moved(value.value, lambda tensor: tensor.to(device, non_blocking=True, copy=True))


def plain(value: Any) -> Any:
    """A value as it lies over the mesh, in whatever memory."""
    return value.value if isinstance(value, PutAway) else value


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory. What is enqueued on the device's stream before is in it; who takes it there comes
    after it in the same stream."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"
