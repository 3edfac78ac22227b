"""What manual computations do with values, as nodes: what devices have of their own becomes a dim of devices wherever
they meet, so that a collective is an operator on that dim, and all else of the planner holds as it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy
from tvm import relax

from mesh_tensor.annotations.comm import Comm
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.operator.aten import roll_call
from mesh_tensor.rules.operator.manual import ALL_DEVICES, PER_DEVICE, devices_call, of_device_call
from mesh_tensor.rules.operator.shape import reshape_call

from .ir import Value
from .manual import Axes, axes_in, leaves_devices, wrong_axes

op = relax.op
Emit = Callable[[Callable[..., relax.Expr], Sequence[Value]], Value]


class Devices:
    """What manual computations do with values, as nodes that `emit` adds, with `constant`s. `varying`: which values
    every device has one of its own of, kept by whoever adds nodes."""

    def __init__(
        self, mesh: Mesh, emit: Emit, constant: Callable[[relax.Constant], Value], varying: Mapping[Value, Axes]
    ) -> None:
        self._mesh, self._emit, self._constant, self._varying = mesh, emit, constant, varying

    def edge(self, call: relax.Call, value: Value, where: str) -> Value:
        """What a call that leads into what devices have of their own, or out of it, makes of a value: as reverse passes
        write manual computations, which may know the axes in another order, and a gradient to be the same (0) for all.
        Refused where its axes are not the mesh's, or lead to where devices have their own already."""
        stated, enters = axes_in(call), not leaves_devices(call)
        axes = Mesh(stated)
        own = dict(self._varying.get(value, ()))
        problems = wrong_axes(axes, self._mesh) or [
            f"devices have their own along {axis!r}" for axis in axes if enters and axis in own
        ]
        if problems:
            refuse(problems, where=where, fix="write mt.manual_computation, and let gradients write this")
        if enters:
            return self._per_device(value, {axis: place for place, axis in enumerate(axes)})
        return self._exposed(value, axes.axis_names)

    def tile(self, value: Value, layout: Sharding, what: str) -> Value:
        """What every device has of a tensor in a layout over manual axes. Refused where tiles would not be of one
        shape, or the tensor is pending."""
        shape, mesh = value.type.shape, layout.mesh
        problems = [
            f"{what} is {list(shape)}, and {_named(layout, dim)} don't divide its dim {dim} of {size} evenly"
            for dim, size in enumerate(shape)
            if size % layout.num_shards(dim)
        ]
        problems += [f"{what} is stated to be partial over {axis!r}" for axis, _ in layout.partial]
        if problems:
            refuse(problems, why="in a manual computation all tiles are of one shape", fix="pad it, or replicate it")
        axes = [(axis, dim) for dim in range(layout.ndim) for axis in layout.axes_of(dim)]
        if not axes:
            return value
        tile = layout.tile_shape(shape)
        apart = [n for d in range(layout.ndim) for n in (*(mesh.size(a) for a in layout.axes_of(d)), tile[d])]
        starts = [d + sum(len(layout.axes_of(e)) for e in range(d)) for d in range(layout.ndim)]
        places = {axis: starts[dim] + layout.axes_of(dim).index(axis) for axis, dim in axes}
        return self._per_device(self._reshaped(value, apart), places)

    def whole(self, value: Value, layout: Sharding, what: str) -> Value:
        """The tensor that the devices' values are tiles of. Refused where devices may have different values where the
        layout says that they have the same."""
        stated = {*layout.as_dict(), *(axis for axis, _ in layout.partial)}
        differ = [axis for axis, _ in self._varying.get(value, ()) if axis in layout.mesh and axis not in stated]
        if differ:
            facts = [f"devices along {axis!r} may have different values of {what}" for axis in differ]
            refuse(
                facts, why="the layout says that they have the same", fix="reduce or gather it, or split a dim by it"
            )
        for axis, kind in layout.partial:
            value = self._reduced(self._exposed(value, [axis]), 1, kind)
        axes = [axis for dim in range(layout.ndim) for axis in layout.axes_of(dim)]
        if not axes:
            return value
        ndim, shape = value.type.ndim, value.type.shape
        order = [n for d in range(ndim) for n in (*map(axes.index, layout.axes_of(d)), len(axes) + d)]
        turned = self._turned(self._exposed(value, axes), order)
        return self._reshaped(turned, [size * layout.num_shards(dim) for dim, size in enumerate(shape)])

    def run(self, comm: Comm, value: Value, where: str) -> Value:
        """What a collective makes of the devices' values. Refused where it can't be done with tiles of that shape."""
        comm.shape(value.type.shape, where)
        run: Callable[[Comm, Value], Value] = getattr(self, comm.kind)  # a method for each
        return run(comm, value)

    def apart(self, value: Value, axes: Sequence[str]) -> Value:
        """The same value, which every device along these axes then has of its own."""
        shared = self._mesh.in_order([a for a in axes if a not in dict(self._varying.get(value, ()))])
        if not shared:
            return value
        return self._per_device(self._exposed(value, shared), {axis: place for place, axis in enumerate(shared)})

    def index(self, axes: Mesh) -> Value:
        """Which device of the group it is."""
        numbers = numpy.arange(axes.num_devices, dtype="int64").reshape(tuple(axes.shape.values()))
        return self._per_device(
            self._constant(relax.const(numbers, "int64")), {axis: place for place, axis in enumerate(axes)}
        )

    def all_reduce(self, comm: Comm, value: Value) -> Value:
        """Reduced over the devices."""
        return self._reduced(self._exposed(value, comm.axes.axis_names), len(comm.axes), comm.op)

    def all_gather(self, comm: Comm, value: Value) -> Value:
        """Side by side along a dim."""
        return self._gathered(self._exposed(value, comm.axes.axis_names), comm.axes, comm.dim)

    def reduce_scatter(self, comm: Comm, value: Value) -> Value:
        """Reduced, and every device's part."""
        return self._part(self.all_reduce(comm, value), comm.axes, comm.dim)

    def all_to_all(self, comm: Comm, value: Value) -> Value:
        """Parts of all, side by side."""
        sizes, ndim, dim = tuple(comm.axes.shape.values()), value.type.ndim, comm.dim % value.type.ndim
        exposed, count = self._exposed(value, comm.axes.axis_names), len(comm.axes)
        shape = list(value.type.shape)
        shape[dim] //= comm.axes.num_devices
        apart = self._reshaped(exposed, [*sizes, *shape[:dim], *sizes, *shape[dim:]])
        mine = list(range(count + dim, 2 * count + dim))
        apart = self._turned(apart, [*mine, *(n for n in range(2 * count + ndim) if n not in mine)])
        kept = self._per_device(apart, dict(zip(comm.axes, range(count), strict=True)))
        return self._gathered(kept, comm.axes, comm.dst_dim)

    def permute(self, comm: Comm, value: Value) -> Value:
        """Of another device each, or 0."""
        (axis,), count = comm.axes, comm.axes.num_devices
        exposed = self._exposed(value, (axis,))
        targets: dict[int, list[int]] = {}
        for source, target in comm.pairs:
            targets.setdefault((target - source) % count, []).append(target)
        made = None if len(comm.pairs) == count else self._emit(op.zeros_like, (exposed,))
        for shift, found in targets.items():
            rolled = self._rolled(exposed, shift)
            made = rolled if made is None else self._where(found, rolled, made)
        assert made is not None, comm
        return self._per_device(made, {axis: 0})

    def _rolled(self, value: Value, shift: int) -> Value:
        return self._emit(lambda x: roll_call(x, {0: shift}, x.struct_info), (value,)) if shift else value

    def _where(self, places: Sequence[int], value: Value, other: Value) -> Value:
        """One value at these places of the first dim, the other elsewhere."""
        mask = numpy.zeros((value.type.shape[0], *(1 for _ in value.type.shape[1:])), dtype=bool)
        mask[list(places)] = True
        there = self._constant(relax.const(mask))
        return self._emit(op.where, (there, value, other))

    def broadcast(self, comm: Comm, value: Value) -> Value:
        """Of one device; where all have the same, what they have."""
        mine = [axis for axis, _ in self._varying.get(value, ()) if axis in comm.axes]
        if not mine:
            return value
        root = comm.axes.coordinate(comm.root)
        place = tuple([root[axis] for axis in mine])
        return self._emit(lambda x: of_device_call(x, place), (self._exposed(value, mine),))

    def scatter(self, comm: Comm, value: Value) -> Value:
        """Every device's part of one's."""
        return self._part(self.broadcast(comm, value), comm.axes, comm.dim)

    def _part(self, value: Value, axes: Mesh, dim: int) -> Value:
        dim %= value.type.ndim
        layout = Sharding.make(axes, value.type.ndim, dict.fromkeys(axes, dim))
        return self.tile(value, layout, f"dim {dim} of a tile")

    def _gathered(self, exposed: Value, axes: Mesh, dim: int) -> Value:
        """Of a value with devices in front, or on devices, these merged with a dim."""
        count = len(axes)
        ndim = exposed.type.ndim - count
        dim %= ndim
        shape = exposed.type.shape[count:]
        rest = [count + d for d in range(ndim)]
        turned = self._turned(exposed, [*rest[:dim], *range(count), *rest[dim:]])
        return self._reshaped(turned, [n * axes.num_devices if d == dim else n for d, n in enumerate(shape)])

    def _exposed(self, value: Value, axes: Sequence[str]) -> Value:
        """The devices along the axes as first dims, in that order; of a value that they all have, it once for each."""
        mine = [axis for axis, _ in self._varying.get(value, ()) if axis in axes]
        if mine:
            shape = (*map(self._mesh.size, mine), *value.type.shape)
            value = self._emit(lambda x: devices_call(ALL_DEVICES, x, tuple(mine), shape), (value,))
        same = [axis for axis in axes if axis not in mine]
        if same:
            own, sizes = value.type.shape, [self._mesh.size(axis) for axis in same]
            value = self._reshaped(value, [*(1 for _ in same), *own])
            value = self._emit(lambda x: op.broadcast_to(x, (*sizes, *own)), (value,))
        there = [*same, *mine]
        rest = range(len(there), value.type.ndim)
        return self._turned(value, [*map(there.index, axes), *rest])

    def _per_device(self, value: Value, places: Mapping[str, int]) -> Value:
        """To every device its own along the dims at these places."""
        axes = self._mesh.in_order(places)
        first = [places[axis] for axis in axes]
        value = self._turned(value, [*first, *(n for n in range(value.type.ndim) if n not in first)])
        shape = value.type.shape[len(axes) :]
        return self._emit(lambda x: devices_call(PER_DEVICE, x, axes, shape), (value,))

    def _reduced(self, value: Value, count: int, kind: str) -> Value:
        """Reduced over the first dims, in the value's dtype."""
        reduce, dims = _REDUCTIONS[kind], list(range(count))
        made = self._emit(lambda x: reduce(x, dims), (value,))
        if made.type.dtype == value.type.dtype:
            return made
        return self._emit(lambda x: op.astype(x, value.type.dtype), (made,))

    def _turned(self, value: Value, order: Sequence[int]) -> Value:
        if list(order) == list(range(len(order))):
            return value
        return self._emit(lambda x: op.permute_dims(x, list(order)), (value,))

    def _reshaped(self, value: Value, shape: Sequence[int]) -> Value:
        if tuple(shape) == value.type.shape:
            return value
        return self._emit(lambda x: reshape_call(x, shape), (value,))


def _named(layout: Sharding, dim: int) -> str:
    return " times ".join(f"{axis!r} ({layout.mesh.size(axis)})" for axis in layout.axes_of(dim))


_REDUCTIONS: dict[str, Callable[[relax.Expr, list[int]], relax.Expr]] = {
    "sum": op.sum,
    "prod": op.prod,
    "min": op.min,
    "max": op.max,
    "avg": op.mean,
}
