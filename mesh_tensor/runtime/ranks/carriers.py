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
