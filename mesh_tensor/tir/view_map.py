"""From an element or a region of one buffer to the same memory in another buffer over it.

Dims are compared from the last one on: where both buffers have the same dims from some place on, these go over as they
are; what lies between two such places is a *group*, in which positions are counted row by row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from .memory import is_compact, strides_of
from .prover import Prover
from .regions import Region
from .rewrite import row_by_row

Exprs = Sequence[tirx.PrimExpr]
_ZERO, _ONE = tirx.IntImm("int32", 0), tirx.IntImm("int32", 1)


@dataclass(frozen=True)
class _Group:
    """Dims `mine` of the view and `other` of the base that walk the same stretches of memory."""

    mine: tuple[int, ...]
    other: tuple[int, ...]


class ViewMap:
    """How `view` lies in `base`; both are the same memory from its first element on, with one dtype."""

    def __init__(self, view: tirx.Buffer, base: tirx.Buffer, analyzer: Prover) -> None:
        self.view, self.base, self._analyzer = view, base, analyzer
        self._groups = _groups(view, base, analyzer) if is_compact(view, analyzer) else None

    @property
    def mixed_dims(self) -> list[int]:
        """The dims of the base that are not dims of the view as they are, but for the first one longer than 1."""
        groups = [_Group((), tuple(range(len(self.base.shape))))] if self._groups is None else self._groups
        first = _long(self.base, self._analyzer)[:1]
        return [dim for group in groups if not self._is_same(group) for dim in group.other if dim not in first]

    def outside(self, indices: Exprs) -> list[tirx.PrimExpr]:
        """What is to be checked for `view[indices]` to be inside the view, where the base's own bounds say less."""
        same = {group.mine[0] for group in self._groups or () if self._is_same(group)}
        conditions = [
            condition
            for dim, (index, size) in enumerate(zip(indices, self.view.shape, strict=True))
            if dim not in same
            for condition in (index >= 0, index < size)
        ]
        return [condition for condition in conditions if not self._analyzer.can_prove(condition)]

    def indices(self, indices: Exprs) -> list[tirx.PrimExpr]:
        """The indices into the base of `view[indices]`, an element that is inside the view."""
        if self._groups is None:
            strides = strides_of(self.view)
            flat = sum((index * stride for index, stride in zip(indices, strides, strict=True)), _ZERO)
            return self._unflattened(flat, list(self.base.shape))
        found: dict[int, tirx.PrimExpr] = {}
        for group in self._groups:
            if self._is_same(group):
                found[group.other[0]] = indices[group.mine[0]]
                continue
            sizes = [self.view.shape[dim] for dim in group.mine]
            flat = self._flattened([indices[dim] for dim in group.mine], sizes)
            places = self._unflattened(flat, [self.base.shape[dim] for dim in group.other])
            found.update(zip(group.other, places, strict=True))
        return [found.get(dim, _ZERO) for dim in range(len(self.base.shape))]

    def region(self, region: Region) -> Region | None:
        """The box of the base that a box of the view is, with the same long dims in the same order; None if it is
        none."""
        if self._groups is None:
            return None
        mins: dict[int, tirx.PrimExpr] = {}
        extents: dict[int, tirx.PrimExpr] = {}
        grouped = {dim for group in self._groups for dim in group.mine}
        if any(not self._is_first(region, dim) for dim in range(len(self.view.shape)) if dim not in grouped):
            return None
        for group in self._groups:
            box = self._box(group, region)
            if box is None:
                return None
            mins.update(zip(group.other, box[0], strict=True))
            extents.update(zip(group.other, box[1], strict=True))
        order = range(len(self.base.shape))
        return Region(self.base, tuple(mins.get(d, _ZERO) for d in order), tuple(extents.get(d, _ONE) for d in order))

    def _is_first(self, region: Region, dim: int) -> bool:
        """Whether a box has nothing but the one element of a dim of size 1."""
        prove = self._analyzer.can_prove_equal
        return bool(prove(region.mins[dim], 0)) and bool(prove(region.extents[dim], 1)) and dim not in region.long_dims

    def _box(self, group: _Group, region: Region) -> tuple[list, list] | None:
        """A group's mins and extents in the base."""
        mins = [region.mins[dim] for dim in group.mine]
        if self._is_same(group):
            return mins, [region.extents[group.mine[0]]]
        long_dims = [dim for dim in group.mine if dim in region.long_dims]
        if len(long_dims) > 1 or self._outside_box(group, region):
            return None
        places = self._unflattened(
            self._flattened(mins, [self.view.shape[d] for d in group.mine]), [self.base.shape[d] for d in group.other]
        )
        extents: list[tirx.PrimExpr] = [_ONE] * len(places)
        if not long_dims:
            return places, extents
        return self._run(group, long_dims[0], region, places, extents)

    def _run(
        self, group: _Group, dim: int, region: Region, places: list[tirx.PrimExpr], extents: list[tirx.PrimExpr]
    ) -> tuple[list, list] | None:
        """A box with one long dim: in the base, it has to run along one dim, too."""
        step = _product([self.view.shape[d] for d in group.mine if d > dim])
        for position, other in enumerate(group.other):
            stride = _product([self.base.shape[d] for d in group.other if d > other])
            if not self._analyzer.can_prove_equal(stride, step):
                continue
            extent = region.extents[dim]
            if position and not self._analyzer.can_prove(places[position] + extent <= self.base.shape[other]):
                continue
            extents[position] = extent
            return places, extents
        return None

    def _outside_box(self, group: _Group, region: Region) -> bool:
        """Whether a box may reach past the end of the view in a dim of the group."""
        prove = self._analyzer.can_prove
        return not all(
            prove(region.mins[dim] >= 0) and prove(region.mins[dim] + region.extents[dim] <= self.view.shape[dim])
            for dim in group.mine
        )

    def _is_same(self, group: _Group) -> bool:
        if len(group.mine) != 1 or len(group.other) != 1:
            return False
        return bool(self._analyzer.can_prove_equal(self.view.shape[group.mine[0]], self.base.shape[group.other[0]]))

    def _flattened(self, indices: Exprs, sizes: Exprs) -> tirx.PrimExpr:
        return self._analyzer.simplify(row_by_row(indices, sizes))

    def _unflattened(self, flat: tirx.PrimExpr, sizes: Exprs) -> list[tirx.PrimExpr]:
        """Where the position `flat`, counted row by row, is in dims of these sizes."""
        places: list[tirx.PrimExpr] = []
        for position in range(len(sizes)):
            below = _product(sizes[position + 1 :])
            place = tirx.floordiv(flat, below)
            if position:
                place = tirx.floormod(place, sizes[position])
            places.append(self._analyzer.simplify(place))
        return places


