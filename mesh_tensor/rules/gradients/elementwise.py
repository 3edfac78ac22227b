"""Gradients of operators that work element by element, that move elements, and of reductions and scans along dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from tvm import relax

from mesh_tensor.rules.operator.shifts import cuts_of

from .table import Backward, Gradient, differentiated, gradient, shape_of, stops, zeros

op = relax.op

# Each is its torch function's own derivative.
_SMOOTH = (
    "acos acosh asin asinh atan atanh cos cosh erf log rsqrt sigmoid sin sinh sqrt square tan tanh clip abs"
    " nn.gelu nn.gelu_tanh nn.relu nn.silu nn.leakyrelu nn.selu nn.softplus nn.prelu"
)
# Small changes of their operands change nothing.
_STEPS = "ceil floor round sign trunc floor_divide"
gradient(*_SMOOTH.split())(differentiated)
stops("grad.no_grad")


@gradient("add", "subtract")
def add(b: Backward) -> Sequence[Gradient]:
    """The gradient of the result, summed where an operand was broadcast."""
    found = iter(b.summed(b.d, n) if b.wanted[n] else None for n in range(len(b.operands)))
    signs = [1, -1 if b.call.name == "subtract" else 1]
    made = []
    for arg, sign in zip(b.call.expr.args, signs, strict=True):
        if isinstance(arg, relax.PrimValue):
            continue
        d = next(found)
        made.append(d if d is None or sign == 1 else b.emit(op.negative(d)))
    return made


@gradient("multiply")
def multiply(b: Backward) -> Sequence[Gradient]:
    left, right = b.arguments()
    return _each(b, [lambda: op.multiply(b.d, right), lambda: op.multiply(b.d, left)])


@gradient("divide")
def divide(b: Backward) -> Sequence[Gradient]:
    _, right = b.arguments()
    share = b.emit(op.divide(b.d, right))
    return _each(b, [lambda: share, lambda: op.negative(b.emit(op.multiply(share, b.results[0])))])


def _each(b: Backward, makers: Sequence[Callable[[], relax.Expr]]) -> list[Gradient]:
    """Per tensor operand what its maker makes, summed where the operand was broadcast. There is a maker for each
    argument; those that are numbers have no gradient."""
    tensors = [make for arg, make in zip(b.call.expr.args, makers, strict=True) if not isinstance(arg, relax.PrimValue)]
    return [b.summed(b.emit(make()), n) if b.wanted[n] else None for n, make in enumerate(tensors)]


@gradient("negative")
def negative(b: Backward) -> Sequence[Gradient]:
    return [b.emit(op.negative(b.d))]


@gradient("exp")
def exp(b: Backward) -> Sequence[Gradient]:
    return [b.emit(op.multiply(b.d, b.results[0]))]


@gradient("astype", "wrap_param")
def astype(b: Backward) -> Sequence[Gradient]:
    return [b.emit(op.astype(b.d, b.call.inputs[0].dtype))]


@gradient("where")
def where(b: Backward) -> Sequence[Gradient]:
    """The gradient goes to the operand that was taken."""
    condition, zero = b.operands[0], b.number(0, 1)
    made = [lambda: op.where(condition, b.d, zero), lambda: op.where(condition, zero, b.d)]
    return [None, *(b.summed(b.emit(make()), n) if b.wanted[n] else None for n, make in enumerate(made, 1))]


@gradient("ewise_fma")
def ewise_fma(b: Backward) -> Sequence[Gradient]:
    """Of a * b + c."""
    left, right, _ = b.operands
    return _each(b, [lambda: op.multiply(b.d, right), lambda: op.multiply(b.d, left), lambda: b.d])


@gradient("power")
def power(b: Backward) -> Sequence[Gradient]:
    """Of a square it is the operand twice; torch's own would take it to the power of 1 first."""
    base, exponent = b.arguments()
    if b.wanted[0] and shape_of(base) == b.call.outputs[0].shape and _is_two(exponent):
        twice = b.emit(op.multiply(base, b.number(2, 0)))
        return [b.emit(op.multiply(b.d, twice)), *[None] * (len(b.operands) - 1)]
    return broadcast(b)


