"""Which exchanges bring a tensor from one layout to another: in one move, or along a plan's; and an all-reduce of
large tiles: every rank reduces one chunk, then sends it to everybody."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Protocol

import torch

from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import KERNEL_SIZES, Recent
from mesh_tensor.base.sharding import Replicate, Sharding
from mesh_tensor.redistribution.plan import plan_moves
from mesh_tensor.runtime.elementwise import Combine, fill
from mesh_tensor.runtime.reshard import Delivery, Piece, reshard_of

from .carriers import region_size
from .exchange import Exchange, Pending, TileTypes
from .faults import Faults
from .ranks import Group, Ranks
from .tiling import Tiling

# Bytes to send: from here on an all-reduce goes chunk by chunk instead of tile to everybody.
_IN_CHUNKS_FROM = CPU.tuning.chunked_from


class Peers(Protocol):
    """The devices of a mesh, seen from one of them: `Ranks` are some."""

    mesh: Mesh
    rank: int

    def group(self, axes: Iterable[str]) -> Group:
        """Those that differ from this one only on `axes`. All members have to ask."""


def plan_exchange(
    shape: tuple[int, ...], dtype: torch.dtype, src: Sharding, dst: Sharding, ranks: Peers
) -> Exchange | ChunkedAllReduce:
    """This rank's part in going from `src` to `dst`. All ranks of the mesh have to plan it, in the same order."""
    reshard = reshard_of(shape, dtype, src, dst)
    types = TileTypes(src.tile_shape(shape), dst.tile_shape(shape), dtype)
    deliveries = share_out(reshard.deliveries, src, dst, types.src_shape)
    group = _group_for(deliveries, ranks)
    mine = next((delivery for delivery in deliveries if ranks.rank in delivery.ranks), None)
    if group and mine and _in_chunks(deliveries, len(group.members), types):
        ordered = [source for source, _ in mine.pieces[0].sources]
        return ChunkedAllReduce(ranks.rank, group, ordered, types, reshard.combine)
    return Exchange(deliveries, ranks.rank, group, types, reshard.combine, reshard.blank)


