"""Sharding: how a tensor lies on a mesh, and which part of it each device holds.

Per mesh axis a placement: `Shard(dim)`, `Replicate()` or `Partial(op)`. Several axes may split one dim; then each axis
splits the tile that those before it leave, in mesh order unless another order is stated: `{("y", "x"): 0}` has y major.
A collective over the last ones stays within a parent tile.
"""

from __future__ import annotations

import math
from ast import literal_eval
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

from .errors import MeshTensorError, refuse, shown
from .mesh import Mesh
from .placement import Partial, Placement, Replicate, Shard, collect, how_to_state, how_to_write, parse_text, state
from .window import Window, parse_windows, windows_text

__all__ = ["Partial", "Placement", "Replicate", "Shard", "Sharding", "ceildiv"]


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Sharding:
    """The layout of a tensor of `ndim` dims on `mesh`. Immutable; equal layouts are one object.

    `dims`: per dim, the axes that split it, major first; `partial`: pairs (axis, op) in mesh order; the tensor is
    replicated along all other axes. `windows`: dims of which devices hold overlapping windows instead of tiles; they
    occur for the inputs of kernels and operators, and can't be stated by users.

    >>> s = Sharding.make(Mesh({"x": 2, "y": 2}), 2, {"x": 0, "y": 1})
    >>> str(s), s.tile_shape((5, 8)), s.tile_offset((5, 8), 3), s.valid_extent((5, 8), 3)
    ('S[0], S[1]', (3, 4), (3, 4), (2, 4))
    """

    mesh: Mesh
    ndim: int
    dims: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()
    windows: tuple[tuple[int, Window], ...] = ()

    def __new__(
        cls,
        mesh: Mesh | Mapping[str, int],
        ndim: int,
        dims: tuple[tuple[str, ...], ...],
        partial: tuple[tuple[str, str], ...] = (),
        windows: tuple[tuple[int, Window], ...] = (),
    ) -> Sharding:
        mesh = Mesh(mesh)
        stated: list[tuple[str, Placement]] = [
            (a, Shard(d, n)) for d, axes in enumerate(dims) for n, a in enumerate(axes)
        ]
        stated += [(axis, Partial(op)) for axis, op in partial]
        by_axis, problems = collect(mesh, ndim, stated)
        if len(dims) != ndim:
            problems.append(f"dims {dims} are not those of {ndim} dims")
        if problems:
            refuse(problems, where=f"a Sharding on {mesh}", fix=how_to_state(mesh, ndim))
        return _made(mesh, ndim, *_canonical(mesh, ndim, by_axis), tuple(sorted(windows, key=lambda pair: pair[0])))

    def __reduce__(self) -> tuple:
        """Made anew: another process hashes strings differently."""
        return Sharding, (self.mesh, self.ndim, self.dims, self.partial, self.windows)

    @staticmethod
    def of(mesh: Mesh | Mapping[str, int], ndim: int, placements: Mapping[str, Placement]) -> Sharding:
        """The Sharding with these placements, axis -> placement; an axis left out is replicated.

        >>> str(Sharding.of(Mesh({"x": 2, "y": 2}), 2, {"y": Shard(0)}))
        'R, S[0]'
        """
        mesh = Mesh(mesh)
        by_axis, problems = collect(mesh, ndim, list(placements.items()))
        if problems:
            refuse(problems, where=f"a tensor of {ndim} dims on {mesh}", fix=how_to_state(mesh, ndim))
        return _made(mesh, ndim, *_canonical(mesh, ndim, by_axis))

    @staticmethod
    def make(
        mesh: Mesh | Mapping[str, int],
        ndim: int,
        sharding: Mapping[str, Any] | Sequence[Any] | str | None = None,
        *,
        replicate: str | Iterable[str] = (),
        partial: Mapping[str, str] | None = None,
        name: str = "",
    ) -> Sharding:
        """The Sharding that `sharding` (axis -> dim, or None for replicated) states, checked. An axis left out is
        replicated; `replicate` states that again and is checked; `partial` is axis -> op. Negative dims count from
        the end. A list has one of these per axis; instead of a dim, a placement, ours or torch's, will do. A text that
        says all of it is read as by `parse`. `name` is the buffer's, for messages.

        >>> str(Sharding.make(Mesh({"x": 2, "y": 2}), 2, {"x": -1}, partial={"y": "sum"}))
        'S[1], P[sum]'
        """
        mesh = Mesh(mesh)
        if isinstance(sharding, str) and not replicate and not partial:
            return Sharding.parse(mesh, ndim, sharding, name=name)
        by_axis, problems = state(mesh, ndim, sharding, replicate, partial)
        if problems:
            refuse(problems, where=_where(mesh, ndim, name), fix=how_to_state(mesh, ndim))
        return Sharding.of(mesh, ndim, by_axis)

    @staticmethod
    def parse(mesh: Mesh | Mapping[str, int], ndim: int, text: str, *, name: str = "") -> Sharding:
        """The Sharding that `text` states: `{"x": 0, "y": 1}`, or DistIR's `S[0], R` with one placement per mesh axis.

        >>> mesh = Mesh({"x": 2, "y": 2})
        >>> Sharding.parse(mesh, 2, '{"x": 0}') == Sharding.parse(mesh, 2, "S[0], R")
        True
        """
        mesh = Mesh(mesh)
        try:
            if not isinstance(text, str):
                refuse(f"can't read the sharding {shown(text)}: it is no text")
            text, *windows = text.split("; ")
            sharding, partial = parse_text(mesh, text)
        except MeshTensorError as error:
            refuse(str(error), where=_where(mesh, ndim, name), fix=how_to_write(mesh))
        layout = Sharding.make(mesh, ndim, sharding, partial=partial, name=name)
        try:
            return layout.with_windows(parse_windows(windows, literal_eval)) if windows else layout
        except (ValueError, SyntaxError, TypeError, LookupError, AssertionError):
            what = f"can't read the sharding: {shown('; '.join(windows))} are no windows"
            return refuse(what, where=_where(mesh, ndim, name), fix=how_to_write(mesh))

    def text(self) -> str:
        """DistIR's form, one placement per mesh axis: `S[0], R`, and the windows. `parse` reads it."""
        return ", ".join(str(placement) for placement in self.placements().values()) + windows_text(self.windows)

    def as_dict(self) -> dict[str, int]:
        """The dict form, axis -> dim, of the axes that split a dim."""
        places: dict[str, int] = self._places  # type: ignore[attr-defined]  # set above
        return {axis: places[axis] for axis in self.mesh if axis in places}

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f'Sharding({self.mesh}, {self.ndim}, "{self}")'

    def placement(self, axis: str) -> Placement:
        """What `axis` does with the tensor."""
        dim, op = self.dim_of(axis), self.partial_op(axis)
        if dim is not None:
            return Shard(dim, self._minors.get(axis, 0))  # type: ignore[attr-defined]  # set above
        return Replicate() if op is None else Partial(op)

    def placements(self) -> dict[str, Placement]:
        """What every axis does with the tensor, in mesh order."""
        known: dict[str, Placement] | None = vars(self).get("_placements")
        if known is None:
            known = vars(self)["_placements"] = {axis: self.placement(axis) for axis in self.mesh}
        return dict(known)

    def dim_of(self, axis: str) -> int | None:
        """The dim that `axis` splits, or None."""
        dim: int | None = self._places.get(axis)  # type: ignore[attr-defined]  # set above
        if dim is None:
            self.mesh.check_axes((axis,))
        return dim

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """The axes that split `dim`, major first."""
        return self.dims[dim]

    def partial_op(self, axis: str) -> str | None:
        """The op that combines what the devices along `axis` hold, or None if `axis` is not partial."""
        self.mesh.check_axes((axis,))
        return dict(self.partial).get(axis)

    def num_shards(self, dim: int) -> int:
        """In how many tiles `dim` is split."""
        shards: tuple[int, ...] = self._shards  # type: ignore[attr-defined]  # set above
        return shards[dim]

    def with_shard(self, axis: str, dim: int) -> Sharding:
        """The same, but `axis` splits `dim`."""
        return self._with(axis, Shard(dim))

    def with_replicate(self, axis: str) -> Sharding:
        """The same, but replicated along `axis`."""
        return self._with(axis, Replicate())

    def with_partial(self, axis: str, op: str) -> Sharding:
        """The same, but what the devices along `axis` hold combines by `op`."""
        return self._with(axis, Partial(op))

    def with_windows(self, windows: Iterable[tuple[int, Window]]) -> Sharding:
        """The same, but of these dims, which axes split, devices hold windows; or, of dims that none splits, all hold
        the same one."""
        made = Sharding(self.mesh, self.ndim, self.dims, self.partial, tuple(windows))
        assert all(made.dims[dim] or not window.stride for dim, window in made.windows), made
        return made

    @property
    def is_in_mesh_order(self) -> bool:
        """Whether all axes that split one dim do so in the order of the mesh."""
        return not self._minors  # type: ignore[attr-defined]  # set above

    @property
    def plain(self) -> Sharding:
        """The same with tiles instead of windows."""
        return Sharding(self.mesh, self.ndim, self.dims, self.partial) if self.windows else self

    def window(self, dim: int) -> Window | None:
        """What devices hold of `dim`, if that is no tile."""
        return next((window for other, window in self.windows if other == dim), None)

    def _with(self, axis: str, placement: Placement) -> Sharding:
        assert not self.windows, self
        return Sharding.of(self.mesh, self.ndim, {**self.placements(), axis: placement})

    def tile_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """The shape that every device allocates: ceildiv(dim, axis sizes), or a window's length. Dims may be
        symbolic."""
        self._check_rank(shape)
        tile = tuple(map(ceildiv, shape, self._shards))  # type: ignore[attr-defined]  # set above
        if not self.windows:
            return tile
        lengths = {dim: window.length for dim, window in self.windows}
        return tuple(lengths.get(dim, size) for dim, size in enumerate(tile))

    def tile_steps(self, dim: int, size: Any) -> tuple[tuple[str, Any], ...]:
        """Per axis that splits `dim`: by how many elements one step along it moves the tile. A tile's offset is the
        sum of coordinate * step. `size` may be symbolic.

        >>> Sharding.make(Mesh({"x": 2, "y": 2}), 1, {"x": 0, "y": 0}).tile_steps(0, 7)
        (('x', 4), ('y', 2))
        """
        steps = []
        for axis in self.dims[dim]:
            size = ceildiv(size, self.mesh.size(axis))
            steps.append((axis, size))
        return tuple(steps)

    def tile_offset(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Where the tile of device `rank` starts in the tensor (past its end, perhaps, if that tile is empty; before
        its start, perhaps, if it is a window)."""
        self._check_rank(shape)
        at = self.mesh.coordinate(rank)
        starts = [sum(at[a] * step for a, step in self.tile_steps(d, size)) for d, size in enumerate(shape)]
        for dim, window in self.windows:
            starts[dim] = window.start([(axis, self.mesh.size(axis)) for axis in self.dims[dim]], at)
        return tuple(starts)

    def valid_extent(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """How much of the tile of device `rank` holds elements of the tensor, per dim: 0..tile; the rest is padding. A
        window has none: what lies outside the tensor are values as well."""
        self._check_rank(shape)
        at, extents = self.mesh.coordinate(rank), list(shape)
        for dim, axes in enumerate(self.dims):
            for axis, step in self.tile_steps(dim, shape[dim]) if axes else ():
                extents[dim] = max(0, min(step, extents[dim] - at[axis] * step))
        for dim, window in self.windows:
            extents[dim] = window.length
        return tuple(extents)

    def box(self, shape: Sequence[int], rank: int) -> tuple[slice, ...]:
        """Where the valid part of device `rank` lies in the tensor."""
        at = zip(self.tile_offset(shape, rank), self.valid_extent(shape, rank), strict=True)
        return tuple([slice(start, start + extent) for start, extent in at])

    def tiles(self, shape: Sequence[int]) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Of every device, where its tile starts and how much of it is valid."""
        ranks = range(self.mesh.num_devices)
        return tuple([(self.tile_offset(shape, rank), self.valid_extent(shape, rank)) for rank in ranks])

    def _check_rank(self, shape: Sequence[Any]) -> None:
        if len(shape) != self.ndim:
            refuse(
                f"shape {tuple(shape)} has {len(shape)} dims, but the sharding '{self}' is for {self.ndim}",
                fix="pass all sizes of the tensor, or make the sharding for as many dims",
            )


def _canonical(
    mesh: Mesh, ndim: int, by_axis: Mapping[str, Placement]
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, str], ...]]:
    """`dims` and `partial` of a Sharding."""
    dims: list[list[tuple[int, int, str]]] = [[] for _ in range(ndim)]
    partial = []
    for place, axis in enumerate(mesh):
        placement = by_axis.get(axis)
        if isinstance(placement, Shard):
            dims[placement.dim].append((placement.minor, place, axis))
        elif isinstance(placement, Partial):
            partial.append((axis, str.__str__(placement.op)))
    return tuple(tuple([axis for _, _, axis in sorted(axes)]) for axes in dims), tuple(partial)


