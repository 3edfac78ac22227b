"""Rules of what leads into manual computations and out of them: a dim of devices, of which each has one element."""

from __future__ import annotations

from tvm import relax

from .call import OpCall
from .elementwise import dims_of
from .rule import LocalCall, OpRule, rule

#: Every device takes its own of what lies along the first dims, or what all have is put there; the axes are a text.
PER_DEVICE, ALL_DEVICES = "mesh.per_device", "mesh.all_devices"


def devices_call(name: str, x: relax.Expr, axes: tuple[str, ...], shape: tuple[int, ...]) -> relax.Call:
    """A call of one of the two that gives what devices have in this shape."""
    info = relax.TensorStructInfo(shape, x.struct_info.dtype)
    return relax.op.call_pure_packed(name, x, relax.StringImm(",".join(axes)), sinfo_args=[info])


def axes_of(call: OpCall) -> tuple[str, ...]:
    """The axes of one of the two."""
    return tuple(str(call.literals[-1]).split(","))


def factor_of(axis: str) -> str:
    """The factor of the devices along an axis."""
    return f"devices.{axis}"


@rule(PER_DEVICE)
def per_device(call: OpCall) -> OpRule:
    dims, devices = dims_of(call.outputs[0].ndim), tuple(map(factor_of, axes_of(call)))
    return OpRule(((*devices, *dims),), (dims,), moves=True, devices=frozenset(devices), localize=_to_tile)


@rule(ALL_DEVICES)
def all_devices(call: OpCall) -> OpRule:
    dims, devices = dims_of(call.inputs[0].ndim), tuple(map(factor_of, axes_of(call)))
    return OpRule((dims,), ((*devices, *dims),), moves=True, devices=frozenset(devices), localize=_to_tile)


def _to_tile(local: LocalCall) -> relax.Expr:
    return relax.op.reshape(local.args[0], local.out_tiles[0])
