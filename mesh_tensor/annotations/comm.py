"""Collectives on the tiles that devices have, in the body of a manual computation: calls to be bound in TVMScript or by
a BlockBuilder, as `h = mt.comm.all_reduce(h, {"x": 2})`.

`axes` are manual axes with their sizes, a dict or an `mt.Mesh`; several are one group of devices, the first one major.
Every device takes part with its own tile; tiles are of one shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax

from mesh_tensor.base.errors import listing, refuse, shown
from mesh_tensor.base.mesh import Mesh

PREFIX = "mesh.comm."
OPS = ("sum", "prod", "min", "max", "avg")
Axes = Mesh | Mapping[str, int]


@dataclass(frozen=True)
class Comm:
    """One collective: its `kind`, over which axes with which sizes, and what else it was given."""

    kind: str
    axes: Mesh
    op: str = "sum"
    dim: int = 0
    dst_dim: int = 0
    root: int = 0
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def text(self) -> str:
        """As JSON."""
        said = {"op": self.op, "dim": self.dim, "dst_dim": self.dst_dim, "root": self.root, "pairs": self.pairs}
        return json.dumps({"axes": self.axes.shape, **said})

    @staticmethod
    def parse(name: str, text: str) -> Comm:
        """The collective of a call."""
        try:
            said = json.loads(text)
            pairs = tuple((int(a), int(b)) for a, b in said.get("pairs", ()))
            numbers = {key: int(said.get(key, 0)) for key in ("dim", "dst_dim", "root")}
            return Comm(
                name.removeprefix(PREFIX), Mesh(said["axes"]), str(said.get("op", "sum")), pairs=pairs, **numbers
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            refuse(f"{shown(text)} states no collective: {error}", where=name, fix="let mt.comm write it")

    def shape(self, shape: Sequence[Any], where: str = "") -> tuple[Any, ...]:
        """The shape of what a device has after it, of tiles of a shape. Refused where the tiles can't be taken apart
        so, or nothing of this is known."""
        if self.kind not in _SHAPES:
            refuse(f"there is no mt.comm.{self.kind}", fix=f"use one of {listing(list(_SHAPES))}")
        problems = [] if self.op in OPS else [f"unknown op {self.op!r} (known: {listing(OPS)})"]
        ndim, devices = len(shape), self.axes.num_devices
        gathered, split = _SHAPES[self.kind]
        used = [d for d, is_used in ((self.gathered_dim, gathered), (self.dim, split)) if is_used]
        problems += [f"dim {dim} of a tile of {ndim} dims" for dim in used if not -ndim <= dim < ndim]
        if not 0 <= self.root < devices:
            problems.append(f"root {self.root} of {devices} devices")
        ends = [[pair[n] for pair in self.pairs] for n in (0, 1)]
        if any(len(set(end)) < len(end) or any(not 0 <= n < devices for n in end) for end in ends):
            problems.append(f"pairs {self.pairs}: every one of {devices} devices sends and receives once at most")
        if self.kind == "permute" and len(self.axes) > 1:
            problems.append(f"a permutation over several axes, {listing(self.axes.axis_names)}")
        made = list(shape)
        if not problems:
            if split:
                size = made[self.dim]
                if isinstance(size, int) and size % devices:
                    problems.append(f"dim {self.dim} of the tile has {size} elements for {devices} devices")
                made[self.dim] = size // devices
            if gathered:
                made[self.gathered_dim] *= devices
        if problems:
            place = f"{where}: " if where else ""
            refuse(
                problems,
                where=f"{place}mt.comm.{self.kind} over {self.axes}",
                fix="tiles are of one shape on all devices",
            )
        return () if self.kind == "axis_index" else tuple(made)

    @property
    def gathered_dim(self) -> int:
        """The dim along which tiles are put side by side, where they are."""
        return self.dst_dim if self.kind == "all_to_all" else self.dim


# By kind: whether a dim becomes longer by what other devices have, and whether one is divided among them.
_SHAPES = {
    "all_reduce": (False, False),
    "all_gather": (True, False),
    "reduce_scatter": (False, True),
    "all_to_all": (True, True),
    "permute": (False, False),
    "broadcast": (False, False),
    "scatter": (False, True),
    "axis_index": (False, False),
}


def all_reduce(x: relax.Expr, axes: Axes, op: str = "sum") -> relax.Call:
    """What `op` makes of all devices' tiles, on each: "sum", "prod", "min", "max" or "avg"."""
    return _call(x, Comm("all_reduce", Mesh(axes), op))


