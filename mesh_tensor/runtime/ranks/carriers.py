"""Carriers: how the all-to-alls of an exchange travel: as tagged messages, or as collectives of a process group.
Sections say how one lies in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from zlib import crc32

import torch
import torch.distributed as dist

from mesh_tensor.runtime.reshard import Region

from .calls import Calls
from .ranks import Group

# Dtypes that the collectives of every backend move; others travel as bytes.
MOVED = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
MOVED |= {torch.int8, torch.uint8, torch.int32, torch.int64}

Wait = Callable[[], None]
# From the buffers to fill and those to send, one each per all-to-all, to the wait for all of them.
Carrier = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Wait]


def carrier(group: Group, rank: int, plans: Sequence[Sections], dtype: torch.dtype) -> Carrier:
    """What carries these all-to-alls of `rank` in its group."""
    if group.tagged:
        assert group.calls is not None
        return Messages(group.calls, group.members, rank, plans)
    return Collectives(group, plans, dtype not in MOVED)


class Messages:
    """From each rank to each, told apart by their tags."""

    def __init__(self, calls: Calls, members: Sequence[int], rank: int, plans: Sequence[Sections]) -> None:
        self._calls, self._group = calls, crc32(repr(sorted(members)).encode())
        sends = [_spans(members, rank, plan.send_counts) for plan in plans]
        receives = [_spans(members, rank, plan.receive_counts) for plan in plans]
        self._sends = [(number, *to) for number, spans in enumerate(sends) for to in spans[1:]]
        self._receives = [(number, *source) for number, spans in enumerate(receives) for source in spans[1:]]
        kept = enumerate(zip(receives, sends, strict=True))
        self._kept = [(number, take[0][1], give[0][1]) for number, (take, give) in kept if give[0][1][1]]

    def __call__(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Wait:
        lane = self._calls.lane()
        tag, wire = lane.tag(self._group), self._calls.wire
        assert wire is not None
        lane.opened += 1
        works = [wire.send(section(sent[number], span), peer, tag) for number, peer, span in self._sends]
        works += [wire.receive(section(received[number], span), peer, tag) for number, peer, span in self._receives]
        for number, take, give in self._kept:
            section(received[number], take).view(-1).copy_(section(sent[number], give).view(-1))
        return partial(lane.wait, works)


class Collectives:
    """Over a process group, which pairs collectives by their order: ranks make sure once a call that they are in the
    same one."""

    def __init__(self, group: Group, plans: Sequence[Sections], raw: bool) -> None:
        self._group, self._plans, self._raw = group, plans, raw

    def __call__(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Wait:
        if self._group.calls is not None:
            self._group.calls.meet()
        return partial(_wait, [self._start(*each) for each in zip(received, sent, self._plans, strict=True)])

    def _start(self, out: torch.Tensor, sent: torch.Tensor, plan: Sections) -> dist.Work | None:
        receive, send, out, sent = plan.receive_counts, plan.send_counts, out.view(-1), sent.view(-1)
        if self._raw:
            size = out.dtype.itemsize
            out, sent = out.view(torch.uint8), sent.view(torch.uint8)
            receive, send = [n * size for n in receive], [n * size for n in send]
        return dist.all_to_all_single(out, sent, receive, send, group=self._group.process_group, async_op=True)


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _spans(members: Sequence[int], rank: int, counts: Sequence[int]) -> list[tuple[int, Span]]:
    """Where each member's elements are: this rank's first, then, of those that have some, each next one's."""
    starts = [sum(counts[:index]) for index in range(len(counts))]
    here, count = members.index(rank), len(members)
    order = [(here + step) % count for step in range(count)]
    return [(members[i], (starts[i], counts[i])) for i in order if counts[i] or i == here]


def section(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """A part of a contiguous tensor's elements, flat; the tensor itself, if it is all of them."""
    start, count = span
    return tensor if count == tensor.numel() else tensor.view(-1)[start : start + count]


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
