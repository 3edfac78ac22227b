"""What every rank is given whole: it has to be the same on all of them, and a few bytes tell it from other values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch

from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor

from .dtensor import is_dtensor
from .faults import VALUES


def told(given: Mapping[str, Any]) -> dict[str, str]:
    """By name, words that are equal on ranks where all bits are: of numbers, and of what is whole in CPU memory. Of
    DTensors, and of files, a rank takes its own part: they have no words, nor has what lies on a GPU, which would have
    to be waited for."""
    found = {name: _words(value) for name, value in given.items()}
    return {name: words for name, words in found.items() if words}


def values_of(given: Mapping[str, Any]) -> dict[str, str]:
    """The same as facts to agree on, of what ranks are to keep."""
    return {f"{VALUES} {name!r}": words for name, words in told(given).items()}


def _words(value: Any) -> str:
    if isinstance(value, (int, float)):
        return repr(value)
    parts = list(value.tiles()) if isinstance(value, MeshTensor) else [value]
    if not all(isinstance(part, torch.Tensor) and not is_dtensor(part) and part.device.type == "cpu" for part in parts):
        return ""
    digest = 0
    for part in parts:
        plain = part.detach().resolve_conj().resolve_neg().contiguous()
        digest = crc32(plain.reshape(-1).view(torch.uint8).numpy().data, digest)
    return f"digest {digest:08x}"
