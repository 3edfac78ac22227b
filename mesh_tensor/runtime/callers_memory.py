"""The memory of tensors that callers pass: whether it overlaps, and that torch hears of what is written there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from mesh_tensor.base.errors import refuse


def overlaps(tensors: Mapping[str, Sequence[torch.Tensor]], writes: Collection[str], where: str) -> bool:
    """Whether one of `writes` shares memory with another. Where they lie counts, not the storage that torch has for it:
    of what comes from numpy or by dlpack, two storages may be one memory.

    Raises:
        MeshTensorError: two of `writes` do.
    """
    spans = [(name, *_span(tensor)) for name, parts in tensors.items() for tensor in parts]
    pairs = {
        (name, other)
        for name, start, end in spans
        if name in writes
        for other, other_start, other_end in spans
        if start < other_end and other_start < end and name != other
    }
    if lost := sorted({" and ".join(sorted(map(repr, pair))) for pair in pairs if pair[1] in writes}):
        what = [f"parameters {names} are written, and share memory" for names in lost]
        why = "one result would be in the place of the other"
        refuse(what, where=where, why=why, fix="pass tensors with memory of their own")
    return bool(pairs)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where its first byte is, and what is behind its last."""
    elements = tensor.numel()
    if elements and not tensor.is_contiguous():
        elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + elements * tensor.itemsize


def mark_written(tensors: Iterable[torch.Tensor]) -> None:
    """Let torch know that a kernel has written them: gradients that need what was there before are refused then."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
