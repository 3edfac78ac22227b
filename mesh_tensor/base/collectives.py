"""Collectives: one record each, of all that any part of the compiler has to know about one; and what they take on a
Machine: what starts them, their messages, and their bytes over the links.

What runs them looks at the layouts before and after, so a new one needs nothing there.

Devices are numbered as the mesh orders them, so a group along the last axis are neighbours, and one along the first
axis takes a device of every block. A group that leaves a block uses the outer links of all of its members in there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from .machine import Link, Machine
from .mesh import Mesh
from .placement import Partial, Placement, Replicate, Shard

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
    received       what the busiest device receives, with the usual algorithms (rings, and boxes straight to whoever
                   needs them): "nothing"; what it is "lacking" of its box; its tile "around" the ring twice; or the
                   "parts" of its tile that the others have
    route          how messages go: a key of ROUTES
    counts_as      how many collectives it is worth, to whoever compares plans that move as much"""

    name: str
    before: type[Placement] | None
    after: type[Placement] | None
    received: str
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


_TABLE = (
    CollectiveKind("all_reduce", Partial, Replicate, "around", "ring twice"),
    CollectiveKind("reduce_scatter", Partial, Shard, "parts", "ring"),
    CollectiveKind("all_gather", Shard, Replicate, "lacking", "ring"),
    CollectiveKind("all_to_all", Shard, Shard, "lacking", "each to each"),
    # every device keeps its share of what all have
    CollectiveKind("slice", Replicate, Shard, "nothing", "nowhere", counts_as=0),
    # coordinate 0 keeps the value, the others take the op's neutral element
    CollectiveKind("to_partial", Replicate, Partial, "nothing", "nowhere", counts_as=0),
    # every device gets one device's whole tile, or boxes of several devices' tiles
    CollectiveKind("permute", None, None, "lacking", "direct"),
    CollectiveKind("exchange", None, None, "lacking", "each to each", counts_as=2),
    # every device gets a window: its tile and the margins of its neighbours'
    CollectiveKind("halo", None, None, "lacking", "neighbours"),
)
COLLECTIVES = {kind.name: kind for kind in _TABLE}

#: What leads from one placement of the axes to another.
BETWEEN = {(kind.before, kind.after): kind for kind in _TABLE if not kind.is_direct}


@dataclass(frozen=True)
class Reach:
    """A group of `size` devices, which lie in one block of the machine's link number `level`. `crossed`: the links
    that are used, from the innermost, each with how many of the group's members share one block below it."""

    size: int
    level: int
    crossed: tuple[tuple[Link, int], ...]

    @property
    def rate(self) -> float:
        """Bytes per second and member around a ring: that of the slowest link, of which blocks use all that they
        have."""
        return min(link.rate * members for link, members in self.crossed)

    @property
    def link(self) -> Link:
        """The outermost link."""
        return self.crossed[-1][0]


@lru_cache(maxsize=4096)
def reach(machine: Machine, mesh: Mesh, axes: tuple[str, ...]) -> Reach:
    """How far the groups along `axes` reach. Refused where nothing connects as many devices."""
    stride, places = 1, []
    for axis in reversed(mesh.axis_names):
        size = mesh.size(axis)
        if axis in axes and size > 1:
            places.append((stride, size))
        stride *= size
    group = math.prod(size for _, size in places)
    span = max((stride * size for stride, size in places), default=1)
    level = machine.links.index(machine.link(span))
    while level + 1 < len(machine.links) and _straddles(machine.links[level], span, stride):
        level += 1
    if _straddles(machine.links[level], span, stride):
        machine.link(stride)  # says that nothing connects them
    crossed, inside = [], 1
    for link in machine.links[: level + 1]:
        whole = link.devices is None or stride <= link.devices
        members = group if whole else _members(places, link.devices or 1)
        if members > inside:
            crossed.append((link, inside))
        inside = members
    return Reach(group, level, tuple(crossed) or ((machine.links[level], 1),))


def collective_time(machine: Machine, kind: str, nbytes: float, mesh: Mesh, axes: Sequence[str]) -> float:
    """Seconds of a collective over `axes` of which the busiest device receives `nbytes` (around a ring, or straight
    from whoever has them); 0 where nothing is sent. The best algorithm counts."""
    if not nbytes:
        return 0.0
    groups = reach(machine, mesh, tuple(axes))
    return _TIMES[COLLECTIVES[kind].route](groups, nbytes) if groups.size > 1 else 0.0


def _straddles(link: Link, span: int, devices: int) -> bool:
    """Whether, of all groups that lie in `span` neighbours each, one lies in two of the blocks that a link connects."""
    return link.devices is not None and devices > link.devices and link.devices % span > 0


def _members(places: Sequence[tuple[int, int]], devices: int) -> int:
    """How many members of a group lie in a block of `devices` neighbours; where blocks have other numbers of them, the
    fewest, whose links the others wait for."""
    return math.prod(_along(stride, size, devices) for stride, size in places)


def _along(stride: int, size: int, devices: int) -> int:
    """The same of every `stride`-th device, `size` of them."""
    most = max(1, devices // stride)
    if devices % (stride * size) == 0 or size % most == 0 and size > most:
        return min(size, most)
    return math.gcd(size, most) if size > most or devices % stride == 0 else 1


def _ring(groups: Reach, nbytes: float) -> float:
    """One message to the next member, until all have been around."""
    return _messages(groups, groups.size - 1) + nbytes / groups.rate


def _ring_twice(groups: Reach, nbytes: float) -> float:
    """Around the ring twice; or up and down a tree, with fewer messages of the whole tile."""
    ring = _messages(groups, 2 * (groups.size - 1)) + nbytes / groups.rate
    depth, whole = math.ceil(math.log2(groups.size)), nbytes * groups.size / (groups.size - 1)
    return min(ring, _messages(groups, 2 * depth) + whole / groups.rate)


def _each_to_each(groups: Reach, nbytes: float) -> float:
    """From each to each: what leaves a block leaves it over each member's own link."""
    others, time, near = groups.size - 1, 0.0, 1
    for (link, _), reached in zip(groups.crossed, [*(m for _, m in groups.crossed[1:]), groups.size], strict=True):
        time = max(time, nbytes * (reached - near) / others / link.rate)
        near = reached
    return _messages(groups, others) + time


def _direct(groups: Reach, nbytes: float) -> float:
    """One message over the outermost link."""
    return _messages(groups, 1) + nbytes / groups.link.rate


def _neighbours(groups: Reach, nbytes: float) -> float:
    """One message from either side, over the outermost link."""
    return _messages(groups, min(2, groups.size - 1)) + nbytes / groups.link.rate


def _messages(groups: Reach, count: int) -> float:
    return groups.link.start + (count - 1) * groups.link.hop


_TIMES: dict[str, Callable[[Reach, float], float]] = {
    "nowhere": lambda groups, nbytes: 0.0,
    "direct": _direct,
    "ring": _ring,
    "ring twice": _ring_twice,
    "each to each": _each_to_each,
    "neighbours": _neighbours,
}
