"""Gradients of reductions and scans along dims."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import relax

from .table import Backward, Gradient, differentiated, gradient, shape_of

op = relax.op


@gradient("sum", "mean")
def total(b: Backward) -> Sequence[Gradient]:
    """Every element has the gradient of its sum; of a mean, its share."""
    d = b.d
    if b.call.name == "mean":
        count = math.prod(b.call.inputs[0].shape[axis] for axis in _axes(b))
        d = b.emit(op.divide(d, b.number(count)))
    return [_spread(b, d)]


@gradient("max", "min")
def extreme(b: Backward) -> Sequence[Gradient]:
    """Those elements that are the maximum have equal shares."""
    x, dtype, keep = b.operands[0], b.call.inputs[0].dtype, list(_axes(b))
    hit = b.emit(op.astype(b.emit(op.equal(x, _spread(b, b.results[0]))), dtype))
    count = b.emit(op.sum(hit, keep, True))
    share = b.emit(op.divide(_kept(b, b.d), count))
    return [b.emit(op.multiply(hit, b.emit(op.broadcast_to(share, b.call.inputs[0].shape))))]


@gradient("collapse_sum_to")
def collapse_sum(b: Backward) -> Sequence[Gradient]:
    return [b.emit(op.broadcast_to(b.d, b.call.inputs[0].shape))]


@gradient("collapse_sum_like")
def collapse_sum_like(b: Backward) -> Sequence[Gradient]:
    return [*collapse_sum(b), None]


@gradient("nn.softmax")
def softmax(b: Backward) -> Sequence[Gradient]:
    """y * (d - the sum of y * d)."""
    y, axis = b.results[0], b.call.axis(b.call.attr("axis"))
    total = b.emit(op.sum(b.emit(op.multiply(b.d, y)), axis, True))
    return [b.emit(op.multiply(y, b.emit(op.subtract(b.d, total))))]


@gradient("nn.log_softmax")
def log_softmax(b: Backward) -> Sequence[Gradient]:
    """d - exp(y) * the sum of d."""
    axis = b.call.axis(b.call.attr("axis"))
    total = b.emit(op.sum(b.d, axis, True))
    return [b.emit(op.subtract(b.d, b.emit(op.multiply(b.emit(op.exp(b.results[0])), total))))]


def _axes(b: Backward) -> tuple[int, ...]:
    return b.call.axes(b.call.attr("axis"))


def _kept(b: Backward, result: relax.Expr) -> relax.Expr:
    """A result, with the dims that were reduced as dims of size 1."""
    axes = _axes(b)
    shape = tuple(1 if d in axes else size for d, size in enumerate(b.call.inputs[0].shape))
    return result if shape_of(result) == shape else b.emit(op.reshape(result, shape))


def _spread(b: Backward, result: relax.Expr) -> relax.Expr:
    """A result at every element that it was made of."""
    shape = b.call.inputs[0].shape
    result = _kept(b, result)
    return result if shape_of(result) == shape else b.emit(op.broadcast_to(result, shape))


# Their rules keep dims whole where parts can't be combined by adding.
gradient("prod", "variance", "std", "median", "cumsum", "cumprod", "sort", "topk")(differentiated)