def _minors(mesh: Mesh, dims: Sequence[Sequence[str]]) -> dict[str, int]:
    """The `minor` of the axes that are not in mesh order: one more wherever the order goes back."""
    found: dict[str, int] = {}
    for axes in dims:
        if len(axes) > 1:
            places, minor = [mesh.axis_names.index(axis) for axis in axes], 0
            for axis, before, place in zip(axes[1:], places, places[1:], strict=False):
                minor += place < before
                if minor:
                    found[axis] = minor
    return found


_KNOWN: WeakValueDictionary[tuple, Sharding] = WeakValueDictionary()
_LOCK = RLock()


def _made(
    mesh: Mesh,
    ndim: int,
    dims: tuple[tuple[str, ...], ...],
    partial: tuple[tuple[str, str], ...],
    windows: tuple[tuple[int, Window], ...] = (),
) -> Sharding:
    """The Sharding of canonical values: the one that there is."""
    key = (mesh, ndim, dims, partial, windows)
    known = _KNOWN.get(key)
    if known is not None:
        return known
    made = object.__new__(Sharding)
    shards = tuple(math.prod(mesh.size(axis) for axis in axes) for axes in dims)
    vars(made).update(mesh=mesh, ndim=ndim, dims=dims, partial=partial, windows=windows)
    places = {axis: dim for dim, axes in enumerate(dims) for axis in axes}
    vars(made).update(_minors=_minors(mesh, dims), _shards=shards, _places=places)
    with _LOCK:
        return _KNOWN.setdefault(key, made)


def ceildiv(size: Any, parts: int) -> Any:
    """`size / parts` rounded up; `size` may be symbolic, and stays as it is when `parts` is 1."""
    return size if parts == 1 else (size + parts - 1) // parts


def _where(mesh: Mesh, ndim: int, name: str) -> str:
    return f"buffer {name!r} ({ndim} dims) on {mesh}" if name else f"a tensor of {ndim} dims on {mesh}"
