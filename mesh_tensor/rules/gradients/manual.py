"""Gradients of what leads into manual computations and out of them: each is the other's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from tvm import relax

from mesh_tensor.rules.operator.manual import ALL_DEVICES, OF_DEVICE, PER_DEVICE, axes_of, devices_call

from .table import Backward, Gradient, gradient, zeros

op = relax.op


@gradient(PER_DEVICE)
def per_device(b: Backward) -> Sequence[Gradient]:
    return [b.emit(devices_call(ALL_DEVICES, b.d, axes_of(b.call), b.call.inputs[0].shape))]


@gradient(ALL_DEVICES)
def all_devices(b: Backward) -> Sequence[Gradient]:
    return [b.emit(devices_call(PER_DEVICE, b.d, axes_of(b.call), b.call.inputs[0].shape))]


@gradient(OF_DEVICE)
def of_device(b: Backward) -> Sequence[Gradient]:
    """Nothing depends on what other devices have."""
    (given,), place = b.call.inputs, b.call.literals[-1]
    there = numpy.zeros(given.shape[: len(place)], dtype=bool)
    there[place] = True
    mask = relax.const(there.reshape(*there.shape, *(1 for _ in given.shape[len(place) :])))
    everywhere = b.emit(op.broadcast_to(b.d, relax.ShapeExpr(given.shape)))
    return [b.emit(op.where(mask, everywhere, b.emit(zeros(given))))]
