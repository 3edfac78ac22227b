"""Whole blocks: how a dim is cut into tiles that are a multiple of a block long, and what that moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def whole_blocks(size: Any, parts: int, block: int) -> Any:
    """`size` rounded up to `parts` tiles of whole blocks.

    >>> whole_blocks(200, 4, 32), whole_blocks(200, 4, 1)
    (256, 200)
    """
    return ceildiv(ceildiv(size, parts), block) * block * parts


@dataclass(frozen=True)
class Margins:
    """What tiles of whole blocks of a dim cost, beside tiles as users state them, as shares of the dim: the most that a
    device lacks of its blocks where it has a tile (`of_inputs`), of its tile where it has blocks (`of_results`), and of
    the whole dim (`gathered`). `walked`: how long the dim would be of which all tiles of blocks are full.

    >>> Margins.of(30, 3, 4)
    Margins(walked=36, of_inputs=0.13333333333333333, of_results=0.13333333333333333, gathered=0.6666666666666666)
    """

    walked: int
    of_inputs: float
    of_results: float
    gathered: float

    @staticmethod
    def of(size: int, parts: int, block: int) -> Margins:
        """Those of a dim of `size` elements, in so many parts."""
        if not size:
            return Margins(0, 0.0, 0.0, 0.0)
        walked, tile = whole_blocks(size, parts, block), -(-size // parts)
        of_inputs, of_results = (
            _lacking(size, parts, *pair) for pair in ((tile, walked // parts), (walked // parts, tile))
        )
        return Margins(walked, of_inputs / size, of_results / size, (size - tile) / size)


def _lacking(size: int, parts: int, tile: int, wanted: int) -> int:
    """The most of a dim's elements that a device lacks of a tile that long where it has one of `tile`."""
    lacks = [0]
    for device in range(min(parts, -(-size // wanted))):  # the others want nothing
        low, high = min(size, device * wanted), min(size, (device + 1) * wanted)
        lacks.append(high - low - max(0, min(high, (device + 1) * tile) - max(low, device * tile)))
    return max(lacks)


def ceildiv(size: Any, parts: int) -> Any:
    """`size / parts` rounded up; `size` may be symbolic, and stays as it is when `parts` is 1."""
    return size if parts == 1 else (size + parts - 1) // parts
