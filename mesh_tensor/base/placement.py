"""What one mesh axis does with a tensor, and the checks of what a caller states about all of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import MeshTensorError, did_you_mean, listing, refuse, shown
from .mesh import Mesh, as_int
from .reductions import PARTIAL_OPS

_OPS_OF_TORCH = {theirs: ours for ours, theirs in PARTIAL_OPS.items()}


@dataclass(frozen=True)
class Shard:
    """The axis splits dim `dim` of the tensor. Of the axes that split one dim, those with a lower `minor` are major; of
    equals, the mesh's order says."""

    dim: int
    minor: int = 0

    def __str__(self) -> str:
        return f"S[{self.dim}:{self.minor}]" if self.minor else f"S[{self.dim}]"

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim}, minor={self.minor})" if self.minor else f"Shard(dim={self.dim})"


@dataclass(frozen=True)
class Replicate:
    """All devices along the axis hold the same elements."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """The tensor is the reduction by `op` of the values that the devices along the axis hold."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P[{self.op}]"


Placement = Shard | Replicate | Partial


def of_torch(placement: Any) -> Placement | None:
    """The placement that one of torch.distributed.tensor's means; None if it is none of those. Their subclasses mean
    more than their base: the mask of an embedding, the root of a norm."""
    kind = type(placement)
    if not kind.__module__.startswith("torch.distributed.tensor"):
        return None
    if kind.__name__ == "Shard":
        return Shard(placement.dim)
    if kind.__name__ == "Replicate":
        return Replicate()
    is_known = kind.__name__ == "Partial" and placement.reduce_op in _OPS_OF_TORCH
    return Partial(_OPS_OF_TORCH[placement.reduce_op]) if is_known else None


def state(mesh: Mesh, ndim: int, sharding: Any, replicate: Any, partial: Any) -> tuple[dict[str, Placement], list[str]]:
    """axis -> placement as the three arguments of `Sharding.make` state it, and all that is wrong with them."""
    problems: list[str] = []
    if is_list(sharding):
        sharding, problems = _by_axis(mesh, sharding)
    stated = [one for key, value in _items(sharding, "sharding", problems) for one in _one_or_more(key, value)]
    problems += _unordered(sharding)
    if replicate is not None and not isinstance(replicate, Iterable):
        problems.append(f"`replicate` is {shown(replicate)}, which is not a tuple of axis names")
        replicate = ()
    stated += [(axis, Replicate()) for axis in ([replicate] if isinstance(replicate, str) else replicate or ())]
    stated += [(axis, Partial(op)) for axis, op in _items(partial, "partial", problems)]
    by_axis, wrong = collect(mesh, ndim, stated)
    return by_axis, problems + wrong


def is_list(sharding: Any) -> bool:
    """Whether a sharding is stated as a list: one placement per mesh axis, in order."""
    return isinstance(sharding, Sequence) and not isinstance(sharding, (str, bytes))


def collect(mesh: Mesh, ndim: int, stated: Sequence[tuple[str, Placement]]) -> tuple[dict[str, Placement], list[str]]:
    """axis -> placement of everything stated, dims counted from the front, and all that is wrong with it."""
    by_axis: dict[str, Placement] = {}
    problems = []
    for axis, placement in stated:
        if axis not in mesh:
            problems.append(_unknown(mesh, axis, placement))
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
        problems.append(f"`{what}` is {shown(value)}, which is not a dict from axis names")
        return []
    return list(value.items())


def _one_or_more(key: Any, value: Any) -> list[tuple[str, Placement]]:
    """What is stated of an axis, or of a tuple of axes that split one dim, the first one major."""
    if not isinstance(key, tuple):
        return [(key, _stated(value))]
    placement = _stated(value)
    if not isinstance(placement, Shard):
        return [(axis, placement) for axis in key]
    return [(axis, Shard(placement.dim, minor)) for minor, axis in enumerate(key)]


def _unordered(sharding: Any) -> list[str]:
    """The dims of which a dict says the order of some axes, but not where others go."""
    if not isinstance(sharding, Mapping) or not any(isinstance(key, tuple) for key in sharding):
        return []
    dims = [value for value in sharding.values() if isinstance(value, int)]
    facts = (key for key, dim in sharding.items() if isinstance(key, tuple) and isinstance(dim, int))
    return [
        f"{shown(key)} split dim {sharding[key]} in that order, and other axes split it as well"
        for key in facts
        if dims.count(sharding[key]) > 1
    ]


def _by_axis(mesh: Mesh, placements: Sequence[Any]) -> tuple[dict[str, Any], list[str]]:
    """The dict form of a list of placements, and what is wrong with the list."""
    axes = [value for value in placements if isinstance(value, str)]
    if axes:
        dims = {axis: dim for dim, axis in enumerate(placements) if isinstance(axis, str)}
        fact = f"the sharding {shown(placements)} has {listing(axes)}, but a list has one placement per mesh axis"
        return {}, [f"{fact}; an axis per dim is written {shown(dims)}"]
    if len(placements) != len(mesh):
        axes_there = f"the mesh has {len(mesh)} axes ({listing(mesh.axis_names)})"
        return {}, [f"the sharding {shown(placements)} has {len(placements)} placements, but {axes_there}"]
    return dict(zip(mesh, placements, strict=True)), []


