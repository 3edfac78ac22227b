"""TensorType: the shape and the dtype of a tensor."""

from __future__ import annotations

import math
from typing import NamedTuple


class TensorType(NamedTuple):
    """Shape and dtype of a tensor. Sizes are ints: modules are specialised to sizes before they are looked at."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def ndim(self) -> int:
        """How many dims."""
        return len(self.shape)

    @property
    def elements(self) -> int:
        """How many elements."""
        return math.prod(self.shape)
