"""Which tensors hold NaN or infinity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch


def not_finite(parts: Mapping[str, Iterable[torch.Tensor]]) -> list[str]:
    """The names of those of whose parts one holds NaN or infinity; integers never do.

    A sum over all elements is finite only if they are, and costs one reading. Where it is not (sums may overflow),
    elements are looked at one by one."""
    floats = [
        (name, part) for name, tensors in parts.items() for part in tensors if part.is_floating_point() and part.numel()
    ]
    if not floats:
        return []
    sums = torch.stack([_total(part) for _, part in floats])
    if bool(sums.sum().isfinite()):
        return []
    suspects = [held for held, total in zip(floats, sums.isfinite().tolist(), strict=True) if not total]
    return list(dict.fromkeys(name for name, part in suspects if not bool(part.isfinite().all())))


def _total(part: torch.Tensor) -> torch.Tensor:
    return (part if part.itemsize > 2 else part.float()).sum().double()


def within(tensors: Iterable[torch.Tensor], norm: float) -> bool:
    """Whether the norm of the tensors together is at most `norm`; it is not where one holds NaN or infinity."""
    return bool(torch.nn.utils.get_total_norm(list(tensors)) <= norm)
