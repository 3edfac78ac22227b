"""An architecture: a model of somebody else's, small, with random weights, and inputs for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

#: A model in eval mode, and what it is called with, by name.
Made = tuple[torch.nn.Module, dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """What `make` gives is called `name` in its library."""

    library: str
    name: str
    make: Callable[[], Made]

    @property
    def title(self) -> str:
        """Library and name."""
        return f"{self.library}/{self.name}"


def ids(batch: int = 4, length: int = 12, vocabulary: int = 90) -> torch.Tensor:
    """Random token ids."""
    return torch.randint(3, vocabulary, (batch, length))
