"""Plans for sizes between others: their numbers are found by interpolation, and all else is the same.

A `Region` are the sizes within a box that have one remainder for the periods with which the function divides sizes, and
devices divide them. It is taken where the plans for all corners of the box, and for a point within that would tell a
longer period, have the same steps, layouts and names, and the numbers of the point are those that the corners say. What
planning asks of sizes are comparisons of sums of products of them, which have within the box the answers that they have
at its corners; sizes for which a number is by chance as another one are planned by themselves. So a plan of a region is
the one that planning gives, but for what costs decide, which are no such sums: results don't depend on these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.base.recent import MODULE_SIZES, Recent, uncollected

from .families import outline
from .plan_module import ModulePlan
from .region import NotRegionError, Region
from .size_terms import Box, Divisions, Sizes

_SPREAD = 4  # how many times as large, or as small, as a size the others of its region are
_ASKED = 3  # sizes of a class, from which on a region is looked for
_FAILURES = 3  # of a class of sizes, after which no region is looked for


class Regions:
    """The plans of a function, whatever sizes come. `exact` plans some sizes by themselves; `divisions` says how those
    of values follow from these, of `symbols`, on so many `devices`. `allowed`: whether the function may have sizes."""

    def __init__(
        self,
        exact: Callable[[Sizes], ModulePlan],
        divisions: Divisions,
        symbols: Sequence[str],
        devices: int,
        allowed: Callable[[Mapping[str, int]], bool],
    ) -> None:
        self._exact, self._divisions, self._symbols, self._is_allowed = exact, divisions, symbols, allowed
        self._periods = tuple([period * devices for period in divisions.periods])
        self._known: Recent[tuple[Sizes, Sizes], Region] = Recent(MODULE_SIZES)
        self._asked: Counter[Sizes] = Counter()
        self._failed: Counter[Sizes] = Counter()
        self._seen: list[set[int]] = [set() for _ in symbols]

    @uncollected
    def of(self, sizes: Sizes) -> ModulePlan:
        """The plan for these sizes.

        Raises:
            MeshTensorError: planning refuses the function for them.
        """
        for region in self._known:
            if sizes in region.box and (made := region.sized(sizes)) is not None:
                return made
        plan = self._exact(sizes)
        kind = tuple(size % period for size, period in zip(sizes, self._periods, strict=True))
        self._asked[kind] += 1
        for seen, size in zip(self._seen, sizes, strict=True):
            seen.add(size)
        if self._asked[kind] >= _ASKED and self._failed[kind] < _FAILURES and not self._is_within(sizes):
            found = self._region(sizes, plan)
            if found is None:
                self._failed[kind] += 1
            else:
                self._known.put((found.box.low, found.box.high), found)
        return plan

    def _is_within(self, sizes: Sizes) -> bool:
        return any(sizes in region.box for region in self._known)

    def _region(self, sizes: Sizes, plan: ModulePlan) -> Region | None:
        """A region around these sizes, of the widest that are one."""
        plans, outlines = {sizes: plan}, {sizes: outline(plan)}
        for box, within in self._boxes(sizes):
            try:
                for one in (*box.corners, within):
                    if one not in plans:
                        plans[one] = self._exact(one)
                        outlines[one] = outline(plans[one])
                    if outlines[one] != outlines[sizes]:
                        break
                else:
                    corners = [plans[one] for one in box.corners]
                    return Region(box, corners, (within, plans[within]), self._divisions.constants, self._exact)
            except (MeshTensorError, NotRegionError):
                continue
        return None

    def _boxes(self, sizes: Sizes) -> Iterator[tuple[Box, Sizes]]:
        """Boxes around sizes, the widest first, each with sizes within that tell periods."""
        for spread in (_SPREAD, 2):
            ends = [self._ends(sizes, number, spread) for number in range(len(sizes))]
            box = Box(tuple(low for low, _ in ends), tuple(high for _, high in ends), self._periods)
            within = sizes if box.tells_periods(sizes) else self._within(box, sizes)
            taken = (*box.corners, within)
            if len(box.corners) > 1 and box.tells_periods(within) and all(map(self._allowed, taken)):
                chosen = {self._divisions.chosen(self._named(one)) for one in taken}
                if len(chosen) == 1:
                    yield box, within

    def _named(self, sizes: Sizes) -> dict[str, int]:
        return dict(zip(self._symbols, sizes, strict=True))

    def _allowed(self, sizes: Sizes) -> bool:
        return self._is_allowed(self._named(sizes))

    def _ends(self, sizes: Sizes, number: int, spread: int) -> tuple[int, int]:
        """The least and the largest size of a symbol: itself, where it never had another one."""
        size, period = sizes[number], self._periods[number]
        if len(self._seen[number]) == 1:
            return size, size
        fewer, more = (size - max(2, size // spread)) // period, max(2, (spread - 1) * size // period)

        def may_be(times: int) -> bool:
            return self._allowed((*sizes[:number], size + times * period, *sizes[number + 1 :]))

        while more and not may_be(more):
            more //= 2
        while fewer > 0 and not may_be(-fewer):
            fewer //= 2
        return size - max(fewer, 0) * period, size + more * period

    def _within(self, box: Box, sizes: Sizes) -> Sizes:
        """Sizes within that tell periods, as near to the middle as they come."""
        found = []
        for low, high, period in zip(box.low, box.high, box.periods, strict=True):
            steps = (high - low) // period
            # Two parts without a common factor are next to the middle, unless there are fewer than two parts.
            at = next((at for at in range(steps // 2, 0, -1) if math.gcd(at, steps - at) == 1), 0)
            found.append(low + period * at)
        return tuple(found)
