"""The search for the cheapest way from one layout to another: A* over placements, with single collectives as edges.

States, and what devices hold in them, are those of `boxes.py`. What the search minimises, in this order: the elements
that the busiest device receives, the collectives (an exchange counts as two: it involves more devices than any of
them), the messages, the steps. So no plan moves more than another that it could have found, whatever the sizes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, combinations

from mesh_tensor.base.collectives import BETWEEN, COLLECTIVES
from mesh_tensor.base.placement import Partial, Placement, Replicate, Shard

from .boxes import ORDER, PARTIAL, WHOLE, Boxes, State, axes_on, dim_at, place_of

Cost = tuple[int, int, int, int]  # elements received, collectives, messages, steps


@dataclass(frozen=True)
class Edge:
    """One collective: over which axes (by number), and the state after it."""

    kind: str
    axes: tuple[int, ...]
    after: State
    src_dim: int | None = None
    dst_dim: int | None = None


class Search:
    """From `start` to `goal`, which is partial nowhere. Axes on which the two agree stay as they are."""

    def __init__(self, boxes: Boxes, start: State, goal: State) -> None:
        self._boxes, self._start, self._goal = boxes, start, goal
        self._moved = [axis for axis, place in enumerate(start) if place != goal[axis]]
        self._summed = [axis for axis in self._moved if start[axis] == PARTIAL]
        dims = self._dims()
        self._ends_at = tuple(map(dim_at, goal))
        self._choices = {
            a: {dim_at(start[a]), self._ends_at[a], WHOLE, *(dims if a in self._summed else ())} for a in self._moved
        }
        fixed = [boxes.sizes[a] for a, place in enumerate(start) if place == goal[a] == WHOLE]
        self._values = math.prod(boxes.shape) * math.prod(fixed)  # along fixed axes everything is done again
        self._ends = int(boxes.volumes(goal).sum())
        shards = [math.prod(boxes.sizes[axis] for axis in axes_on(goal, dim)) for dim in range(len(boxes.shape))]
        self._uneven = {dim for dim, size in enumerate(boxes.shape) if size % shards[dim]}

    def _dims(self) -> list[int]:
        """The dims that partial values may be scattered on: those that are split before or after, and the longest of
        the others."""
        shape = self._boxes.shape
        used = {dim_at(place) for place in (*self._start, *self._goal) if place >= 0}
        others = sorted(set(range(len(shape))) - used, key=lambda dim: -shape[dim])
        return sorted(used | set(others[:1]))

    def path(self) -> list[Edge]:
        """The edges of the cheapest path. Of several, the first found: the same every time."""
        start, goal = self._start, self._goal
        best: dict[State, Cost] = {start: (0, 0, 0, 0)}
        came: dict[State, tuple[State, Edge]] = {}
        left: dict[State, int] = {}
        number = 0
        queue: list[tuple[Cost, int, Cost, State]] = [(best[start], 0, best[start], start)]
        while queue:
            _, _, cost, state = heapq.heappop(queue)
            if state == goal:
                return _walked(came, start, goal)
            if cost != best[state]:
                continue  # a cheaper way there was found since
            for edge in self._edges(state):
                total = _sum(cost, self._cost(state, edge))
                if edge.after in best and best[edge.after] <= total:
                    continue
                best[edge.after], came[edge.after] = total, (state, edge)
                if edge.after not in left:
                    left[edge.after] = self._at_least(edge.after)
                number += 1
                heapq.heappush(queue, ((total[0] + left[edge.after], *total[1:]), number, total, edge.after))
        raise AssertionError(f"no way from {start} to {goal}")

    def _at_least(self, state: State) -> int:
        """A bound from below on what the busiest device has still to receive: what it lacks of its box; and its share
        of all that is received, which is every element once per summand but one, and once per device that ends with
        it but one."""
        lacking = self._boxes.missing(state, self._goal)
        summands = math.prod(self._boxes.sizes[axis] for axis in self._summed if state[axis] == PARTIAL)
        if summands == 1:
            return lacking
        devices = math.prod(self._boxes.sizes)
        return max(lacking, (self._values * (summands - 2) + self._ends) // devices)

    def _cost(self, state: State, edge: Edge) -> Cost:
        kind, group = COLLECTIVES[edge.kind], self._boxes.devices(edge.axes)
        elements = self._boxes.received(kind, state, edge.after, edge.axes)
        return (elements, kind.counts_as, kind.messages(group), 1) if group > 1 else (elements, 0, 0, 1)

    def _edges(self, state: State) -> Iterator[Edge]:
        summed = [axis for axis in self._summed if state[axis] == PARTIAL]
        yield from self._reductions(state, summed)
        yield from self._slices(state)
        yield from self._from_dims(state)
        if not summed:
            yield exchange(self._boxes, state, self._goal)

    def _reductions(self, state: State, summed: list[int]) -> Iterator[Edge]:
        """Axes are scattered one by one, and together where they end on one dim. They are reduced whole where they end
        whole, all at once, or where what they end on can't be scattered on now, or only unevenly; or all of them."""
        ending_whole = tuple(axis for axis in summed if self._goal[axis] == WHOLE)
        blocked = []
        for axis in summed:
            for dim in sorted(self._choices[axis] - {WHOLE, PARTIAL}):
                free = self._fits(state, (axis,), dim)
                if free:
                    yield self._joined(state, (axis,), dim)
                if self._ends_at[axis] == dim and (not free or dim in self._uneven):
                    blocked.append(axis)
        for dim in range(len(self._boxes.shape)):
            together = [axis for axis in summed if self._ends_at[axis] == dim]
            for axes in _subsets(together, at_least=2):
                if self._fits(state, axes, dim):
                    yield self._joined(state, axes, dim)
        several = tuple(sorted({*ending_whole, *blocked}))
        whole = [ending_whole, *((axis,) for axis in blocked), several, tuple(summed)]
        for axes in dict.fromkeys(axes for axes in whole if axes):
            yield _edge(state, axes, _with(state, axes, WHOLE))

    def _slices(self, state: State) -> Iterator[Edge]:
        for dim in range(len(self._boxes.shape)):
            joining = [axis for axis in self._moved if state[axis] == WHOLE and self._ends_at[axis] == dim]
            for axes in _subsets(joining):
                if self._fits(state, axes, dim):
                    yield self._joined(state, axes, dim)

    def _joined(self, state: State, axes: tuple[int, ...], dim: int) -> Edge:
        """Axes go over to a dim: where they end there, to the place that they have in its order."""
        return _edge(state, axes, self._after(state, axes, dim))

    def _fits(self, state: State, axes: tuple[int, ...], dim: int) -> bool:
        """Whether axes are the innermost of a dim when they go over to it."""
        return axes_on(self._after(state, axes, dim), dim)[-len(axes) :] == axes

    def _after(self, state: State, axes: tuple[int, ...], dim: int) -> State:
        places = {axis: self._goal[axis] if self._ends_at[axis] == dim else dim for axis in axes}
        return _settled(tuple([places.get(axis, place) for axis, place in enumerate(state)]))

    def _from_dims(self, state: State) -> Iterator[Edge]:
        """What the innermost axes of a dim can do: leave it, or go over to another."""
        for dim in range(len(self._boxes.shape)):
            there = axes_on(state, dim)
            for count in range(1, len(there) + 1):
                axes = there[-count:]
                if axes[0] not in self._choices:
                    break
                yield _edge(state, axes, _with(state, axes, WHOLE))
                common = set.intersection(*(self._choices[axis] for axis in axes))
                for other in sorted(common - {dim, WHOLE, PARTIAL}):
                    if self._fits(state, axes, other):
                        yield self._joined(state, axes, other)


