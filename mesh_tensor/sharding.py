"""Sharding: how a tensor lies on a mesh, and which part of it each device holds.

Per mesh axis a placement: `Shard(dim)`, `Replicate()` or `Partial(op)`. Several axes may split one dim; then each axis,
in mesh order, splits the tile that the axes before it leave, so a collective over one axis stays within a parent tile.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._sharding_text import parse_text
from .errors import MeshTensorError, listing, refuse
from .mesh import Mesh

REDUCTION_OPS = ("sum", "max", "min", "prod", "bitand", "bitor", "bitxor")


@dataclass(frozen=True)
class Shard:
    """The axis splits dim `dim` of the tensor."""

    dim: int

    def __str__(self) -> str:
        return f"S[{self.dim}]"


@dataclass(frozen=True)
class Replicate:
    """Every device along the axis holds the same."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """The tensor is what `op` makes of what the devices along the axis hold."""

    op: str

    def __str__(self) -> str:
        return f"P[{self.op}]"


Placement = Shard | Replicate | Partial


@dataclass(frozen=True)
class Sharding:
    """How a tensor of `ndim` dims lies on `mesh`. Canonical: equal layouts are equal objects by value and hash.

    `dims` has, per dim, the axes that split it (mesh order, major first); `partial` has (axis, op) in mesh order; all
    other axes replicate.

    >>> s = Sharding.make(Mesh({"x": 2, "y": 2}), 2, {"x": 0, "y": 1})
    >>> str(s), s.tile_shape((5, 8)), s.tile_offset((5, 8), 3), s.valid_extent((5, 8), 3)
    ('S[0], S[1]', (3, 4), (3, 4), (2, 4))
    """

    mesh: Mesh
    ndim: int
    dims: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        stated: list[tuple[str, Placement]] = [(axis, Shard(dim)) for dim, axes in enumerate(self.dims) for axis in axes]
        stated += [(axis, Partial(op)) for axis, op in self.partial]
        problems = [] if len(self.dims) == self.ndim else [f"dims {self.dims} are not {self.ndim} dims"]
        by_axis = _placements(self.mesh, self.ndim, stated, problems)
        if problems:
            refuse(problems, where=f"a Sharding on {self.mesh}", fix="use Sharding.make")
        object.__setattr__(self, "dims", _dims(self.mesh, self.ndim, by_axis))
        object.__setattr__(self, "partial", _partial(self.mesh, by_axis))

    @staticmethod
    def make(
        mesh: Mesh,
        ndim: int,
        sharding: Mapping[str, int | None] | None = None,
        *,
        replicate: str | Iterable[str] = (),
        partial: Mapping[str, str] | None = None,
        name: str = "",
    ) -> Sharding:
        """The Sharding that `sharding` (axis -> dim, or None for replicated) states, checked. An axis left out is
        replicated; `replicate` states that again and is checked; `partial` is axis -> op. Negative dims count from
        the end. `name` is the buffer's, for messages.

        >>> str(Sharding.make(Mesh({"x": 2, "y": 2}), 2, {"x": -1}, partial={"y": "sum"}))
        'S[1], P[sum]'
        """
        problems: list[str] = []
        stated: list[tuple[str, Placement]] = []
        for axis, dim in _items(sharding, "sharding", problems):
            stated.append((axis, Replicate() if dim is None else Shard(dim)))
        stated += [(axis, Replicate()) for axis in ([replicate] if isinstance(replicate, str) else replicate)]
        stated += [(axis, Partial(op)) for axis, op in _items(partial, "partial", problems)]
        by_axis = _placements(mesh, ndim, stated, problems)
        if problems:
            where = f"buffer {name!r} ({ndim} dims) on {mesh}" if name else f"a tensor of {ndim} dims on {mesh}"
            refuse(problems, where=where, fix=_fix(mesh, ndim))
        return Sharding(mesh, ndim, _dims(mesh, ndim, by_axis), _partial(mesh, by_axis))

    @staticmethod
    def parse(mesh: Mesh, ndim: int, text: str, *, name: str = "") -> Sharding:
        """The Sharding that `text` states: `{"x": 0, "y": 1}`, or DistIR's `S[0], R` with one placement per mesh axis.

        >>> mesh = Mesh({"x": 2, "y": 2})
        >>> Sharding.parse(mesh, 2, '{"x": 0}') == Sharding.parse(mesh, 2, "S[0], R")
        True
        """
        sharding, partial = parse_text(mesh, text, name)
        return Sharding.make(mesh, ndim, sharding, partial=partial, name=name)

    def text(self) -> str:
        """DistIR's form, one placement per mesh axis: `S[0], R`. `parse` reads it."""
        return ", ".join(str(self.placement(axis)) for axis in self.mesh)

    def as_dict(self) -> dict[str, int]:
        """The dict form, axis -> dim, of the axes that split a dim."""
        return {axis: dim for axis in self.mesh if (dim := self.dim_of(axis)) is not None}

    def __str__(self) -> str:
        return self.text()

    def placement(self, axis: str) -> Placement:
        """What `axis` does with the tensor."""
        dim, op = self.dim_of(axis), self.partial_op(axis)
        if dim is not None:
            return Shard(dim)
        return Replicate() if op is None else Partial(op)

    def dim_of(self, axis: str) -> int | None:
        """The dim that `axis` splits, or None."""
        self.mesh.check_axes((axis,))
        return next((dim for dim, axes in enumerate(self.dims) if axis in axes), None)

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """The axes that split `dim`, major first."""
        return self.dims[dim]

    def partial_op(self, axis: str) -> str | None:
        """The op that combines what the devices along `axis` hold, or None if `axis` is not partial."""
        self.mesh.check_axes((axis,))
        return dict(self.partial).get(axis)

    def num_shards(self, dim: int) -> int:
        """In how many tiles `dim` is split."""
        shards = 1
        for axis in self.dims[dim]:
            shards *= self.mesh.size(axis)
        return shards

    def with_shard(self, axis: str, dim: int) -> Sharding:
        """The same, but `axis` splits `dim`."""
        return self._with(axis, Shard(dim))

    def with_replicate(self, axis: str) -> Sharding:
        """The same, but replicated along `axis`."""
        return self._with(axis, Replicate())

    def with_partial(self, axis: str, op: str) -> Sharding:
        """The same, but what the devices along `axis` hold combines by `op`."""
        return self._with(axis, Partial(op))

    def _with(self, axis: str, placement: Placement) -> Sharding:
        placements = {a: self.placement(a) for a in self.mesh}
        placements[axis] = placement
        sharding = {a: p.dim for a, p in placements.items() if isinstance(p, Shard)}
        replicate = [a for a, p in placements.items() if isinstance(p, Replicate)]
        partial = {a: p.op for a, p in placements.items() if isinstance(p, Partial)}
        return Sharding.make(self.mesh, self.ndim, sharding, replicate=replicate, partial=partial)

    def tile_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """The shape that every device allocates: ceildiv(dim, axis sizes). Dims may be symbolic."""
        self._check_rank(shape)
        return tuple(ceildiv(size, self.num_shards(dim)) for dim, size in enumerate(shape))

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
        """Where the tile of device `rank` starts in the tensor (past its end, perhaps, if that tile is empty)."""
        self._check_rank(shape)
        at = self.mesh.coordinate(rank)
        return tuple(sum(at[a] * step for a, step in self.tile_steps(d, size)) for d, size in enumerate(shape))

    def valid_extent(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """How much of the tile of device `rank` holds elements of the tensor, per dim: 0..tile; the rest is padding."""
        self._check_rank(shape)
        at = self.mesh.coordinate(rank)
        extents = []
        for dim, valid in enumerate(shape):
            for axis, step in self.tile_steps(dim, valid):
                valid = max(0, min(step, valid - at[axis] * step))
            extents.append(valid)
        return tuple(extents)

    def _check_rank(self, shape: Sequence[Any]) -> None:
        if len(shape) != self.ndim:
            refuse(f"shape {tuple(shape)} has {len(shape)} dims, but the sharding '{self}' is for {self.ndim}")


def ceildiv(size: Any, parts: int) -> Any:
    """`size / parts` rounded up; `size` may be symbolic, and stays as it is when `parts` is 1."""
    return size if parts == 1 else (size + parts - 1) // parts


def _items(value: Mapping[str, Any] | None, what: str, problems: list[str]) -> list[tuple[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, Mapping):
        problems.append(f"`{what}` is {value!r}, which is not a dict")
        return []
    return list(value.items())


def _placements(
    mesh: Mesh, ndim: int, stated: Sequence[tuple[str, Placement]], problems: list[str]
) -> dict[str, Placement]:
    """axis -> placement of everything stated; what is wrong with it goes to `problems`."""
    by_axis: dict[str, Placement] = {}
    for axis, placement in stated:
        if axis not in mesh:
            problems.append(f"unknown mesh axis {axis!r} (the mesh has {listing(mesh.axis_names)})")
            continue
        try:
            normal = _normal(axis, placement, ndim)
        except MeshTensorError as error:
            problems.append(str(error))
            continue
        if by_axis.setdefault(axis, normal) != normal:
            problems.append(f"axis {axis!r} {_in_words(by_axis[axis])}, but also {_in_words(normal)}")
    return by_axis


def _normal(axis: str, placement: Placement, ndim: int) -> Placement:
    if isinstance(placement, Partial) and placement.op not in REDUCTION_OPS:
        refuse(f"axis {axis!r} is partial with unknown op {placement.op!r} (known: {listing(REDUCTION_OPS)})")
    if not isinstance(placement, Shard):
        return placement
    try:
        dim = operator.index(placement.dim)
    except TypeError:
        refuse(f"axis {axis!r} is given dim {placement.dim!r}; an axis splits one dim, which is an int, or None")
    if isinstance(placement.dim, bool) or not -ndim <= dim < ndim:
        refuse(f"axis {axis!r} splits dim {placement.dim}, but there are {ndim} dims")
    return Shard(dim % ndim)


def _in_words(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"splits dim {placement.dim}"
    return "is replicated" if isinstance(placement, Replicate) else f"is partial ({placement.op})"


def _fix(mesh: Mesh, ndim: int) -> str:
    axes = listing(mesh.axis_names)
    dims = f"one dim of 0..{ndim - 1}, " if ndim else ""
    return f"give each axis ({axes}) {dims}None to replicate, or an op under `partial`; each axis once"


def _dims(mesh: Mesh, ndim: int, by_axis: Mapping[str, Placement]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(axis for axis in mesh if by_axis.get(axis) == Shard(dim)) for dim in range(ndim))


def _partial(mesh: Mesh, by_axis: Mapping[str, Placement]) -> tuple[tuple[str, str], ...]:
    return tuple((axis, p.op) for axis in mesh if isinstance(p := by_axis.get(axis), Partial))