def _stated(value: Any) -> Placement:
    """The placement that a value stands for: one of ours or of torch's, a dim, or None. What it can't be is left to
    `_normal`."""
    if isinstance(value, (Shard, Replicate, Partial)):
        return value
    return Replicate() if value is None else of_torch(value) or Shard(value)


def _unknown(mesh: Mesh, axis: Any, placement: Placement) -> str:
    known = f"the mesh has {listing(mesh.axis_names)}"
    dim: Any = placement.dim if isinstance(placement, Shard) else ()
    axes = dim if isinstance(dim, (tuple, list)) else (dim,)
    if axes and all(name in mesh for name in axes):
        there, wanted = shown({axis: dim}), shown(dict.fromkeys(axes, axis))
        return f"{there}: axis and dim are the other way round; write {wanted} ({known})"
    return f"unknown mesh axis {shown(axis)} ({known}){did_you_mean(axis, mesh.axis_names)}"


def _normal(axis: str, placement: Placement, ndim: int) -> Placement:
    if isinstance(placement, Partial) and placement.op not in tuple(PARTIAL_OPS):
        known = f"(known: {listing(tuple(PARTIAL_OPS))}){did_you_mean(placement.op, PARTIAL_OPS)}"
        refuse(f"axis {axis!r} is partial with unknown op {shown(placement.op)} {known}")
    if not isinstance(placement, Shard):
        return placement
    dim = as_int(placement.dim)
    if dim is None:
        refuse(f"axis {axis!r} is given dim {shown(placement.dim)}; an axis splits one dim, which is an int, or None")
    if not -ndim <= dim < ndim:
        refuse(f"axis {axis!r} splits dim {dim}, but there are {ndim} dims")
    return Shard(dim % ndim, placement.minor)


def _in_words(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"splits dim {placement.dim}" + (f" ({placement.minor})" if placement.minor else "")
    return "is replicated" if isinstance(placement, Replicate) else f"is partial ({placement.op})"


_ITEM = re.compile(r"S\[\s*(?P<dim>-?\d+)\s*(:\s*(?P<minor>\d+)\s*)?\]|R|P\[\s*(?P<op>\w+)\s*\]")


def parse_text(mesh: Mesh, text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What `text` states: axis -> dim or Shard (None: replicated), and axis -> op of the partial ones."""
    stripped = text.strip()
    return (parse_dict(stripped), {}) if stripped.startswith("{") else _parse_distir(mesh, stripped)


def how_to_write(mesh: Mesh) -> str:
    """The way out of a text that can't be read."""
    example = ", ".join(["S[0]", *["R"] * (len(mesh) - 1)])
    return f'write one placement per mesh axis, as in "{example}", or a dict, as in {{"{mesh.axis_names[0]}": 0}}'


def parse_dict(text: str) -> dict[str, Any]:
    """A Python dict display (JSON's null is None); an axis may be named once."""
    try:
        tree = ast.parse(re.sub(r"\bnull\b", "None", text), mode="eval").body
        pairs = list(zip(tree.keys, tree.values, strict=True)) if isinstance(tree, ast.Dict) else [(None, tree)]
        items = [(ast.literal_eval(key or "*"), ast.literal_eval(value)) for key, value in pairs]
    except (ValueError, SyntaxError):
        refuse(f"can't read the sharding {shown(text)}: it is not a dict")
    found: dict[str, Any] = {}
    for axis, dim in items:
        if axis in found:
            refuse(f"can't read the sharding {shown(text)}: axis {axis!r} is on two dims, {found[axis]} and {dim}")
        found[axis] = dim
    return found


def _parse_distir(mesh: Mesh, text: str) -> tuple[dict[str, Any], dict[str, str]]:
    items = [item.strip() for item in text.split(",")]
    bad = [item for item in items if not _ITEM.fullmatch(item)]
    if bad:
        refuse(f"can't read the sharding {shown(text)}: {listing(bad)} is none of S[dim], R, P[op]")
    if len(items) != len(mesh):
        axes = f"the mesh has {len(mesh)} axes ({listing(mesh.axis_names)})"
        refuse(f"can't read the sharding {shown(text)}: {axes}, but placements: {len(items)}")
    sharding: dict[str, Any] = {}
    partial: dict[str, str] = {}
    for axis, item in zip(mesh, items, strict=True):
        if item.startswith("P"):
            partial[axis] = item[2:-1].strip()
        else:
            dim, _, minor = item[2:-1].partition(":")
            sharding[axis] = None if item == "R" else Shard(int(dim), int(minor)) if minor else int(dim)
    return sharding, partial