def exchange(boxes: Boxes, before: State, after: State) -> Edge:
    """The direct way: boxes to whoever needs them. A permute where every device ends with one device's whole tile."""
    axes, whole_tiles = set(), True
    for dim in range(len(boxes.shape)):
        old, new = axes_on(before, dim), axes_on(after, dim)
        axes |= _apart(old, new)
        whole_tiles = whole_tiles and [boxes.sizes[a] for a in old] == [boxes.sizes[a] for a in new]
    return Edge("permute" if whole_tiles else "exchange", tuple(sorted(axes)), after)


def halo(before: State, after: State, dims: Iterable[int]) -> Edge:
    """The direct way to windows and blocks of these dims, and from blocks: over the axes that change, those that split
    a dim after one that does, and those that split what devices get them of."""
    split = {axis for dim in dims for axis in axes_on(after, dim)}
    for dim in {dim_at(place) for place in (*before, *after) if place >= 0}:
        split |= _apart(axes_on(before, dim), axes_on(after, dim))
    return Edge("halo", tuple(sorted(split)), after)


def _apart(old: tuple[int, ...], new: tuple[int, ...]) -> set[int]:
    """The axes of both from where they differ on: whatever splits a dim after another axis splits other tiles."""
    same = next((i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), None)
    same = min(len(old), len(new)) if same is None else same
    return {*old[same:], *new[same:]}


def _edge(state: State, axes: tuple[int, ...], after: State) -> Edge:
    """`axes`, which split one dim, or do another same thing, go over to the same in `after`."""
    before, now = state[axes[0]], after[axes[0]]
    kind = BETWEEN[_placement(before), _placement(now)]
    src_dim, dst_dim = (dim_at(there) if there >= 0 else None for there in (before, now))
    return Edge(kind.name, axes, after, src_dim, dst_dim)


def _placement(place: int) -> type[Placement]:
    return Shard if place >= 0 else Replicate if place == WHOLE else Partial


def _subsets(axes: list[int], at_least: int = 1) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(axes, count) for count in range(at_least, len(axes) + 1))


def _with(state: State, axes: Sequence[int], place: int) -> State:
    return _settled(tuple(place if axis in axes else old for axis, old in enumerate(state)))


@lru_cache(maxsize=1 << 14)
def _settled(state: State) -> State:
    """The state in the one form that it has."""
    if all(place < ORDER for place in state):
        return state
    made = list(state)
    for dim in {dim_at(place) for place in state if place >= 0}:
        minor, before = 0, -1
        for axis in axes_on(state, dim):
            minor += axis < before
            made[axis], before = place_of(dim, minor), axis
    return tuple(made)


def _sum(a: Cost, b: Cost) -> Cost:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])


def _walked(came: dict[State, tuple[State, Edge]], start: State, goal: State) -> list[Edge]:
    edges = []
    while goal != start:
        goal, edge = came[goal]
        edges.append(edge)
    return edges[::-1]
