"""Gradients of operators that move elements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tvm import relax

from mesh_tensor.rules.operator.shifts import cuts_of

from .table import Backward, Gradient, differentiated, gradient, zeros

op = relax.op


@gradient("reshape", "flatten", "nn.batch_flatten", "expand_dims", "squeeze")
def reshape(b: Backward) -> Sequence[Gradient]:
    return [b.emit(op.reshape(b.d, b.call.inputs[0].shape))]


@gradient("permute_dims")
def permute_dims(b: Backward) -> Sequence[Gradient]:
    ndim = b.call.inputs[0].ndim
    order = b.call.axes(b.call.attr("axes") or tuple(range(ndim))[::-1])
    return [b.emit(op.permute_dims(b.d, [order.index(dim) for dim in range(ndim)]))]


@gradient("broadcast_to")
def broadcast_to(b: Backward) -> Sequence[Gradient]:
    return [b.summed(b.d, 0)]


@gradient("concat")
def concat(b: Backward) -> Sequence[Gradient]:
    axis = b.call.attr("axis")
    if axis is None:
        return differentiated(b)
    axis = b.call.axis(axis)
    ends = list(accumulate(tensor.shape[axis] for tensor in b.call.inputs))
    return _fields(b, op.split(b.d, ends[:-1], axis)) if len(ends) > 1 else [b.d]


@gradient("stack")
def stack(b: Backward) -> Sequence[Gradient]:
    axis, count = b.call.attr("axis", 0) % b.call.outputs[0].ndim, len(b.call.inputs)
    parts = _fields(b, op.split(b.d, list(range(1, count)), axis)) if count > 1 else [b.d]
    return [b.emit(op.reshape(part, b.call.inputs[0].shape)) for part in parts]


def _fields(b: Backward, parts: relax.Expr) -> list[relax.Expr]:
    made = b.emit(parts)
    return [b.emit(relax.TupleGetItem(made, n)) for n in range(len(made.struct_info.fields))]


@gradient("split")
def split(b: Backward) -> Sequence[Gradient]:
    """The parts' gradients side by side; what no part was made of is zero."""
    axis = b.call.axis(b.call.attr("axis", 0))
    parts = [b.emit(zeros(out)) if seed is None else seed for seed, out in zip(b.seeds, b.call.outputs, strict=True)]
    whole = b.call.inputs[0].shape
    left = whole[axis] - sum(out.shape[axis] for out in b.call.outputs)
    if left:
        rest = b.call.inputs[0]._replace(shape=(*whole[:axis], left, *whole[axis + 1 :]))
        parts.append(b.emit(zeros(rest)))
    return [parts[0] if len(parts) == 1 else b.emit(op.concat(parts, axis))]


@gradient("strided_slice")
def strided_slice(b: Backward) -> Sequence[Gradient]:
    """Around what was taken is zero."""
    cuts, shape = cuts_of(b.call), b.call.inputs[0].shape
    steps = any(cut.step != 1 and len(cut) > 1 for cut in cuts.values())
    if steps or any(not 0 < len(cut) == b.call.outputs[0].shape[d] for d, cut in cuts.items()):
        return differentiated(b)
    taken = [(cuts.get(d, range(size)), size) for d, size in enumerate(shape)]
    widths = [width for cut, size in taken for width in (cut.start, size - cut.start - len(cut))]
    return [b.emit(op.nn.pad(b.d, widths)) if any(widths) else b.d]


@gradient("flip")
def flip(b: Backward) -> Sequence[Gradient]:
    return [b.emit(op.flip(b.d, b.call.attr("axis")))]


gradient("slice_scatter", "repeat", "tile", "meshgrid", "nn.pad", "nn.pixel_shuffle", "tril", "triu")(differentiated)
