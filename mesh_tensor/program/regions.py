"""Plans for sizes between others: their numbers are found by interpolation, and all else is the same.

A `Region` are the sizes within a box that have one remainder for the periods with which the function divides sizes, and
devices divide what is split. It is taken where the plans for all corners of the box, and for a point within that would
tell a longer period, have the same steps, layouts and names, and the numbers of the point are those that the corners
say. What planning asks of sizes are comparisons of sums of products of them, which have within the box the answers that
they have at its corners. Sizes that are equal by chance within it may have a plan of other steps by themselves; what is
right for all sizes around them is so for them, too. What costs decide are no such sums, and results don't depend on
these: in a region it is what they decide for some of its sizes, as long as that is not much dearer at the corners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from mesh_tensor.base.recent import MODULE_SIZES, Recent, uncollected

from .families import PlanFamilies, outline
from .plan_module import ModulePlan
from .region import NotRegionError, Region
from .size_terms import Box, Divisions, Sizes

_SPREAD = 16  # how many times as large, or as small, as a size the others of its region are at most
_ASKED = 3  # sizes, from which on regions are looked for
_NEAR = 4  # how many times as large, or as small, an end is that is not taken nearer, but to the size
_CORNERS = 10  # for which a region's plans are made at most
_DEARER = 1.25  # how dear a plan of a region may be, beside the cheapest
_FAILURES = 3  # more than regions that were found, after which none is looked for


class Regions:
    """The plans of a function, whatever sizes come. `plans` are those of some sizes by themselves; `divisions` says how
    sizes of values follow from those of `symbols`, on so many `devices`. `allowed`: whether the function may have
    sizes. `cheapest`: plans are those that sizes have by themselves."""

    def __init__(
        self,
        plans: PlanFamilies,
        divisions: Divisions,
        symbols: Sequence[str],
        devices: int,
        allowed: Callable[[Mapping[str, int]], bool],
        cheapest: bool,
    ) -> None:
        self._plans, self._divisions, self._symbols, self._is_allowed = plans, divisions, symbols, allowed
        self._cheapest = cheapest
        self._periods = tuple([period * devices for period in divisions.periods])
        self._known: Recent[tuple[Sizes, Sizes], Region] = Recent(MODULE_SIZES)
        self._seen: list[set[int]] = [set() for _ in symbols]
        self._asked = self._failed = 0

    @uncollected
    def of(self, sizes: Sizes) -> ModulePlan:
        """The plan for these sizes. Planning may refuse the function for them."""
        around = [region for region in self._known if sizes in region.box]
        for region in around:
            if (made := region.sized(sizes)) is not None and (made.tells or not self._cheapest):
                return made
        plan = self._plans.of(sizes)
        for seen, size in zip(self._seen, sizes, strict=True):
            seen.add(size)
        self._asked += 1
        if not around and self._asked >= _ASKED and self._failed < _FAILURES + len(self._known):
            found = self._region(sizes, plan)
            if found is None:
                self._failed += 1
            else:
                self._known.put((found.box.low, found.box.high), found)
        return plan

    def _region(self, sizes: Sizes, plan: ModulePlan) -> Region | None:
        found = self._box(sizes, plan)
        if found is None:
            return None
        box, corners = found
        box = Box(box.low, box.high, self._told(box, corners))
        within = sizes if box.tells_periods(sizes) else _within(box)
        like = self._like(within, sizes, plan) if box.tells_periods(within) else None
        if like is None:
            return None
        try:
            return Region(box, list(corners.values()), (within, like), self._divisions.constants, self._plans.stages)
        except NotRegionError:
            return None

    def _box(self, sizes: Sizes, plan: ModulePlan) -> tuple[Box, dict[Sizes, ModulePlan]] | None:
        """A box with these sizes, and plans for its corners that are like theirs. Where there is none, the box ends
        nearer on one of the sides that meet there."""
        low, high = (list(ends) for ends in zip(*[self._ends(at, sizes) for at in range(len(sizes))], strict=True))
        plans = {sizes: plan}
        for _ in range(_CORNERS):
            corners = (box := Box(tuple(low), tuple(high), self._periods)).corners
            corner = next((each for each in (corners[0], *reversed(corners)) if each not in plans), None)
            if len(corners) > _CORNERS:
                return None
            if corner is None:
                return (box, {each: plans[each] for each in corners}) if len(corners) > 1 else None
            if (like := self._like(corner, sizes, plan)) is not None:
                plans[corner] = like
                continue
            number = max(range(len(sizes)), key=lambda at: _ratio(corner[at], sizes[at]))
            ends, size = low if corner[number] < sizes[number] else high, sizes[number]
            ratio = _ratio(corner[number], size)
            ratio = math.sqrt(ratio) if ratio > _NEAR else 1
            ends[number] = self._sized(number, size, size / ratio if ends is low else size * ratio)
        return None

    def _ends(self, number: int, sizes: Sizes) -> tuple[int, int]:
        """The least and the largest size of a symbol that are tried: itself, where it never had another one."""
        size, open_ = sizes[number], sum(len(seen) > 1 for seen in self._seen)
        spread = 1 if len(self._seen[number]) == 1 else _SPREAD ** (1 / open_)
        low, high = self._sized(number, size, size / spread), self._sized(number, size, size * spread)
        while low != size and not self._may_be((*sizes[:number], low, *sizes[number + 1 :])):
            low = self._sized(number, size, (low + size) / 2)
        while high != size and not self._may_be((*sizes[:number], high, *sizes[number + 1 :])):
            high = self._sized(number, size, (high + size) / 2)
        return low, high

    def _sized(self, number: int, size: int, end: float) -> int:
        """What is the next to an end of a symbol's sizes of those with the remainder of a size, and not beyond it."""
        return size + int((end - size) / self._periods[number]) * self._periods[number]

    def _named(self, sizes: Sizes) -> dict[str, int]:
        return dict(zip(self._symbols, sizes, strict=True))

    def _may_be(self, sizes: Sizes) -> bool:
        return self._is_allowed(self._named(sizes))

    def _like(self, one: Sizes, sizes: Sizes, plan: ModulePlan) -> ModulePlan | None:
        """A plan for the one sizes with the outline that the `plan` for sizes has: the cheapest, or one that decides
        what this one did, and is not much dearer."""
        chosen = self._divisions.chosen
        if not self._may_be(one) or chosen(self._named(one)) != chosen(self._named(sizes)):
            return None
        try:
            like = self._plans.like(one, sizes, 0 if self._cheapest else _DEARER)
            return like if like is not None and outline(like) == outline(plan) else None
        except Exception:  # nobody asked for these sizes, which the function may not have, without saying so
            return None

    def _told(self, box: Box, corners: Mapping[Sizes, ModulePlan]) -> Sizes:
        """The periods that count: those of the function alone for symbols of which no split dim's size depends."""
        found = list(self._periods if self._cheapest else self._divisions.periods)
        for number, (low, high) in enumerate(zip(box.low, box.high, strict=True)):
            for corner, plan in corners.items():
                other = corners[(*corner[:number], low + high - corner[number], *corner[number + 1 :])]
                if low == high or _differ_where_split(plan, other):
                    found[number] = self._periods[number]
        return tuple(found)


def _differ_where_split(one: ModulePlan, other: ModulePlan) -> bool:
    """Whether plans of one outline have other sizes in dims that devices have parts of."""
    values = other.made.program.values
    for name, value in one.made.program.values.items():
        for dim, (size, its) in enumerate(zip(value.shape, values[name].shape, strict=True)):
            if size != its and (value.sharding.num_shards(dim) > 1 or value.sharding.window(dim) is not None):
                return True
    return False


def _ratio(one: int, other: int) -> float:
    return max(one, other) / max(min(one, other), 1)


def _within(box: Box) -> Sizes:
    """Sizes within that tell periods, as near to the middle as they come."""
    found = []
    for low, high, period in zip(box.low, box.high, box.periods, strict=True):
        steps = (high - low) // period
        # Two parts without a common factor are next to the middle, unless there are fewer than two parts.
        at = next((at for at in range(steps // 2, 0, -1) if math.gcd(at, steps - at) == 1), 0)
        found.append(low + period * at)
    return tuple(found)
