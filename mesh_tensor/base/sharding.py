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

from .blocks import ceildiv, whole_blocks
from .errors import MeshTensorError, refuse, shown
from .mesh import Mesh
from .placement import Partial, Placement, Replicate, Shard, collect, how_to_state, how_to_write, parse_text, state
from .window import Window, parse_blocks, parse_windows, windows_text

__all__ = ["Partial", "Placement", "Replicate", "Shard", "Sharding"]


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Sharding:
    """The layout of a tensor of `ndim` dims on `mesh`. Immutable; equal layouts are one object.

    `dims`: per dim, the axes that split it, major first; `partial`: pairs (axis, op) in mesh order; the tensor is
    replicated along all other axes. `windows`: dims of which devices hold overlapping windows instead of tiles; they
    occur for the inputs of kernels and operators, and can't be stated by users. Nor can `blocks`: pairs (dim, block) of
    dims of which tiles are whole blocks, as kernels have them that depend on where their blocks start.

    >>> s = Sharding.make(Mesh({"x": 2, "y": 2}), 2, {"x": 0, "y": 1})
    >>> str(s), s.tile_shape((5, 8)), s.tile_offset((5, 8), 3), s.valid_extent((5, 8), 3)
    ('S[0], S[1]', (3, 4), (3, 4), (2, 4))
    """

    mesh: Mesh
    ndim: int
    dims: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()
    windows: tuple[tuple[int, Window], ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()

    def __new__(
        cls,
        mesh: Mesh | Mapping[str, int],
        ndim: int,
        dims: tuple[tuple[str, ...], ...],
        partial: tuple[tuple[str, str], ...] = (),
        windows: tuple[tuple[int, Window], ...] = (),
        blocks: tuple[tuple[int, int], ...] = (),
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
        in_order = tuple(sorted(windows, key=lambda pair: pair[0]))
        return _made(mesh, ndim, *_canonical(mesh, ndim, by_axis), in_order, tuple(sorted(blocks)))

    def __reduce__(self) -> tuple:
        """Made anew: another process hashes strings differently."""
        return Sharding, (self.mesh, self.ndim, self.dims, self.partial, self.windows, self.blocks)

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
            text, *rest = text.split("; ")
            sharding, partial = parse_text(mesh, text)
        except MeshTensorError as error:
            refuse(str(error), where=_where(mesh, ndim, name), fix=how_to_write(mesh))
        layout = Sharding.make(mesh, ndim, sharding, partial=partial, name=name)
        try:
            blocks = [part for part in rest if part.startswith("B[")]
            windows = [part for part in rest if part not in blocks]
            layout = layout.with_windows(parse_windows(windows, literal_eval)) if windows else layout
            return layout.with_blocks(parse_blocks(blocks)) if blocks else layout
        except (ValueError, SyntaxError, TypeError, LookupError, AssertionError):
            what = f"can't read the sharding: {shown('; '.join(rest))} are no windows or blocks"
            return refuse(what, where=_where(mesh, ndim, name), fix=how_to_write(mesh))

    def text(self) -> str:
        """DistIR's form, one placement per mesh axis: `S[0], R`, and the windows and blocks. `parse` reads it."""
        places = ", ".join(str(placement) for placement in self.placements().values())
        return places + windows_text(self.windows) + "".join(f"; B[{dim}]{block}" for dim, block in self.blocks)

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
        """The placement along every axis, in mesh order."""
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
        """The op that reduces the values of the devices along `axis`, or None if the tensor is not partial there."""
        self.mesh.check_axes((axis,))
        return dict(self.partial).get(axis)

    def num_shards(self, dim: int) -> int:
        """The number of tiles along `dim`."""
        shards: tuple[int, ...] = self._shards  # type: ignore[attr-defined]  # set above
        return shards[dim]

    def with_shard(self, axis: str, dim: int) -> Sharding:
        """A copy in which `axis` splits `dim`."""
        return self._with({axis: Shard(dim)})

    def with_replicate(self, *axes: str) -> Sharding:
        """A copy that is replicated along these axes."""
        return self._with(dict.fromkeys(axes, Replicate())) if axes else self

    def with_partial(self, axis: str, op: str) -> Sharding:
        """A copy that is partial along `axis`: the devices' values are reduced by `op`."""
        return self._with({axis: Partial(op)})

    def with_windows(self, windows: Iterable[tuple[int, Window]]) -> Sharding:
        """A copy in which devices hold windows of these dims instead of tiles; of a dim that no axis splits, all
        devices hold the same window."""
        made = Sharding(self.mesh, self.ndim, self.dims, self.partial, tuple(windows), self.blocks)
        assert all(made.dims[dim] or not window.stride for dim, window in made.windows), made
        return made

    def with_blocks(self, blocks: Iterable[tuple[int, int]]) -> Sharding:
        """A copy in which tiles are whole blocks of these dims, if axes split them: pairs (dim, block)."""
        split = tuple([(dim, block) for dim, block in blocks if self.num_shards(dim) > 1 and block > 1])
        return Sharding(self.mesh, self.ndim, self.dims, self.partial, self.windows, split)

    @property
    def is_in_mesh_order(self) -> bool:
        """Whether all axes that split one dim do so in the order of the mesh."""
        return not self._minors  # type: ignore[attr-defined]  # set above

    @property
    def plain(self) -> Sharding:
        """A copy with tiles as users state them: no windows, and no whole blocks."""
        is_plain = not self.windows and not self.blocks
        return self if is_plain else Sharding(self.mesh, self.ndim, self.dims, self.partial)

    @property
    def complete(self) -> Sharding:
        """A copy with such tiles in which nothing is partial."""
        return Sharding(self.mesh, self.ndim, self.dims)

    def window(self, dim: int) -> Window | None:
        """The window that devices hold of `dim`; None: they hold tiles."""
        return next((window for other, window in self.windows if other == dim), None)

    def _with(self, placements: Mapping[str, Placement]) -> Sharding:
        assert self == self.plain, self
        return Sharding.of(self.mesh, self.ndim, {**self.placements(), **placements})

    def tile_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """The shape of every device's tile, padding included: per dim ceildiv(size, axis sizes), up to whole blocks, or
        a window's length. Sizes may be symbolic."""
        self._check_rank(shape)
        if self.blocks:
            shape = [self._of_blocks(dim, size) for dim, size in enumerate(shape)]
        tile = tuple(map(ceildiv, shape, self._shards))  # type: ignore[attr-defined]  # set above
        if not self.windows:
            return tile
        lengths = {dim: window.length for dim, window in self.windows}
        return tuple(lengths.get(dim, size) for dim, size in enumerate(tile))

    def tile_steps(self, dim: int, size: Any) -> tuple[tuple[str, Any], ...]:
        """For each axis that splits `dim`, the number of elements between the tiles of neighbouring devices: a tile's
        offset is the sum of coordinate * step. `size`, of the whole dim, may be symbolic.

        >>> Sharding.make(Mesh({"x": 2, "y": 2}), 1, {"x": 0, "y": 0}).tile_steps(0, 7)
        (('x', 4), ('y', 2))
        """
        steps, size = [], self._of_blocks(dim, size)
        for axis in self.dims[dim]:
            size = ceildiv(size, self.mesh.size(axis))
            steps.append((axis, size))
        return tuple(steps)

    def _of_blocks(self, dim: int, size: Any) -> Any:
        """How long a dim would be of which all tiles are full."""
        block = dict(self.blocks).get(dim)
        return size if block is None else whole_blocks(size, self.num_shards(dim), block)

    def tile_offset(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The index in the global tensor of the first element of device `rank`'s tile: per dim, which may be past the
        tensor's end for an empty tile, and negative for a window."""
        self._check_rank(shape)
        at = self.mesh.coordinate(rank)
        starts = [sum(at[a] * step for a, step in self.tile_steps(d, size)) for d, size in enumerate(shape)]
        for dim, window in self.windows:
            starts[dim] = window.start([(axis, self.mesh.size(axis)) for axis in self.dims[dim]], at)
        return tuple(starts)

    def valid_extent(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Per dim, the number of elements of device `rank`'s tile that are in the tensor: 0 .. tile size; the rest is
        padding. Windows have no padding: elements outside the tensor count as values."""
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
    blocks: tuple[tuple[int, int], ...] = (),
) -> Sharding:
    """The Sharding of canonical values: the one that there is."""
    key = (mesh, ndim, dims, partial, windows, blocks)
    known = _KNOWN.get(key)
    if known is not None:
        return known
    made = object.__new__(Sharding)
    shards = tuple(math.prod(mesh.size(axis) for axis in axes) for axes in dims)
    vars(made).update(mesh=mesh, ndim=ndim, dims=dims, partial=partial, windows=windows, blocks=blocks)
    places = {axis: dim for dim, axes in enumerate(dims) for axis in axes}
    vars(made).update(_minors=_minors(mesh, dims), _shards=shards, _places=places)
    with _LOCK:
        return _KNOWN.setdefault(key, made)


def _where(mesh: Mesh, ndim: int, name: str) -> str:
    return f"buffer {name!r} ({ndim} dims) on {mesh}" if name else f"a tensor of {ndim} dims on {mesh}"
