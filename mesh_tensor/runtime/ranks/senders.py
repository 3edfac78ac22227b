"""Senders: where several ranks hold the same, they take turns in sending it to those who need it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

from mesh_tensor.base.sharding import Replicate, Sharding
from mesh_tensor.runtime.reshard import Delivery, Piece

from .sections import region_size


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