class RankRedistribution:
    """This rank's part in a redistribution: the plan's moves, one exchange each. All ranks of the mesh have to make
    it, and to call it, in the same order."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, src: Sharding, dst: Sharding, ranks: Peers) -> None:
        layouts = [src, *(move.after for move in plan_moves(src, dst, shape))]
        self._steps = [
            (
                plan_exchange(shape, dtype, before, after, ranks),
                after.tile_shape(shape),
                reshard_of(shape, dtype, before, after).in_place,
            )
            for before, after in pairwise(layouts)
        ]
        self._padded = dst.valid_extent(shape, ranks.rank) != dst.tile_shape(shape)

    def __call__(self, tile: torch.Tensor) -> torch.Tensor:
        """The new tile of this rank, from the old one, which is not written. Padding is zero."""
        now = tile
        for number, (exchange, shape, in_place) in enumerate(self._steps, 1):
            if in_place and now is not tile:
                exchange(now, now)
                continue
            new = torch.empty(shape, dtype=tile.dtype, device=tile.device)
            if self._padded and number == len(self._steps):
                fill(new, 0)
            exchange(now, new)
            now = new
        return now


class Changes:
    """What `ranks` have of tensors, brought into other layouts: made ready once for each change. Whoever asks for one
    has all ranks ask for it; `faults` says whose fault it is where one fails."""

    def __init__(self, ranks: Ranks, faults: Faults) -> None:
        self._ranks, self._faults = ranks, faults
        self._known: Recent[tuple, RankRedistribution] = Recent(KERNEL_SIZES)

    def tile(self, tiling: Tiling, to: Sharding, tile: torch.Tensor) -> torch.Tensor:
        """The tile of what lies as `tiling`, in another layout."""
        key = (tiling.shape, tiling.dtype, tiling.sharding, to)
        change = self._known.made(key, lambda: RankRedistribution(*key, self._ranks))
        try:
            return change(tile)
        except RuntimeError as error:
            what = f"'{tiling.sharding}' -> '{to}' of a tensor {tiling.shape} {tiling.dtype}"
            self._faults.blame(error, f"a change of layout, {what}", range(self._ranks.mesh.num_devices))

    def part(self, tiling: Tiling, to: Sharding, local: torch.Tensor) -> torch.Tensor:
        """The part without padding, of a part or a tile."""
        if to == tiling.sharding:
            return local if local.shape == tiling.valid_shape else tiling.valid(local)
        new = Tiling(tiling.shape, tiling.dtype, to, self._ranks.rank)
        return new.valid(self.tile(tiling, to, tiling.tile(local)))


def _group_for(deliveries: Sequence[Delivery], ranks: Peers) -> Group | None:
    """The smallest group in which everything that is sent stays; None if nothing is."""
    mesh = ranks.mesh
    pairs = {
        (source, target)
        for delivery in deliveries
        for piece in delivery.pieces
        for source, _ in piece.sources
        for target in delivery.ranks
        if source != target
    }
    if not pairs:
        return None
    at = {rank: mesh.coordinate(rank) for pair in pairs for rank in pair}
    axes = {axis for source, target in pairs for axis in mesh if at[source][axis] != at[target][axis]}
    return ranks.group(axes)


def _in_chunks(deliveries: Sequence[Delivery], count: int, types: TileTypes) -> bool:
    """Large whole tiles of the whole group combine to one, which everybody gets."""
    whole = all(
        len(d.ranks) == count == len(piece.sources)
        and len(d.pieces) == 1
        and not piece.region
        and not any(region for _, region in piece.sources)
        for d in deliveries
        for piece in d.pieces
    )
    size = math.prod(types.src_shape) * types.dtype.itemsize
    return whole and not any(d.blank for d in deliveries) and size * (count - 1) > _IN_CHUNKS_FROM


def share_out(
    deliveries: Sequence[Delivery], src: Sharding, dst: Sharding, src_shape: tuple[int, ...]
) -> tuple[Delivery, ...]:
    """The same deliveries, from other ranks with the same tile where that takes load from the busiest sender. Only
    replicas along axes that the redistribution changes anyway take part, and only where nothing is reduced."""
    replicated = [
        axis for axis in src.mesh if src.placement(axis) == Replicate() and dst.placement(axis) != Replicate()
    ]
    reduces = any(len(piece.sources) != 1 for delivery in deliveries for piece in delivery.pieces)
    if not replicated or reduces or any(delivery.blank for delivery in deliveries):
        return tuple(deliveries)
    turns: Counter[int] = Counter()
    shared = tuple(
        Delivery((target,), tuple(_from_next(piece, target, src, replicated, turns) for piece in d.pieces), False)
        for d in deliveries
        for target in d.ranks
    )
    fewer = _busiest(shared, src_shape) < _busiest(deliveries, src_shape)
    return shared if fewer else tuple(deliveries)


def _from_next(piece: Piece, target: int, src: Sharding, replicated: list[str], turns: Counter[int]) -> Piece:
    """The piece from whose turn it is; what the target has itself comes from there."""
    (source, region), mesh = piece.sources[0], src.mesh
    at = mesh.coordinate(source)
    places = product(*(range(mesh.size(axis)) for axis in replicated))
    holders = [mesh.rank(at | dict(zip(replicated, place, strict=True))) for place in places]
    if target in holders:
        return Piece(piece.region, ((target, region),))
    turn = turns[holders[0]]
    turns[holders[0]] += 1
    return Piece(piece.region, ((holders[turn % len(holders)], region),))


def _busiest(deliveries: Sequence[Delivery], src_shape: tuple[int, ...]) -> int:
    """The most elements that a rank sends."""
    sent: Counter[int] = Counter()
    for delivery in deliveries:
        for piece in delivery.pieces:
            for source, region in piece.sources:
                others = sum(target != source for target in delivery.ranks)
                sent[source] += others * region_size(region, src_shape)
    return max(sent.values(), default=0)


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