def all_gather(x: relax.Expr, axes: Axes, dim: int = 0) -> relax.Call:
    """All devices' tiles side by side along a dim, on each."""
    return _call(x, Comm("all_gather", Mesh(axes), dim=dim))


def reduce_scatter(x: relax.Expr, axes: Axes, dim: int = 0, op: str = "sum") -> relax.Call:
    """What `op` makes of all devices' tiles, of which each has its part along a dim."""
    return _call(x, Comm("reduce_scatter", Mesh(axes), op, dim))


def all_to_all(x: relax.Expr, axes: Axes, split_dim: int, concat_dim: int) -> relax.Call:
    """Every device's part along `split_dim` of all tiles, side by side along `concat_dim`."""
    return _call(x, Comm("all_to_all", Mesh(axes), dim=split_dim, dst_dim=concat_dim))


def permute(x: relax.Expr, axes: Axes, pairs: Sequence[tuple[int, int]]) -> relax.Call:
    """For each (source, target) along one axis the source's tile on the target; 0 on devices that are no target."""
    return _call(x, Comm("permute", Mesh(axes), pairs=tuple((int(a), int(b)) for a, b in pairs)))


def broadcast(x: relax.Expr, axes: Axes, root: int = 0) -> relax.Call:
    """The tile of device `root`, on all."""
    return _call(x, Comm("broadcast", Mesh(axes), root=root))


def scatter(x: relax.Expr, axes: Axes, dim: int = 0, root: int = 0) -> relax.Call:
    """Of the tile of device `root`, every device's part along a dim."""
    return _call(x, Comm("scatter", Mesh(axes), dim=dim, root=root))


def axis_index(axes: Axes) -> relax.Call:
    """Which device of the group it is: a scalar, int64."""
    comm = Comm("axis_index", Mesh(axes))
    info = relax.TensorStructInfo((), "int64")
    return relax.op.call_pure_packed(PREFIX + comm.kind, relax.StringImm(comm.text), sinfo_args=[info])


def _call(x: relax.Expr, comm: Comm) -> relax.Call:
    if x.struct_info_ is None:
        x = relax.BlockBuilder().normalize(x)
    info = x.struct_info
    if not isinstance(info, relax.TensorStructInfo) or not isinstance(info.shape, relax.ShapeExpr):
        refuse(f"{x} is {info}, no tensor of known rank", where=f"mt.comm.{comm.kind}", fix="annotate its shape")
    shape = comm.shape([int(size) if hasattr(size, "value") else size for size in info.shape.values])
    made = relax.TensorStructInfo(shape, info.dtype)
    return relax.op.call_pure_packed(PREFIX + comm.kind, x, relax.StringImm(comm.text), sinfo_args=[made])


def comm_of(name: str, call: Any, axes: Mesh, outer: bool) -> Comm | None:
    """The collective that an operator of that name is, in a manual computation over `axes` (R.ccl's go over all of
    them); None if it is none. `outer`: devices of other axes are outside of it. Refused where it goes over other
    devices."""
    attrs = call.attrs
    if name.startswith(PREFIX):
        return Comm.parse(name, str(call.args[-1].value))
    if name not in CCL:
        return None
    if getattr(attrs, "in_group", True) is False and outer:
        refuse(
            f"R.{name} with in_group=False goes over all devices, but only {axes} are manual", fix="say in_group=True"
        )
    workers = int(getattr(attrs, "num_workers", axes.num_devices))
    if workers != axes.num_devices:
        refuse(
            f"R.{name} says {workers} workers, but there are {axes.num_devices} along {axes}",
            fix=f"say num_workers={axes.num_devices}, or take other manual axes",
        )
    dim, op = int(getattr(attrs, "axis", 0)), str(getattr(attrs, "op_type", "sum"))
    return Comm(CCL[name], axes, op, dim)


CCL = {
    "ccl.allreduce": "all_reduce",
    "ccl.allgather": "all_gather",
    "ccl.broadcast_from_worker0": "broadcast",
    "ccl.scatter_from_worker0": "scatter",
}
