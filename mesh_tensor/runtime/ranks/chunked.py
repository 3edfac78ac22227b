"""An all-reduce of large tiles: every rank reduces one chunk, then sends it to everybody. That goes segment by segment:
while one is added up, the next is on its way, and what was received needs little memory of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.runtime.elementwise import Combine
from mesh_tensor.runtime.reshard import Delivery, Piece

from .exchange import Exchange, Pending, TileTypes
from .ranks import Group

# Bytes of a tile that are reduced at a time: few enough to stay in caches, many next to a latency.
SEGMENT = CPU.tuning.segment
_AHEAD = 2  # segments on their way beside the one that is added up


@dataclass(frozen=True)
class _Segment:
    """Elements of the flat tile, and how the ranks reduce them and then send around what they reduced."""

    span: slice
    reduce: Exchange
    gather: Exchange


class ChunkedAllReduce:
    """One rank's part. `ordered` are the ranks in the order in which their values are combined."""

    def __init__(self, rank: int, group: Group, ordered: Sequence[int], types: TileTypes, combine: Combine) -> None:
        total = math.prod(types.src_shape)
        size = min(total, max(1, SEGMENT // types.dtype.itemsize))
        made: dict[int, tuple[Exchange, Exchange]] = {}
        self._segments = []
        for start in range(0, total, size):
            count = min(size, total - start)
            if count not in made:
                flat = TileTypes((count,), (count,), types.dtype)
                reduced, gathered = _deliveries(count, ordered)
                made[count] = (
                    Exchange(reduced, rank, group, flat, combine, 0),
                    Exchange(gathered, rank, group, flat, combine, 0),
                )
            self._segments.append(_Segment(slice(start, start + count), *made[count]))

    def __call__(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Fill the tile `dst` with the reduced tiles `src`; both contiguous, perhaps one memory."""
        self.start(src, dst).wait()

    def start(self, src: torch.Tensor, dst: torch.Tensor) -> _PendingSegments:
        """Begin to send: `src` may not be written, nor `dst` used, before the wait."""
        return _PendingSegments(self._segments, src.view(-1), dst.view(-1))


class _PendingSegments:
    """A chunked all-reduce under way. All ranks start the segments' exchanges in the same order."""

    def __init__(self, segments: Sequence[_Segment], src: torch.Tensor, dst: torch.Tensor) -> None:
        self._segments, self._src, self._dst = segments, src, dst
        self._reducing = [self._reduce(segment) for segment in segments[: _AHEAD + 1]]
        self._gathering: list[Pending] = []

    def advance(self) -> None:
        """Wait for the own chunks, segment by segment, and begin to send them to everybody, unless that was done."""
        for segment in self._segments[len(self._gathering) :]:
            self._reducing.pop(0).wait()
            reduced = self._dst[segment.span]
            self._gathering.append(segment.gather.start(reduced, reduced))
            following = len(self._gathering) + _AHEAD
            if following < len(self._segments):
                self._reducing.append(self._reduce(self._segments[following]))

    def wait(self) -> None:
        """Wait for the own chunks, then for everybody's."""
        self.advance()
        for pending in self._gathering:
            pending.wait()

    def _reduce(self, segment: _Segment) -> Pending:
        return segment.reduce.start(self._src[segment.span], self._dst[segment.span])


def _deliveries(count: int, ordered: Sequence[int]) -> tuple[list[Delivery], list[Delivery]]:
    """Every rank's chunk of `count` elements from everybody, and to everybody."""
    step = -(-count // len(ordered))
    bounds = [(min(i * step, count), min((i + 1) * step, count)) for i in range(len(ordered))]
    chunks = [(m, (slice(*bound),)) for m, bound in zip(ordered, bounds, strict=True) if bound[0] < bound[1]]
    reduced = [Delivery((m,), (Piece(c, tuple((o, c) for o in ordered)),), False) for m, c in chunks]
    gathered = [Delivery(tuple(ordered), tuple(Piece(c, ((m, c),)) for m, c in chunks), False)]
    return reduced, gathered
