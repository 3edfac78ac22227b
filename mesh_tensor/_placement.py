"""What one mesh axis does with a tensor, and the checks of what a caller states about all of them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def state(mesh: Mesh, ndim: int, sharding: Any, replicate: Any, partial: Any) -> tuple[dict[str, Placement], list[str]]:
    """axis -> placement as the three arguments of `Sharding.make` state it, and all that is wrong with them."""
    problems: list[str] = []
    stated: list[tuple[str, Placement]] = []
    for axis, dim in _items(sharding, "sharding", problems):
        stated.append((axis, Replicate() if dim is None else Shard(dim)))
    if replicate is not None and not isinstance(replicate, Iterable):
        problems.append(f"`replicate` is {replicate!r}, which is not a tuple of axis names")
        replicate = ()
    stated += [(axis, Replicate()) for axis in ([replicate] if isinstance(replicate, str) else replicate or ())]
    stated += [(axis, Partial(op)) for axis, op in _items(partial, "partial", problems)]
    by_axis, wrong = collect(mesh, ndim, stated)
    return by_axis, problems + wrong


def collect(mesh: Mesh, ndim: int, stated: Sequence[tuple[str, Placement]]) -> tuple[dict[str, Placement], list[str]]:
    """axis -> placement of everything stated, dims counted from the front, and all that is wrong with it."""
    by_axis: dict[str, Placement] = {}
    problems = []
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
    ops = {axis: placement.op for axis, placement in by_axis.items() if isinstance(placement, Partial)}
    if len(set(ops.values())) > 1:
        stated_ops = ", ".join(f"axis {axis!r} by {op}" for axis, op in ops.items())
        problems.append(f"partial by several ops ({stated_ops}): in which order they are taken would change the value")
    return by_axis, problems


def how_to_state(mesh: Mesh, ndim: int) -> str:
    """The way out of what is wrong with a stated sharding."""
    dims = f"one dim of 0..{ndim - 1}, " if ndim else ""
    return (
        f"give each axis ({listing(mesh.axis_names)}) {dims}None to replicate it, or an op under `partial`; "
        "each axis once, one op for all"
    )


def _items(value: Any, what: str, problems: list[str]) -> list[tuple[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, Mapping):
        problems.append(f"`{what}` is {value!r}, which is not a dict from axis names")
        return []
    return list(value.items())


def _normal(axis: str, placement: Placement, ndim: int) -> Placement:
    if isinstance(placement, Partial) and placement.op not in REDUCTION_OPS:
        refuse(f"axis {axis!r} is partial with unknown op {placement.op!r} (known: {listing(REDUCTION_OPS)})")
    if not isinstance(placement, Shard):
        return placement
    dim = None if isinstance(placement.dim, bool) else _as_int(placement.dim)
    if dim is None:
        refuse(f"axis {axis!r} is given dim {placement.dim!r}; an axis splits one dim, which is an int, or None")
    if not -ndim <= dim < ndim:
        refuse(f"axis {axis!r} splits dim {dim}, but there are {ndim} dims")
    return Shard(dim % ndim)


def _as_int(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None


def _in_words(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"splits dim {placement.dim}"
    return "is replicated" if isinstance(placement, Replicate) else f"is partial ({placement.op})"
