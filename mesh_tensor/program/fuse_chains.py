"""Chains of operators that one operator computes: the gradients of a softmax and of its logarithm, norms by the root
mean square, and attention in which heads of queries share those of keys and values, which are repeated for it.

Each is found by its last step, and taken where nothing else uses what lies between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tvm import relax

from mesh_tensor.base.dtypes import TensorType
from mesh_tensor.rules.operator import OpCall
from mesh_tensor.rules.operator.nn import LOG_SOFTMAX_BACKWARD, SHARED_ATTENTION, SOFTMAX_GRADIENT

from .made_values import Made, MadeValues, is_plain
from .steps import OpStep

_WIDE = {"float32", "float64"}  # in which torch sums them


@dataclass(frozen=True)
class Chain:
    """`step` in place of a chain's last step, and of the `inner` ones; it uses the values `again` once less than they
    did."""

    step: OpStep
    inner: tuple[Made, ...]
    again: tuple[str, ...] = ()


def softmax_gradient(known: MadeValues, step: OpStep, number: int) -> Chain | None:
    """y * (d - the sum of d * y along one dim)."""
    if not is_plain(step, "multiply") or len(step.args) != 2:
        return None
    for y, rest in (step.args, step.args[::-1]):
        less = known.maker(rest, "subtract")
        if less is None or len(less.step.args) != 2:
            continue
        d, total = less.step.args
        summed = known.maker(total, "sum")
        parts = None if summed is None else known.maker(summed.step.args[0], "multiply")
        if summed is None or parts is None or sorted(parts.step.args) != sorted((d, y)):
            continue
        inner = (parts, summed, less)
        types = {t for each in (step, parts.step) for t in (*each.call.inputs, *each.call.outputs)}
        if len(types) == 1 and _goes_along_one_dim(summed.step.call) and known.are_within(inner, (d, y), number):
            call = OpCall(SOFTMAX_GRADIENT, summed.step.call.expr, step.call.inputs, step.call.outputs)
            return Chain(_in_place_of(step, inner, call, (d, y)), inner)
    return None


def log_softmax_backward(known: MadeValues, step: OpStep, number: int) -> Chain | None:
    """d - exp(y) * (the sum of d along an axis)."""
    product = known.maker(step.args[1], "multiply") if is_plain(step, "subtract") and len(step.args) == 2 else None
    if product is None or len(product.step.args) != 2:
        return None
    power, total = (known.maker(name, by) for name, by in zip(product.step.args, ("exp", "sum"), strict=True))
    if power is None or total is None or total.step.args != step.args[:1]:
        return None
    (out,), inner, d = step.call.outputs, (product, power, total), step.args[0]
    parts = (step.call.inputs[0], *product.step.call.outputs, *power.step.call.inputs, *total.step.call.inputs)
    sources = (d, power.step.args[0])
    if set(parts) != {out} or not _goes_along_one_dim(total.step.call) or not known.are_within(inner, sources, number):
        return None
    call = OpCall(LOG_SOFTMAX_BACKWARD, total.step.call.expr, (out, out), (out,))
    return Chain(_in_place_of(step, inner, call, sources), inner, (d,))


def rms_norm(known: MadeValues, step: OpStep, number: int) -> Chain | None:
    """x * rsqrt(the mean of x * x along the last dim + a number) * weight."""
    for weight, normal in _either_way(step if is_plain(step, "multiply") else None):
        scaled = known.maker(normal, "multiply")
        for x, rate in _either_way(scaled.step if scaled else None):
            made = _mean_square(known, x, rate)
            if made is None or scaled is None:
                continue
            inner, epsilon = (*made[0], scaled), made[1]
            (out,), of = step.call.outputs, step.call.inputs[step.args.index(weight)]
            types = {t for each in (step, scaled.step, inner[0].step) for t in (*each.call.inputs, *each.call.outputs)}
            fits = of.shape == out.shape[-1:] and scaled.step.call.outputs == inner[0].step.call.outputs == (out,)
            if fits and {t.dtype for t in types} <= _WIDE and known.are_within(inner, (x,), number):
                call = known.call((out, of, epsilon), partial(_norm_call, out, of, epsilon))
                return Chain(_in_place_of(step, inner, call, (x, weight)), inner, (x,))
    return None


def _either_way(step: OpStep | None) -> Sequence[tuple[str, ...]]:
    """The operands of an operator of two, in both orders."""
    return (step.args, step.args[::-1]) if step is not None and len(step.args) == 2 else ()


def _mean_square(known: MadeValues, x: str, rate: str) -> tuple[tuple[Made, ...], float] | None:
    """The steps that make a rate of the squares of x, and the number that is added to their mean."""
    root = known.maker(rate, "rsqrt")
    total = known.maker(root.step.args[0], "add") if root else None
    for averaged, number in _either_way(total.step if total else None):
        mean, epsilon = known.maker(averaged, "mean"), known.number(number)
        square = known.maker(mean.step.args[0], "power", "square", "multiply") if mean else None
        if root is None or total is None or mean is None or square is None or epsilon is None:
            continue
        axis, rank = mean.step.call.attr("axis"), mean.step.call.inputs[0].ndim
        along = axis is not None and mean.step.call.axes(axis) == (rank - 1,) and mean.step.call.attr("keepdims")
        if along and _is_square(known, square.step, x):
            return (square, mean, total, root), epsilon
    return None


def _is_square(known: MadeValues, step: OpStep, x: str) -> bool:
    if step.call.name == "power":
        return step.args[0] == x and len(step.args) == 2 and known.number(step.args[1]) == 2
    return set(step.args) == {x} and len(step.args) == (1 if step.call.name == "square" else 2)


def _norm_call(x: TensorType, weight: TensorType, epsilon: float) -> OpCall:
    operands = [relax.Var(n, relax.TensorStructInfo(t.shape, t.dtype)) for n, t in (("x", x), ("weight", weight))]
    expr = relax.op.nn.rms_norm(*operands, axes=[-1], epsilon=epsilon)
    relax.expr._update_struct_info(expr, relax.TensorStructInfo(x.shape, x.dtype))
    return OpCall("nn.rms_norm", expr, (x, weight), (x,))


_ROWS_FIRST = (0, 2, 1, 3)


def shared_attention(known: MadeValues, step: OpStep, number: int) -> Chain | None:
    """Attention with keys and values whose heads are repeated for those of the queries."""
    if not any(is_plain(step, name) for name in SHARED_ATTENTION):
        return None
    found = [_repeated(known, name) for name in step.args[1:3]]
    keys, values = found
    if keys is None or values is None:
        return None
    inner, sources = (*keys, *values), (keys[0].step.args[0], values[0].step.args[0])
    types = tuple([each[0].step.call.inputs[0] for each in (keys, values)])
    if types[0].shape[1] != types[1].shape[1] or not known.are_within(inner, sources, number):
        return None
    operands, name = (step.call.inputs[0], *types, *step.call.inputs[3:]), SHARED_ATTENTION[step.call.name]
    call = known.call((step.call, types), lambda: OpCall(name, step.call.expr, operands, step.call.outputs))
    return Chain(_in_place_of(step, inner, call, (step.args[0], *sources, *step.args[3:])), inner)


def _repeated(known: MadeValues, name: str) -> tuple[Made, ...] | None:
    """The steps that repeat each head of (batch, heads, positions, width), and bring positions before heads."""
    turned = known.maker(name, "permute_dims")
    joined = known.maker(turned.step.args[0], "reshape") if turned else None
    spread = known.maker(joined.step.args[0], "broadcast_to") if joined else None
    first = known.maker(spread.step.args[0], "reshape", "expand_dims") if spread else None
    if turned is None or joined is None or spread is None or first is None:
        return None
    (of,), (one,), (many,), (all_of,) = (
        first.step.call.inputs,
        first.step.call.outputs,
        spread.step.call.outputs,
        joined.step.call.outputs,
    )
    if of.ndim != 4 or _order(turned.step.call) != _ROWS_FIRST:
        return None
    batch, heads, positions, width = of.shape
    times = all_of.shape[1] // max(1, heads)
    shapes = (
        one.shape == (batch, heads, 1, positions, width),
        many.shape == (batch, heads, times, positions, width),
        all_of.shape == (batch, heads * times, positions, width),
    )
    return (first, spread, joined, turned) if all(shapes) else None


def _order(transpose: OpCall) -> tuple[int, ...]:
    return transpose.axes(transpose.attr("axes", tuple(range(transpose.inputs[0].ndim)[::-1])))


#: What each finds, by a chain's last step.
CHAINS: Sequence[Callable[[MadeValues, OpStep, int], Chain | None]]
CHAINS = (softmax_gradient, log_softmax_backward, rms_norm, shared_attention)


def _in_place_of(step: OpStep, inner: Sequence[Made], call: OpCall, args: tuple[str, ...]) -> OpStep:
    names = tuple([name for each in sorted(inner, key=lambda made: made.at) for name in each.step.stands_for])
    flops = step.flops + sum(each.step.flops for each in inner)
    return replace(step, call=call, args=args, flops=flops, one_for=(*names, *step.stands_for))


def _goes_along_one_dim(total: OpCall) -> bool:
    """Whether a sum in a dtype that torch sums in goes along one dim, and keeps it."""
    axis = total.attr("axis")
    return (
        bool(total.attr("keepdims"))
        and total.outputs[0].dtype in _WIDE
        and axis is not None
        and len(total.axes(axis)) == 1
    )
