"""From one layout of a tensor to another on the same mesh: who sends which part of its tile to whom.

This is right for every pair of layouts, uneven ones included: a destination tile is a box of the global tensor, and it
is filled from the source tiles' boxes that it meets. Each collective is one such pair (see `collectives`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch

from mesh_tensor.base.dtypes import ALIGNMENT
from mesh_tensor.base.reductions import neutral
from mesh_tensor.base.sharding import Partial, Shard, Sharding
from mesh_tensor.targets.dtypes import dtype_name

from .elementwise import combiner, copy, fill

Region = tuple[slice, ...]
Tiles = list[torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """A region of a destination tile, and the regions of the source tiles (by rank, in order) that combine to it."""

    region: Region
    sources: tuple[tuple[int, Region], ...]


@dataclass(frozen=True)
class Delivery:
    """The destination devices `ranks` all get the same tile: `pieces`, on the neutral element where `blank`."""

    ranks: tuple[int, ...]
    pieces: tuple[Piece, ...]
    blank: bool


class Reshard:
    """Turns tiles of layout `src` into tiles of layout `dst`. Planned once, run often.

    Only valid extents are read, except where whole tiles are combined position by position (padding meets padding).
    `deliveries` say what goes where, `combine` how several sources become one, `blank` is what is left where nothing is
    delivered."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, src: Sharding, dst: Sharding) -> None:
        self.deliveries = tuple(_deliveries(tuple(shape), src, dst))
        reduced = [op for axis, op in src.partial if dst.placement(axis) != Partial(op)]
        self.combine = combiner(reduced[0] if reduced else "sum", dtype)
        started = [op for axis, op in dst.partial if src.placement(axis) != Partial(op)]
        started += [window.outside for _, window in dst.windows]
        self.blank = neutral(started[0], dtype_name(dtype)) if started else 0
        self.in_place = src.tile_shape(shape) == dst.tile_shape(shape) and all(map(_stays, self.deliveries))

    def __call__(self, src: Tiles, dst: Tiles, *, share: bool = False, borrow: bool = False) -> None:
        """Fill `dst`. With `share`, devices that get the same tile have one memory: `dst`'s entries become that one.
        With `borrow`, too, it may be memory of `src`.

        `src` and `dst` may be the same memory where `in_place` says so."""
        for delivery in self.deliveries:
            leader, followers = delivery.ranks[0], delivery.ranks[1:]
            out = dst[leader]
            there = _lies_in(src, delivery, out) if borrow else None
            if there is not None:
                for rank in delivery.ranks:
                    dst[rank] = there
                continue
            if delivery.blank:
                fill(out, self.blank)
            for piece in delivery.pieces:
                self.combine(part(out, piece.region), [part(src[rank], region) for rank, region in piece.sources])
            for rank in followers:
                if share:
                    dst[rank] = out
                else:
                    copy(dst[rank], out)

    def side_by_side(self, src: Tiles, rank: int, like: torch.Tensor) -> torch.Tensor | None:
        """The tile that a device gets, as a view of `src`, if all of it lies there as it lies in `like`."""
        delivery = next((delivery for delivery in self.deliveries if rank in delivery.ranks), None)
        return None if delivery is None else _lies_in(src, delivery, like)


