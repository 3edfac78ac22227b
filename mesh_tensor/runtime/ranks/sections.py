"""Sections: how one all-to-all of a rank lies in memory: what it sends and receives, member by member, and where."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mesh_tensor.runtime.reshard import Region

Span = tuple[int, int]  # first element and number of elements, in a contiguous tile


@dataclass(frozen=True)
class Receipt:
    """Something to receive: source `position` of piece `piece`, a `region` of the sender's tile. It is all there is of
    the region `target` of the new tile, or one of several that combine (None)."""

    piece: int
    position: int
    region: Region
    target: Region | None


@dataclass(frozen=True)
class Sections:
    """One all-to-all. `send_span`: what is sent lies so in the old tile (else `regions` are packed); `receive_span`:
    what is received goes there in the new tile (else `offsets` says where in the buffer (piece, position) is)."""

    send_counts: list[int]
    receive_counts: list[int]
    regions: tuple[Region, ...]
    send_span: Span | None
    receive_span: Span | None
    offsets: dict[tuple[int, int], int]
    copied: int


def sections(
    members: Sequence[int],
    me: int,
    sends: Mapping[int, list[Region]],
    receipts: Mapping[int, list[Receipt]],
    src_shape: tuple[int, ...],
    dst_shape: tuple[int, ...],
) -> Sections:
    """The all-to-all that copies least. What this rank keeps goes along only where everything then lies in one
    piece."""
    sent_out = {member: regions for member, regions in sends.items() if member != me}
    got_in = {member: expected for member, expected in receipts.items() if member != me}
    candidates = [
        _sections(members, sending, receiving, src_shape, dst_shape)
        for sending, receiving in ((sent_out, got_in), (sends, receipts))
    ]
    return min(candidates, key=lambda candidate: candidate.copied)


def _sections(
    members: Sequence[int],
    sends: Mapping[int, list[Region]],
    receipts: Mapping[int, list[Receipt]],
    src_shape: tuple[int, ...],
    dst_shape: tuple[int, ...],
) -> Sections:
    regions = [region for member in members for region in sends.get(member, ())]
    expected = [receipt for member in members for receipt in receipts.get(member, ())]
    sizes = [region_size(receipt.region, src_shape) for receipt in expected]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    send_span = _joined(regions, src_shape)
    targets = [receipt.target for receipt in expected if receipt.target is not None]
    receive_span = _joined(targets, dst_shape) if len(targets) == len(expected) else None
    sent = sum(region_size(region, src_shape) for region in regions)
    copied = sum(sizes) + (sent if send_span is None else 0)
    if receive_span is None:
        copied += sum(size for size, r in zip(sizes, expected, strict=True) if r.target is not None)
    return Sections(
        send_counts=[sum(region_size(r, src_shape) for r in sends.get(m, ())) for m in members],
        receive_counts=[sum(region_size(r.region, src_shape) for r in receipts.get(m, ())) for m in members],
        regions=tuple(regions),
        send_span=send_span,
        receive_span=receive_span,
        offsets={(r.piece, r.position): start for r, start in zip(expected, starts, strict=True)},
        copied=copied,
    )


def region_shape(region: Region, whole: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a region of a tile; an empty region is all of it."""
    return tuple(p.stop - p.start for p in region) if region else whole


def region_size(region: Region, whole: tuple[int, ...]) -> int:
    """How many elements the region has."""
    return math.prod(region_shape(region, whole))


def _joined(regions: Iterable[Region], shape: tuple[int, ...]) -> Span | None:
    """The regions one after the other as one piece of memory of a tile, if they are."""
    first, end = 0, None
    for region in regions:
        span = _span(region, shape)
        if span is None or end not in (None, span[0]):
            return None
        first = span[0] if end is None else first
        end = span[0] + span[1]
    return (first, 0 if end is None else end - first)


def _span(region: Region, shape: tuple[int, ...]) -> Span | None:
    extent = region_shape(region, shape)
    split = next((dim for dim, size in enumerate(extent) if size != 1), len(extent))
    if extent[split + 1 :] != shape[split + 1 :]:
        return None
    start = 0
    for dim, size in enumerate(shape):
        start = start * size + (region[dim].start if region else 0)
    return start, math.prod(extent)
