"""Manual computations on one device, the reference: every value is a list of what devices have, and collectives are
what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mesh_tensor.annotations import comm
from mesh_tensor.annotations.comm import Comm
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding


@dataclass(frozen=True, eq=False)
class EachDevice:
    """What the devices along the axes of `mesh` have, by rank."""

    mesh: Mesh
    tensors: tuple[torch.Tensor, ...]

    @property
    def shape(self) -> torch.Size:
        """That of each."""
        return self.tensors[0].shape

    @property
    def dtype(self) -> torch.dtype:
        """That of each."""
        return self.tensors[0].dtype


Local = torch.Tensor | EachDevice


def tiles(value: Local, layout: Sharding, mesh: Mesh, where: str) -> EachDevice:
    """What every device of `mesh` has, of a tensor (or one each, along outer axes) in a layout over some axes."""
    made = []
    if any(size % layout.num_shards(dim) for dim, size in enumerate(value.shape)) or layout.partial:
        refuse(
            f"{list(value.shape)} has no tiles of one shape in '{layout}'", where=where, fix="pad it, or replicate it"
        )
    for rank in range(mesh.num_devices):
        at = mesh.coordinate(rank)
        inner = layout.mesh.rank({axis: at[axis] for axis in layout.mesh})
        made.append(_of(value, at)[layout.box(value.shape, inner)])
    return EachDevice(mesh, tuple(made))


def whole(value: Local, layout: Sharding, outer: Mesh | None, where: str) -> Local:
    """The tensor that devices have tiles of; one for each device of `outer`, if there is one."""
    results = []
    for rank in range(1 if outer is None else outer.num_devices):
        around = {} if outer is None else outer.coordinate(rank)
        results.append(_joined(value, layout, around, where))
    return results[0] if outer is None else EachDevice(outer, tuple(results))


def _joined(value: Local, layout: Sharding, around: dict[str, int], where: str) -> torch.Tensor:
    mesh = layout.mesh
    held = [_of(value, {**around, **mesh.coordinate(rank)}) for rank in range(mesh.num_devices)]
    shape = [size * layout.num_shards(dim) for dim, size in enumerate(value.shape)]
    places: dict[tuple[int, ...], dict[tuple[int, ...], torch.Tensor]] = {}
    for rank, tile in enumerate(held):
        at = mesh.coordinate(rank)
        parts = tuple(at[axis] for axis, _ in layout.partial)
        same = places.setdefault(layout.tile_offset(shape, rank), {})
        if not torch.equal(same.setdefault(parts, tile), tile) and not tile.isnan().any():
            refuse(
                f"devices have different values where '{layout}' says that they have the same",
                where=where,
                fix="combine them (mt.comm.all_reduce), or state how they differ: split along a dim, or partial",
            )
    out = torch.empty(shape, dtype=value.dtype, device=held[0].device)
    for start, parts_of in places.items():
        found = list(parts_of.values())
        tile = _REDUCTIONS[layout.partial[0][1]](found) if layout.partial else found[0]
        out[tuple(slice(low, low + n) for low, n in zip(start, tile.shape, strict=True))] = tile
    return out


def of_each(value: Local, axes: Mesh) -> EachDevice:
    """To every device along the axes what lies at its place along the first dims."""
    outer = value.mesh.shape if isinstance(value, EachDevice) else {}
    mesh = Mesh({**outer, **axes.shape})
    places = map(mesh.coordinate, range(mesh.num_devices))
    return EachDevice(mesh, tuple([_of(value, at)[tuple(at[axis] for axis in axes)] for at in places]))


def of_all(value: Local, axes: Mesh) -> Local:
    """What the devices along the axes have, along first dims."""
    known = value.mesh.shape if isinstance(value, EachDevice) else {}
    rest = {axis: size for axis, size in known.items() if axis not in axes}
    outer = Mesh(rest) if rest else None
    made = []
    for around in map(outer.coordinate, range(outer.num_devices)) if outer is not None else [{}]:
        held = [_of(value, {**around, **axes.coordinate(rank)}) for rank in range(axes.num_devices)]
        made.append(torch.stack(held).reshape(*axes.shape.values(), *value.shape))
    return made[0] if outer is None else EachDevice(outer, tuple(made))


def collective(said: Comm, value: Local, mesh: Mesh) -> EachDevice:
    """What devices of `mesh` have after a collective."""
    made: list[torch.Tensor] = []
    others = [axis for axis in mesh if axis not in said.axes]
    for rank in range(mesh.num_devices):
        at = mesh.coordinate(rank)
        mine = {axis: at[axis] for axis in others}
        group = [_of(value, {**mine, **said.axes.coordinate(n)}) for n in range(said.axes.num_devices)]
        made.append(_KINDS[said.kind](said, group, said.axes.rank({axis: at[axis] for axis in said.axes})))
    return EachDevice(mesh, tuple(made))


def index(said: Comm, mesh: Mesh, device: torch.device) -> EachDevice:
    """Which device of its group each is."""
    ranks = [
        said.axes.rank({a: c for a, c in mesh.coordinate(r).items() if a in said.axes}) for r in range(mesh.num_devices)
    ]
    return EachDevice(mesh, tuple(torch.tensor(rank, dtype=torch.int64, device=device) for rank in ranks))


def on_each(function: Callable[..., Sequence[torch.Tensor]], values: Sequence[Local]) -> list[Any]:
    """The results of a function of tensors, on every device that has its own of some operand."""
    axes = {axis: n for value in values if isinstance(value, EachDevice) for axis, n in value.mesh.shape.items()}
    if not axes:
        return list(function(*values))
    mesh = Mesh(axes)
    rows = [function(*(_of(value, mesh.coordinate(rank)) for value in values)) for rank in range(mesh.num_devices)]
    return [EachDevice(mesh, tuple(column)) for column in zip(*rows, strict=True)]


def chosen(cond: EachDevice, then: Any, other: Any) -> Any:
    """On every device one of two values, or of tuples of them."""
    if isinstance(then, tuple):
        return tuple(chosen(cond, a, b) for a, b in zip(then, other, strict=True))
    places = [(bool(flag), cond.mesh.coordinate(rank)) for rank, flag in enumerate(cond.tensors)]
    return EachDevice(cond.mesh, tuple(_of(then if flag else other, at) for flag, at in places))


def same_on_all(value: Local, function: str) -> bool:
    """Whether what says that a function calls itself is true; all devices have to say so, or none."""
    if not isinstance(value, EachDevice):
        return bool(value)
    said = set(map(bool, value.tensors))
    if len(said) > 1:
        refuse(
            f"some devices have function {function!r} call itself, others don't",
            why="devices go on together, for their collectives",
            fix='combine what says so: mt.comm.all_reduce(goes_on, axes, "max"), of an integer',
        )
    return said.pop()


def _of(value: Local, at: dict[str, int]) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return value.tensors[value.mesh.rank({axis: at[axis] for axis in value.mesh})]


def _stacked(reduce: Callable[[torch.Tensor], torch.Tensor], group: Sequence[torch.Tensor]) -> torch.Tensor:
    wide = torch.stack(list(group))
    narrow = wide.dtype in (torch.float16, torch.bfloat16)
    return reduce(wide.float() if narrow else wide).to(wide.dtype)


_REDUCTIONS: dict[str, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {
    "sum": partial(_stacked, lambda x: x.sum(0)),
    "prod": partial(_stacked, lambda x: x.prod(0)),
    "min": partial(_stacked, lambda x: x.amin(0)),
    "max": partial(_stacked, lambda x: x.amax(0)),
    "avg": partial(_stacked, lambda x: x.mean(0)),
}


def _permuted(said: Comm, group: Sequence[torch.Tensor], me: int) -> torch.Tensor:
    sources = {target: source for source, target in said.pairs}
    return group[sources[me]] if me in sources else torch.zeros_like(group[me])


_Made = Callable[[Comm, Sequence[torch.Tensor], int], torch.Tensor]
_STATED: tuple[tuple[Callable[..., object], _Made], ...] = (
    (comm.all_reduce, lambda c, group, me: _REDUCTIONS[c.op](group)),
    (comm.all_gather, lambda c, group, me: torch.cat(list(group), c.dim)),
    (comm.reduce_scatter, lambda c, group, me: _REDUCTIONS[c.op](group).chunk(len(group), c.dim)[me]),
    (comm.all_to_all, lambda c, group, me: torch.cat([x.chunk(len(group), c.dim)[me] for x in group], c.dst_dim)),
    (comm.permute, _permuted),
    (comm.broadcast, lambda c, group, me: group[c.root]),
    (comm.scatter, lambda c, group, me: group[c.root].chunk(len(group), c.dim)[me]),
)
_KINDS = {stated.__name__: made for stated, made in _STATED}