@lru_cache(maxsize=256)
def _tiles(layout: Sharding, shape: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    return layout.tiles(shape)


@lru_cache(maxsize=256)
def reshard_of(shape: tuple[int, ...], dtype: torch.dtype, src: Sharding, dst: Sharding) -> Reshard:
    """The Reshard of these, planned once."""
    return Reshard(shape, dtype, src, dst)


def part(tile: torch.Tensor, region: Region) -> torch.Tensor:
    """That region of a tile, as a view; an empty region is all of it."""
    return tile[region] if region else tile


def _lies_in(src: Tiles, delivery: Delivery, out: torch.Tensor) -> torch.Tensor | None:
    """The tile that a delivery makes, as a view, if all of its pieces lie side by side already: `out` is like it."""
    if delivery.blank or any(len(piece.sources) > 1 for piece in delivery.pieces):
        return None
    places, elements = set(), 0
    for piece in delivery.pieces:
        ((rank, region),) = piece.sources
        given, taken = part(src[rank], region), part(out, piece.region)
        if given.stride() != out.stride():
            return None
        start = given.storage_offset() - taken.storage_offset() + out.storage_offset()
        places.add((given.untyped_storage().data_ptr(), start))
        elements += given.numel()
    if len(places) != 1 or elements != out.numel():
        return None
    ((_, start),) = places
    tiles = [src[piece.sources[0][0]] for piece in delivery.pieces]
    reaching = max(tiles, key=lambda tile: tile.untyped_storage().nbytes())  # of one memory torch may have several
    view = reaching.as_strided(out.shape, out.stride(), start)
    return view if view.data_ptr() % ALIGNMENT == 0 else None


def _stays(delivery: Delivery) -> bool:
    """No other device reads what this delivery overwrites."""
    whole = all(not piece.region for piece in delivery.pieces)
    senders = {rank for piece in delivery.pieces for rank, _ in piece.sources}
    return whole and senders <= set(delivery.ranks)


def _deliveries(shape: tuple[int, ...], src: Sharding, dst: Sharding) -> Iterator[Delivery]:
    """Devices with the same pieces, to the same contributions of partial tensors, share a Delivery; deliveries go by
    their first rank."""
    ranks_of: dict[tuple[bool, tuple[tuple, ...], tuple[int, ...]], list[int]] = {}
    pieces_of = {}
    blank_axes = [axis for axis, op in dst.partial if src.placement(axis) != Partial(op)]
    changed = [axis for axis in src.mesh if src.placement(axis) != dst.placement(axis)]
    for rank in range(src.mesh.num_devices):
        at = src.mesh.coordinate(rank)
        blank = any(at[axis] for axis in blank_axes)
        pieces = () if blank else _pieces(shape, src, dst, rank, changed)
        blank = blank or _reaches_out(shape, dst, rank)
        contribution = tuple(at[axis] for axis, _ in dst.partial)
        places = tuple((_key(p.region), *((r, _key(region)) for r, region in p.sources)) for p in pieces)
        key = (blank, places, contribution)
        ranks_of.setdefault(key, []).append(rank)
        pieces_of[key] = pieces
    for key, ranks in ranks_of.items():
        if key[0] or key[1]:
            yield Delivery(tuple(ranks), pieces_of[key], key[0])


def _key(region: Region) -> tuple[tuple[int, int], ...]:
    return tuple((part.start, part.stop) for part in region)


def _pieces(shape: tuple[int, ...], src: Sharding, dst: Sharding, rank: int, changed: list[str]) -> tuple[Piece, ...]:
    """What fills the tile of `rank`: from devices that differ on the changed axes if they have all of it, else from
    any device that has the rest."""
    wanted = math.prod(sum(high - low for _, low, high in parts) for parts in _parts(shape, dst, rank))
    for free in (changed, list(src.mesh)):
        pieces = tuple(_pieces_from(shape, src, dst, rank, free))
        if sum(volume for _, volume in pieces) == wanted:
            return tuple(piece for piece, _ in pieces)
    raise AssertionError(f"the tiles of {src} do not cover device {rank}'s tile of {dst}")


def _parts(shape: tuple[int, ...], layout: Sharding, rank: int) -> list[list[tuple[int, int, int]]]:
    """Per dim what the tile of `rank` is made of: where in the tile, and which elements of the tensor (from, to)."""
    found = []
    for dim, (start, extent) in enumerate(zip(*_tiles(layout, shape)[rank], strict=True)):
        window = layout.window(dim)
        found.append([(0, start, start + extent)] if window is None else window.parts(shape[dim], start))
    return found


def _reaches_out(shape: tuple[int, ...], layout: Sharding, rank: int) -> bool:
    """Whether some of a device's window lies outside the tensor."""
    parts = _parts(shape, layout, rank) if layout.windows else []
    return any(sum(high - low for _, low, high in parts[dim]) < window.length for dim, window in layout.windows)


def _pieces_from(
    shape: tuple[int, ...], src: Sharding, dst: Sharding, rank: int, free: list[str]
) -> Iterator[tuple[Piece, int]]:
    mesh, at = src.mesh, src.mesh.coordinate(rank)
    to, extent = _tiles(dst, shape)[rank]
    wanted = list(product(*_parts(shape, dst, rank)))
    split = [axis for axis in free if isinstance(src.placement(axis), Shard)]
    summed = [axis for axis, op in src.partial if dst.placement(axis) != Partial(op)]
    alike = not dst.windows and src.tile_shape(shape) == dst.tile_shape(shape)
    for place in product(*(range(mesh.size(axis)) for axis in split)):
        here = at | dict(zip(split, place, strict=True))
        first = mesh.rank(here | dict.fromkeys(summed, 0))
        start, size = _tiles(src, shape)[first]
        for box in wanted:
            low = [max(a, b) for (_, a, _), b in zip(box, start, strict=True)]
            high = [min(a, b + n) for (_, _, a), b, n in zip(box, start, size, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            ranks = [mesh.rank(here | dict(zip(summed, c, strict=True))) for c in _coordinates(src, summed)]
            region = _region(low, high, [a - where for where, a, _ in box])
            source = _region(low, high, start)
            if alike and start == to and size == extent:
                region = source = ()
            volume = math.prod(b - a for a, b in zip(low, high, strict=True))
            yield Piece(region, tuple((r, source) for r in ranks)), volume


def _coordinates(src: Sharding, axes: list[str]) -> Iterator[tuple[int, ...]]:
    return product(*(range(src.mesh.size(axis)) for axis in axes))


def _region(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> Region:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
