"""Rules of what leads into manual computations and out of them: a dim of devices, of which each has one element.

Rules of what stands in graphs for loops: where values enter one and leave it, and rows that its steps take and give.

`loop.enter`: a value before the first step. `loop.next`: what a step hands on to the next one, or in the end out of the
loop. `loop.test`: whether there is a next step. `loop.stack`: rows, one of each step, as one tensor. `loop.row`: the
row of a tensor that a count says.
"""

from __future__ import annotations

from tvm import relax

from mesh_tensor.base.window import EVERYWHERE, Reach, Reaches

from .call import OpCall, packed
from .elementwise import dims_of
from .rule import LocalCall, OpRule, rule
from .shape import to_tile

#: Every device takes its own of what lies along the first dims, or what all have is put there; the axes are a text.
PER_DEVICE, ALL_DEVICES = "mesh.per_device", "mesh.all_devices"
#: What one device has, of what lies along the first dims.
OF_DEVICE = "mesh.of_device"


def devices_call(name: str, x: relax.Expr, axes: tuple[str, ...], shape: tuple[int, ...]) -> relax.Call:
    """A call of one of the two that gives what devices have in this shape."""
    info = relax.TensorStructInfo(shape, x.struct_info.dtype)
    return relax.op.call_pure_packed(name, x, relax.StringImm(",".join(axes)), sinfo_args=[info])


def of_device_call(x: relax.Expr, place: tuple[int, ...]) -> relax.Call:
    """What the device at this place along the first dims has."""
    info = relax.TensorStructInfo([int(size) for size in x.struct_info.shape][len(place) :], x.struct_info.dtype)
    return relax.op.call_pure_packed(OF_DEVICE, x, relax.ShapeExpr(place), sinfo_args=[info])


def axes_of(call: OpCall) -> tuple[str, ...]:
    """The axes of one of the two."""
    return tuple(str(call.literals[-1]).split(","))


def factor_of(axis: str) -> str:
    """The factor of the devices along an axis."""
    return f"devices.{axis}"


@rule(PER_DEVICE)
def per_device(call: OpCall) -> OpRule:
    dims, devices = dims_of(call.outputs[0].ndim), tuple(map(factor_of, axes_of(call)))
    return OpRule(((*devices, *dims),), (dims,), moves=True, devices=frozenset(devices), localize=to_tile)


@rule(ALL_DEVICES)
def all_devices(call: OpCall) -> OpRule:
    dims, devices = dims_of(call.inputs[0].ndim), tuple(map(factor_of, axes_of(call)))
    return OpRule((dims,), ((*devices, *dims),), moves=True, devices=frozenset(devices), localize=to_tile)


@rule(OF_DEVICE)
def of_device(call: OpCall) -> OpRule:
    """Whoever needs a part of it gets that from the one device: all have the same window of the first dims."""
    dims, place = dims_of(call.outputs[0].ndim), call.literals[-1]
    windows = {
        (0, dim): Reaches(EVERYWHERE, call.inputs[0].shape[dim], 0, 1, (Reach(at, at),), always=True)
        for dim, at in enumerate(place)
    }
    given = (*(None for _ in place), *dims)
    return OpRule((given,), (dims,), linear=(frozenset({0}),), moves=True, windows=windows, localize=to_tile)


MARKS = frozenset({"loop.enter", "loop.next", "loop.stack", "loop.test"})


@rule("loop.enter", "loop.next", "loop.test")
def same(call: OpCall) -> OpRule:
    """What goes in comes out."""
    dims = dims_of(call.inputs[0].ndim)
    return OpRule((dims,), (dims,))


@rule("loop.stack")
def stack(call: OpCall) -> OpRule:
    """Every device has its part of all rows."""
    dims = dims_of(call.inputs[0].ndim)
    return OpRule((dims,), ((None, *dims),))


@rule("loop.row")
def row(call: OpCall) -> OpRule:
    """Every device takes its part of the row."""
    dims = dims_of(call.outputs[0].ndim)
    return OpRule(((None, *dims), ()), (dims,), localize=_local_row)


def _local_row(local: LocalCall) -> relax.Expr:
    return packed("loop.row", list(local.args), relax.TensorStructInfo(local.out_tiles[0], local.dtypes[0]))