def _groups(view: tirx.Buffer, base: tirx.Buffer, analyzer: Prover) -> list[_Group]:
    """The groups, from the last one on; dims of size 1 are in none. The first dims of the two are in one group."""
    mine, other = _long(view, analyzer), _long(base, analyzer)
    groups: list[_Group] = []
    while mine or other:
        a, b = _last_group([view.shape[dim] for dim in mine], [base.shape[dim] for dim in other], analyzer)
        groups.append(_Group(tuple(mine[a:]), tuple(other[b:])))
        mine, other = mine[:a], other[:b]
    return groups


def _long(buffer: tirx.Buffer, analyzer: Prover) -> list[int]:
    return [dim for dim, size in enumerate(buffer.shape) if not analyzer.can_prove_equal(size, 1)]


def _last_group(mine: Exprs, other: Exprs, analyzer: Prover) -> tuple[int, int]:
    """Where the last dims begin that are as many elements in both; all dims, if no such place is known."""
    a, b = max(len(mine) - 1, 0), max(len(other) - 1, 0)
    while a or b:
        sizes = _product(mine[a:]), _product(other[b:])
        if a < len(mine) and b < len(other) and analyzer.can_prove_equal(*sizes):
            return a, b
        if b and (not a or analyzer.can_prove(sizes[1] < sizes[0])):
            b -= 1
        elif a and (not b or analyzer.can_prove(sizes[0] < sizes[1])):
            a -= 1
        else:
            return 0, 0
    return 0, 0


def _product(sizes: Exprs) -> tirx.PrimExpr:
    return math.prod(sizes, start=_ONE)
