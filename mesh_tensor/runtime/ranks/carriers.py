"""Carriers: how the all-to-alls of an exchange travel: as tagged messages, or as collectives of a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from zlib import crc32

import torch
import torch.distributed as dist

from .calls import Calls
from .ranks import Group
from .sections import Sections, Span

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
        self._sends = [_spans(members, rank, plan.send_counts) for plan in plans]
        self._receives = [_spans(members, rank, plan.receive_counts) for plan in plans]

    def __call__(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Wait:
        lane = self._calls.lane()
        tag, wire = lane.tag(self._group), self._calls.wire
        assert wire is not None
        works = []
        lane.opened += 1
        for flat, spans in zip(sent, self._sends, strict=True):
            works += [wire.send(section(flat, span), peer, tag) for peer, span in spans[1:]]
        for flat, spans in zip(received, self._receives, strict=True):
            works += [wire.receive(section(flat, span), peer, tag) for peer, span in spans[1:]]
        for out, take, flat, give in zip(received, self._receives, sent, self._sends, strict=True):
            if give[0][1][1]:  # what this rank keeps
                section(out, take[0][1]).copy_(section(flat, give[0][1]))
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
        receive, send = plan.receive_counts, plan.send_counts
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


def section(flat: torch.Tensor, span: Span) -> torch.Tensor:
    """A part of a flat tensor: itself, if it is all of it."""
    start, count = span
    return flat if count == flat.numel() else flat[start : start + count]