def _is_two(exponent: relax.Expr) -> bool:
    if isinstance(exponent, relax.PrimValue):
        return bool(exponent.value == 2)
    return isinstance(exponent, relax.Constant) and exponent.data.numpy().ndim == 0 and exponent.data.numpy() == 2


@gradient("maximum", "minimum", "atan2", "log_add_exp", "mod", "floor_mod")
def broadcast(b: Backward) -> Sequence[Gradient]:
    """What is wanted is broadcast first, so that devices sum gradients, and never what padding makes of operands."""
    shape = b.call.outputs[0].shape
    kept = [shape_of(x) == shape or not wanted for x, wanted in zip(b.operands, b.wanted, strict=True)]
    wide = [x if same else b.emit(op.broadcast_to(x, shape)) for x, same in zip(b.operands, kept, strict=True)]
    operands = iter(wide)
    args = [next(operands) if not isinstance(arg, relax.PrimValue) else arg for arg in b.call.expr.args]
    expr = relax.BlockBuilder().normalize(relax.Call(b.call.expr.op, args, b.call.expr.attrs))
    inputs = tuple(t if same else t._replace(shape=shape) for t, same in zip(b.call.inputs, kept, strict=True))
    found = differentiated(replace(b, call=replace(b.call, expr=expr, inputs=inputs), operands=tuple(wide)))
    return [None if d is None else b.summed(d, n) for n, d in enumerate(found)]


@gradient(*_STEPS.split())
def step(b: Backward) -> Sequence[Gradient]:
    return [b.emit(zeros(tensor)) for tensor in b.call.inputs]


@gradient("builtin.stop_lift_params", "grad.end_checkpoint", "grad.start_checkpoint", "hint_on_device", "to_vdevice")
def identity(b: Backward) -> Sequence[Gradient]:
    return [b.d]


@gradient("sum", "mean")
def total(b: Backward) -> Sequence[Gradient]:
    """Every element has the gradient of its sum; of a mean, its share."""
    d = b.typed(b.d, 0)
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


@gradient("median")
def median(b: Backward) -> Sequence[Gradient]:
    """Of all elements as a maximum's; along a dim that of the one that was taken."""
    return differentiated(b) if b.call.attr("axis") else extreme(b)


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
    return result if shape_of(result) == shape else b.reshaped(result, shape)


def _spread(b: Backward, result: relax.Expr) -> relax.Expr:
    """A result at every element that it was made of."""
    shape = b.call.inputs[0].shape
    result = _kept(b, result)
    return result if shape_of(result) == shape else b.emit(op.broadcast_to(result, shape))


# Their rules keep dims whole where parts can't be combined by adding.
gradient("prod", "variance", "std", "cumsum", "cumprod", "sort", "topk")(differentiated)


@gradient("reshape", "flatten", "nn.batch_flatten", "expand_dims", "squeeze")
def reshape(b: Backward) -> Sequence[Gradient]:
    return [b.reshaped(b.d, b.call.inputs[0].shape)]


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
    return [b.reshaped(part, b.call.inputs[0].shape) for part in parts]


def _fields(b: Backward, parts: relax.Expr) -> list[relax.Expr]:
    made = b.emit(parts)
    return [b.emit(relax.TupleGetItem(made, n)) for n in range(len(made.struct_info.fields))]


@gradient("split")
def split(b: Backward) -> Sequence[Gradient]:
    """The parts' gradients side by side; what no part was made of is zero. Equal parts are stacked: axes split what is
    in each part, as they do where the parts come from."""
    axis = b.call.axis(b.call.attr("axis", 0))
    parts = [b.emit(zeros(out)) if seed is None else seed for seed, out in zip(b.seeds, b.call.outputs, strict=True)]
    whole = b.call.inputs[0].shape
    left = whole[axis] - sum(out.shape[axis] for out in b.call.outputs)
    if left:
        rest = b.call.inputs[0]._replace(shape=(*whole[:axis], left, *whole[axis + 1 :]))
        parts.append(b.emit(zeros(rest)))
    if len(parts) == 1:
        return parts
    if not left and len({out.shape for out in b.call.outputs}) == 1:
        return [b.reshaped(b.emit(op.stack(parts, axis)), whole)]
    return [b.emit(op.concat(parts, axis))]


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
