"""Sub-axes: parts of a mesh axis, named as in Shardy. `x:(m)k` are k devices of axis x, of which m come before in the
order of major to minor: an axis x of 8 devices is `x:(1)4` times `x:(4)2`. The mesh in which the parts are axes has the
same devices in the same order."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

from .errors import MeshTensorError, refuse
from .mesh import Mesh
from .placement import Placement, Replicate
from .sharding import Sharding

_NAME = re.compile(r"(?P<axis>.+):\((?P<before>\d+)\)(?P<size>\d+)")


def named_part(mesh: Mesh, name: Any) -> tuple[str, int, int] | None:
    """The axis of `mesh` that a sub-axis is of, how many parts come before it, and its size; None for any other name.

    >>> named_part(Mesh({"x": 8}), "x:(2)4")
    ('x', 2, 4)
    """
    found = _NAME.fullmatch(name) if isinstance(name, str) and name not in mesh else None
    if found is None or found["axis"] not in mesh:
        return None
    return found["axis"], int(found["before"]), int(found["size"])


@dataclass(frozen=True)
class Refinement:
    """`mesh` is `base` with some axes taken apart into sub-axes: `parts` has the sizes, major first."""

    base: Mesh
    parts: tuple[tuple[str, tuple[int, ...]], ...]

    @staticmethod
    def by_names(base: Mesh, names: Iterable[Any]) -> Refinement:
        """The coarsest one in which all of these sub-axes are made of whole axes; other names don't matter. Refused
        where they are no parts of their axes, or overlap."""
        found = {str(name): part for name in names if (part := named_part(base, name)) is not None}
        problems = [
            f"{name!r} is no sub-axis of {axis!r}: ({before}) times {size} does not divide {base.size(axis)} devices"
            for name, (axis, before, size) in found.items()
            if before * size == 0 or base.size(axis) % (before * size)
        ]
        fix = 'an axis "x" of 8 devices has the sub-axes "x:(1)2", "x:(2)4", ...: "x:(devices before)size"'
        if problems:
            refuse(problems, where=str(base), fix=fix)
        parts = []
        for axis in base:
            mine = {name: part for name, part in found.items() if part[0] == axis}
            cuts = sorted({1, base.size(axis), *(n for _, b, size in mine.values() for n in (b, b * size))})
            if any(high % low for low, high in pairwise(cuts)):
                refuse(f"the sub-axes {', '.join(map(repr, mine))} overlap", where=str(base), fix=fix)
            if len(cuts) > 2:
                parts.append((axis, tuple(high // low for low, high in pairwise(cuts))))
        return Refinement(base, tuple(parts))

    @staticmethod
    def between(base: Mesh, mesh: Mesh) -> Refinement | None:
        """The one that makes `mesh` of `base`, if there is one."""
        try:
            made = Refinement.by_names(base, mesh)
        except MeshTensorError:
            return None
        return made if made.mesh == mesh else None

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of the parts."""
        return Mesh({name: size for axis in self.base for name, size in self._sizes(axis)})

    def axes(self, name: str) -> tuple[str, ...]:
        """The axes of `mesh` that an axis of `base`, or a sub-axis, is made of; the name itself, if it is none."""
        if name in self.base:
            return tuple(part for part, _ in self._sizes(name))
        if (found := named_part(self.base, name)) is None:
            return (name,)
        axis, before, size = found
        inside, major = [], 1
        for part, count in self._sizes(axis):
            if before <= major and major * count <= before * size:
                inside.append(part)
            major *= count
        return tuple(inside)

    def expanded(self, by_axis: Mapping[Any, Any]) -> dict[Any, Any]:
        """What is stated of axes and sub-axes, of the axes of `mesh`. Refused where an axis is given two values,
        because sub-axes overlap."""
        made: dict[Any, Any] = {}
        for name, value in by_axis.items():
            if isinstance(name, tuple):  # axes in that order
                made[tuple(part for axis in name for part in self.axes(axis))] = value
                continue
            for axis in self.axes(name) if isinstance(name, str) else (name,):
                if axis in made:
                    refuse(
                        f"{name!r} overlaps with what is stated already of {axis!r}",
                        where=str(self.base),
                        fix="state every sub-axis once",
                    )
                made[axis] = value
        return made

    def refine(self, sharding: Sharding) -> Sharding:
        """A layout on `base`, on `mesh`. Where the axis does not divide the dim, tiles are cut elsewhere."""
        return Sharding.of(self.mesh, sharding.ndim, self.expanded(sharding.placements()))

    def coarsen(self, sharding: Sharding, shape: tuple[int, ...]) -> Sharding | None:
        """The layout on `base` in which every device holds the same, if there is one."""
        return _coarsened(self, sharding, shape)

    def coarse(self, sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
        """The layout on `mesh`, less what axes split that has no name on `base`."""
        for axis, _ in self.parts:
            if self.coarsen(sharding, shape) is None:
                placements = sharding.placements() | dict.fromkeys(self.axes(axis), Replicate())
                alone = {other: Replicate() for other in self.mesh if other not in self.axes(axis)}
                mine = Sharding.of(self.mesh, sharding.ndim, sharding.placements() | alone)
                if self.coarsen(mine, shape) is None:
                    sharding = Sharding.of(self.mesh, sharding.ndim, placements)
        return sharding if self.coarsen(sharding, shape) is not None else Sharding.of(self.mesh, sharding.ndim, {})

    def _sizes(self, axis: str) -> tuple[tuple[str, int], ...]:
        sizes = dict(self.parts).get(axis)
        if sizes is None:
            return ((axis, self.base.size(axis)),)
        return tuple((f"{axis}:({math.prod(sizes[:n])}){size}", size) for n, size in enumerate(sizes))


@lru_cache(maxsize=4096)
def _coarsened(refinement: Refinement, sharding: Sharding, shape: tuple[int, ...]) -> Sharding | None:
    placements: dict[str, Placement] = {}
    for axis in refinement.base:
        found = {sharding.placement(part) for part in refinement.axes(axis)}
        if len(found) > 1:
            return None
        placements[axis] = found.pop()
    made = Sharding.of(refinement.base, sharding.ndim, placements)
    ranks = range(refinement.base.num_devices)
    alike = made.tile_shape(shape) == sharding.tile_shape(shape) and all(
        made.tile_offset(shape, rank) == sharding.tile_offset(shape, rank)
        and made.valid_extent(shape, rank) == sharding.valid_extent(shape, rank)
        for rank in ranks
    )
    return made if alike else None
