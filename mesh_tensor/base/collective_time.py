"""What a collective takes on a Machine: what starts it, its messages, and its bytes over the links that it crosses.

Devices are numbered as the mesh orders them, so a group along the last axis are neighbours, and one along the first
axis takes a device of every block. A group that leaves a block uses the outer links of all of its members in there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from .collectives import COLLECTIVES
from .machine import Link, Machine
from .mesh import Mesh


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
    """How far the groups along `axes` reach.

    Raises:
        MeshTensorError: nothing connects as many devices.
    """
    stride, places = 1, []
    for axis in reversed(mesh.axis_names):
        size = mesh.size(axis)
        if axis in axes and size > 1:
            places.append((stride, size))
        stride *= size
    group = math.prod(size for _, size in places)
    level = machine.links.index(machine.link(max((stride * size for stride, size in places), default=1)))
    crossed, inside = [], 1
    for link in machine.links[: level + 1]:
        members = group if link.devices is None else _members(places, link.devices)
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


def _members(places: Sequence[tuple[int, int]], devices: int) -> int:
    """How many members of a group lie in a block of `devices` neighbours."""
    return math.prod(min(size, max(1, devices // stride)) for stride, size in places)


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
