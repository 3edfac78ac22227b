"""Collectives: one record each, of all that any part of the compiler has to know about one.

What runs them looks at the layouts before and after, so a new one needs nothing there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy

from .placement import Partial, Placement, Replicate, Shard

State = tuple[int, ...]


class Boxes(Protocol):
    """Which box of a tensor every device holds in a state: a layout as a number per axis."""

    def volume(self, state: State) -> int:
        """The elements of the largest tile, padding included."""

    def volumes(self, state: State) -> numpy.ndarray:
        """The elements of every device's box, without padding."""

    def missing(self, state: State, wanted: State) -> int:
        """The most elements that a device lacks in `state` of its box in `wanted`."""


#: How messages go -> the devices in a group -> the messages that each receives.
ROUTES: dict[str, Callable[[int], int]] = {
    "nowhere": lambda group: 0,
    "direct": lambda group: 1,
    "ring": lambda group: group - 1,
    "ring twice": lambda group: 2 * (group - 1),
    "each to each": lambda group: group - 1,
    "neighbours": lambda group: min(2, group - 1),
}


@dataclass(frozen=True)
class CollectiveKind:
    """What the devices that differ only in their coordinates on some axes can do together.

    before, after  what each of the axes does with the tensor; None where boxes go directly from any layout to another
    received       (boxes, state before, state after, devices in a group) -> elements that the busiest device receives,
                   with the usual algorithms: rings, and boxes straight to whoever needs them
    route          how messages go: a key of ROUTES
    counts_as      how many collectives it is worth, to whoever compares plans that move as much"""

    name: str
    before: type[Placement] | None
    after: type[Placement] | None
    received: Callable[[Boxes, State, State, int], int]
    route: str
    counts_as: int = 1

    @property
    def is_direct(self) -> bool:
        """Whether boxes go straight from any layout to another; the two layouts say all."""
        return self.before is None

    @property
    def sends(self) -> bool:
        """Whether devices send anything."""
        return self.route != "nowhere"

    def messages(self, group: int) -> int:
        """How many messages each of the `group` devices receives."""
        return ROUTES[self.route](group)

    @property
    def reduces(self) -> bool:
        """Whether values are combined."""
        return self.before is Partial

    @property
    def works_in_place(self) -> bool:
        """Whether the new tile may take the memory of the old one."""
        return self.reduces and self.after is Replicate

    def placements(self, op: str | None, src_dim: int | None, dst_dim: int | None) -> tuple[Placement, Placement]:
        """What each of the axes does with the tensor before and after; of those that are not direct."""
        assert self.before is not None
        assert self.after is not None
        return _placement(self.before, op, src_dim), _placement(self.after, op, dst_dim)


def _placement(kind: type[Placement], op: str | None, dim: int | None) -> Placement:
    if kind is Partial:
        return Partial(str(op))
    return Replicate() if kind is Replicate else Shard(-1 if dim is None else dim)


def _nothing(boxes: Boxes, before: State, after: State, group: int) -> int:
    return 0


def _lacking(boxes: Boxes, before: State, after: State, group: int) -> int:
    return boxes.missing(before, after)


def _ring(boxes: Boxes, before: State, after: State, group: int) -> int:
    return -(-2 * (group - 1) * boxes.volume(before) // group)


def _parts(boxes: Boxes, before: State, after: State, group: int) -> int:
    return (group - 1) * int(boxes.volumes(after).max())


_TABLE = (
    CollectiveKind("all_reduce", Partial, Replicate, _ring, "ring twice"),
    CollectiveKind("reduce_scatter", Partial, Shard, _parts, "ring"),
    CollectiveKind("all_gather", Shard, Replicate, _lacking, "ring"),
    CollectiveKind("all_to_all", Shard, Shard, _lacking, "each to each"),
    # every device keeps its share of what all have
    CollectiveKind("slice", Replicate, Shard, _nothing, "nowhere", counts_as=0),
    # coordinate 0 keeps the value, the others take the op's neutral element
    CollectiveKind("to_partial", Replicate, Partial, _nothing, "nowhere", counts_as=0),
    # every device gets one device's whole tile, or boxes of several devices' tiles
    CollectiveKind("permute", None, None, _lacking, "direct"),
    CollectiveKind("exchange", None, None, _lacking, "each to each", counts_as=2),
    # every device gets a window: its tile and the margins of its neighbours'
    CollectiveKind("halo", None, None, _lacking, "neighbours"),
)
COLLECTIVES = {kind.name: kind for kind in _TABLE}

#: What leads from one placement of the axes to another.
BETWEEN = {(kind.before, kind.after): kind for kind in _TABLE if not kind.is_direct}
