"""What a factor is: one iteration dimension of a kernel, and why it may not be split."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm import tirx


@dataclass(frozen=True, eq=False)
class Factor:
    """One iteration dimension. `dims` are the parameters' dims it indexes, `roles` its loop variables with their
    coefficients, `blocked` why it can't be split at all, `aligned` why tiles have to be whole blocks. `lanes` is the
    reason where a buffer keeps one value per position in a block, `first` why the first tile has to hold a whole
    block."""

    name: str
    size: tirx.PrimExpr
    dims: tuple[tuple[str, int], ...]
    roles: Mapping[tirx.Var, int]
    blocked: str | None = None
    aligned: str | None = None
    lanes: str | None = None
    first: str | None = None

    @property
    def block(self) -> int:
        """What one iteration of the outermost loops handles: the least common multiple, where they differ."""
        return math.lcm(*self.roles.values())


class Blocked(Exception):
    """The factor (of a split, if it is known which) can't be split; the message is the reason."""

    def __init__(self, reason: str, factor: Factor | None = None):
        super().__init__(reason)
        self.factor = factor


def tile_extent(size: Any, parts: list[int]) -> Any:
    """ceildiv of `size` by each of `parts`: the part of a dim that one device holds."""
    for n in parts:
        if n != 1:
            size = -(-int(size) // n) if isinstance(size, (int, tirx.IntImm)) else tirx.floordiv(size + (n - 1), n)
    return size
