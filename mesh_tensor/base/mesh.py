"""Mesh: named axes with sizes, and the device order (row-major, the first axis major)."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import SupportsIndex

from .errors import listing, refuse, shown


class Mesh:
    """A grid of devices with named axes. Immutable; the order of the axes counts; equal meshes are one object.

    Devices have ranks from 0 to `num_devices - 1`, in row-major order: along the last axis they are neighbours.

    Args:
        axes: from names of axes to how many devices there are along each, 1 or more; or a Mesh, which comes back.

    Raises:
        MeshTensorError: there is no axis, a name is no non-empty str, or a size no whole number from 1 up; all that
            is wrong is listed.

    >>> mesh = Mesh({"x": 2, "y": 3})
    >>> mesh.num_devices, mesh.coordinate(4), mesh.rank({"x": 1, "y": 1})
    (6, {'x': 1, 'y': 1}, 4)
    >>> mesh.groups(["y"])
    ((0, 1, 2), (3, 4, 5))
    """

    __slots__ = ("_axes", "_sizes", "axis_names", "num_devices")

    #: The names of the axes, in mesh order.
    axis_names: tuple[str, ...]
    #: How many devices the mesh has.
    num_devices: int
    _axes: tuple[tuple[str, int], ...]
    _sizes: dict[str, int]

    def __new__(cls, axes: Mapping[str, int] | Mesh) -> Mesh:
        if isinstance(axes, Mesh):
            return axes
        items = _checked_axes(axes)
        made, sizes = object.__new__(cls), dict(items)
        values = (items, sizes, tuple(sizes), math.prod(sizes.values()))
        for name, value in zip(cls.__slots__, values, strict=True):
            object.__setattr__(made, name, value)
        return _MADE.setdefault(items, made)

    @property
    def shape(self) -> dict[str, int]:
        """Axis name -> size, in mesh order (a copy)."""
        return dict(self._axes)

    def size(self, axis: str) -> int:
        """The number of devices along `axis`. Refused where the mesh has no such axis."""
        if axis not in self:
            self.check_axes((axis,))
        return self._sizes[axis]

    def check_axes(self, axes: Iterable[str]) -> None:
        """Raise a MeshTensorError that names every axis of `axes` that this mesh doesn't have."""
        known = self._sizes
        unknown = [axis for axis in axes if not isinstance(axis, str) or axis not in known]
        if unknown:
            refuse(
                [f"unknown mesh axis {axis!r}" for axis in unknown],
                where=str(self),
                fix=f"use the axes of the mesh: {listing(self.axis_names)}",
            )

    def in_order(self, axes: str | Iterable[str]) -> tuple[str, ...]:
        """The axes, each once, in mesh order; a str is one axis. Refused where the mesh lacks one."""
        wanted = (axes,) if isinstance(axes, str) else tuple(axes)
        self.check_axes(wanted)
        return tuple(axis for axis in self.axis_names if axis in wanted)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where the device `rank` sits: axis name -> coordinate, from 0 up. Refused where no device has that rank."""
        if not (isinstance(rank, SupportsIndex) and 0 <= rank < self.num_devices):
            refuse(f"no device has rank {rank!r}", where=str(self), fix=f"ranks go from 0 to {self.num_devices - 1}")
        place = {}
        for axis, size in reversed(self._axes):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in self.axis_names}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank of the device at `coordinate`, from 0 up, which names every axis. Refused where it leaves one out,
        or is outside of the mesh."""
        self.check_axes(coordinate)
        bad = [
            f"no coordinate on axis {axis!r}"
            if axis not in coordinate
            else f"coordinate {coordinate[axis]} on axis {axis!r} is not in 0..{size - 1}"
            for axis, size in self._axes
            if not 0 <= coordinate.get(axis, -1) < size
        ]
        if bad:
            refuse(bad, where=str(self), fix="give one coordinate per mesh axis, within its size")
        rank = 0
        for axis, size in self._axes:
            rank = rank * size + coordinate[axis]
        return rank

    def groups(self, axes: str | Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The devices that differ only on `axes`, group by group; a group is row-major by those axes in mesh order."""
        wanted = self.in_order(axes)
        offsets = self._offsets(wanted)
        leaders = self._offsets([axis for axis in self.axis_names if axis not in wanted])
        return tuple(tuple(leader + offset for offset in offsets) for leader in leaders)

    def group_of(self, rank: int, axes: str | Iterable[str]) -> tuple[int, ...]:
        """The group of `groups(axes)` that holds `rank`."""
        wanted = self.in_order(axes)
        leader = self.rank({axis: 0 if axis in wanted else c for axis, c in self.coordinate(rank).items()})
        return tuple(leader + offset for offset in self._offsets(wanted))

    def _offsets(self, axes: Iterable[str]) -> list[int]:
        strides = self._strides()
        ranges = [range(0, self._sizes[axis] * strides[axis], strides[axis]) for axis in axes]
        return [sum(steps) for steps in product(*ranges)]

    def _strides(self) -> dict[str, int]:
        strides, stride = {}, 1
        for axis, size in reversed(self._axes):
            strides[axis] = stride
            stride *= size
        return strides

    def __contains__(self, axis: object) -> bool:
        return isinstance(axis, str) and axis in self._sizes

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._axes)

    def __repr__(self) -> str:
        inside = ", ".join(f'"{axis}": {size}' for axis, size in self._axes)
        return f"Mesh({{{inside}}})"

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Mesh is immutable: can't set {name!r}; make a new Mesh")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Mesh is immutable: can't delete {name!r}")

    def __reduce__(self) -> tuple[type[Mesh], tuple[dict[str, int]]]:
        return Mesh, (self.shape,)


_MOST_DEVICES = 1 << 20


def check_countable(mesh: Mesh) -> None:
    """Refuse a mesh of more devices than a plan goes through one by one. (A Mesh itself may be of any size.)"""
    if mesh.num_devices > _MOST_DEVICES:
        refuse(
            f"a plan for {mesh.num_devices:,} devices",
            where=str(mesh),
            why="it counts what each of them holds and receives",
            fix=f"use a mesh of at most {_MOST_DEVICES:,}",
        )


_MADE: dict[tuple[tuple[str, int], ...], Mesh] = {}


def _checked_axes(axes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    fix = 'write it as {"x": 2, "y": 2}: axis names with the number of devices along each'
    if names := getattr(axes, "mesh_dim_names", None):  # a DeviceMesh of torch's, which calls and modules take
        fix = f"give its axes with their sizes: {dict(zip(names, tuple(getattr(axes, 'shape', ())), strict=True))}"
    if not isinstance(axes, Mapping):
        refuse(f"a mesh is a dict from axis names to sizes, not {shown(axes)}", fix=fix)
    if not axes:
        refuse("the mesh has no axis", fix=fix + '; {"x": 1} is the mesh of one device')
    problems, items = [], []
    for name, size in axes.items():
        if not isinstance(name, str) or not name:
            problems.append(f"axis name {shown(name)} is not a non-empty str")
        number = as_int(size)
        if number is None:
            problems.append(f"axis {name!r} has size {shown(size)}, which is not an int")
        elif number < 1:
            problems.append(f"axis {name!r} has size {number}, but a size is at least 1")
        elif not problems:
            items.append((str.__str__(name), number))  # of subclasses, too: the mesh is everybody's
    if problems:
        refuse(problems, where=f"mesh {shown(dict(axes))}", fix=fix)
    return tuple(items)


def as_int(value: object) -> int | None:
    """The number that it is; None if it is none, or a truth value."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
