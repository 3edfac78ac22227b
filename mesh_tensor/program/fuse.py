"""Operators that torch has as one: products with a transposed matrix; products and convolutions with a bias, which is
added before they are rounded to 16 bits; and the gradients of a softmax and of its logarithm. What lies between them is
never made, unless others use it. A transpose that undoes another is what that was made of.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mesh_tensor.base.dtypes import TensorType, is_float
from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.rules.operator.conv import CONV_ADD
from mesh_tensor.rules.operator.linear_algebra import LINEAR, MATMUL_ADD
from mesh_tensor.rules.operator.nn import LOG_SOFTMAX_BACKWARD, SOFTMAX_GRADIENT

from .program import ProgramValue
from .steps import OpStep, Step

#: From products to what they are with a bias.
_WITH_BIAS = {"matmul": MATMUL_ADD, LINEAR: LINEAR, **CONV_ADD}


def fused(steps: Sequence[Step], values: Mapping[str, ProgramValue], lasting: Collection[str]) -> list[Step]:
    """The steps, where operators are taken together. `lasting`: values that somebody uses afterwards."""
    return _Fuser(steps, values, lasting).steps()


@dataclass(frozen=True)
class _Made:
    """By which step, and when, a value is made."""

    step: OpStep
    at: int


class _Fuser:
    def __init__(self, steps: Sequence[Step], values: Mapping[str, ProgramValue], lasting: Collection[str]) -> None:
        self._all, self._values, self._lasting = steps, values, lasting
        self._uses = Counter([*lasting, *(name for step in steps for name in step.reads)])
        self._writes: dict[str, list[int]] = {}  # per storage, when others than operators write it
        self._others = [number for number, step in enumerate(steps) if not isinstance(step, OpStep)]
        for number in self._others:
            for name in steps[number].writes:
                self._writes.setdefault(values[name].storage, []).append(number)
        self._made: dict[str, _Made] = {}
        self._same: dict[str, str] = {}  # values that are others
        self._known: dict[tuple[OpCall, OpCall, int], OpCall] = {}

    def steps(self) -> list[Step]:
        """The steps, in order."""
        made: list[Step | None] = []
        for number, step in enumerate(self._all):
            if isinstance(step, OpStep):
                step = replace(step, args=tuple([self._same.get(name, name) for name in step.args]))
                if not self._undone(step):
                    step = self._with_bias(self._transposed(step, number), number, made)
                    step = self._softmax_gradient(step, number, made)
                    step = self._log_softmax_backward(step, number, made)
                    self._made |= dict.fromkeys(step.results, _Made(step, number))
            made.append(step)
        return self._used(made)

    def _undone(self, step: OpStep) -> bool:
        """Whether it is a transpose that undoes another one, so that what it makes is there."""
        inner = self._maker(step.args[0], "permute_dims") if _is_plain(step, "permute_dims") else None
        if inner is None or step.whole or step.results[0] in self._lasting:
            return False
        source, result = inner.step.args[0], step.results[0]
        if not undoes(step.call, inner.step.call) or not self._stays(source, inner.at, len(self._all)):
            return False
        self._uses[source] += self._uses[result]
        self._uses[result], self._same[result] = 0, source
        return True

    def _transposed(self, step: OpStep, number: int) -> OpStep:
        """A product with a matrix that is transposed before, as one with that matrix."""
        matrix = self._maker(step.args[1], "permute_dims") if _is_plain(step, "matmul") else None
        if matrix is None or not turns_matrix(step.call, matrix.step.call):
            return step
        source = matrix.step.args[0]
        if not self._stays(source, matrix.at, number):
            return step
        self._uses[step.args[1]] -= 1
        self._uses[source] += 1
        key = step.call, matrix.step.call, -1
        if key not in self._known:
            self._known[key] = linear_call(step.call, matrix.step.call)
        return replace(step, call=self._known[key], args=(step.args[0], source))

    def _with_bias(self, step: OpStep, number: int, made: list[Step | None]) -> OpStep:
        """A sum of a product, or a convolution, and a bias, as one; the product is not made before."""
        if not _is_plain(step, "add") or len(step.args) != 2:
            return step
        for position in (0, 1):
            made_by = (self._maker(step.args[position], name) for name in _WITH_BIAS)
            product = next((one for one in made_by if one is not None), None)
            if product is not None and self._may_add(product, step, position, number):
                call = self._with(_WITH_BIAS[product.step.call.name], product.step.call, step.call, position)
                made[product.at] = None
                self._uses[step.args[position]] = 0
                args = (*product.step.args, step.args[1 - position])
                return replace(step, call=call, args=args, flops=step.flops + product.step.flops)
        return step

    def _softmax_gradient(self, step: OpStep, number: int, made: list[Step | None]) -> OpStep:
        """y * (d - the sum of d * y along one dim), as one."""
        if not _is_plain(step, "multiply") or len(step.args) != 2:
            return step
        for y, rest in (step.args, step.args[::-1]):
            less = self._maker(rest, "subtract")
            if less is None or len(less.step.args) != 2:
                continue
            d, total = less.step.args
            summed = self._maker(total, "sum")
            parts = None if summed is None else self._maker(summed.step.args[0], "multiply")
            if summed is None or parts is None or sorted(parts.step.args) != sorted((d, y)):
                continue
            inner = (parts, summed, less)
            if _is_softmax(step.call, summed.step.call, parts.step.call) and self._are_within(inner, (d, y), number):
                for each in inner:
                    made[each.at] = None
                    self._uses[each.step.results[0]] = 0
                call = OpCall(SOFTMAX_GRADIENT, summed.step.call.expr, step.call.inputs, step.call.outputs)
                flops = step.flops + sum(each.step.flops for each in inner)
                return replace(step, call=call, args=(d, y), flops=flops)
        return step

    def _are_within(self, inner: Sequence[_Made], sources: Sequence[str], number: int) -> bool:
        """Whether the steps run among operators alone up to that one, what they make is used once, and what they are
        made of stays."""
        alone = all(self._uses[each.step.results[0]] == 1 and self._follows(each, number) for each in inner)
        return alone and all(self._stays(name, inner[0].at, number) for name in sources)

    def _log_softmax_backward(self, step: OpStep, number: int, made: list[Step | None]) -> OpStep:
        """d - exp(y) * (the sum of d along an axis), as one."""
        if not _is_plain(step, "subtract") or len(step.args) != 2 or self._uses[step.args[1]] != 1:
            return step
        product = self._maker(step.args[1], "multiply")
        if product is None or len(product.step.args) != 2:
            return step
        power, total = (self._maker(n, by) for n, by in zip(product.step.args, ("exp", "sum"), strict=True))
        if power is None or total is None or not self._is_log_softmax_backward(step, product, power, total, number):
            return step
        (out,) = step.call.outputs
        for inner in (product, power, total):
            made[inner.at], self._uses[inner.step.results[0]] = None, 0
        self._uses[step.args[0]] -= 1
        call = OpCall(LOG_SOFTMAX_BACKWARD, total.step.call.expr, (out, out), (out,))
        flops = step.flops + product.step.flops + power.step.flops + total.step.flops
        return replace(step, call=call, args=(step.args[0], power.step.args[0]), flops=flops)

    def _is_log_softmax_backward(self, step: OpStep, product: _Made, power: _Made, total: _Made, number: int) -> bool:
        (out,), along = step.call.outputs, total.step.call
        alike = {step.call.inputs[0], *product.step.call.outputs, *power.step.call.inputs, *along.inputs}
        axis = along.attr("axis")
        return (
            alike == {out}
            and out.dtype in ("float32", "float64")
            and total.step.args == step.args[:1]
            and bool(along.attr("keepdims"))
            and axis is not None
            and len(along.axes(axis)) == 1
            and all(self._uses[name] == 1 for name in product.step.args)
            and self._follows(power, number)
            and self._follows(total, number)
        )

    def _follows(self, inner: _Made, number: int) -> bool:
        """Whether there are only operators between the two steps."""
        return bisect_right(self._others, inner.at) == bisect_right(self._others, number)

    def _may_add(self, product: _Made, step: OpStep, position: int, number: int) -> bool:
        call, bias = product.step.call, step.call.inputs[1 - position]
        (out,) = call.outputs
        return (
            len(call.inputs) == 2
            and (bias.shape == out.shape[-1:] if _is_linear(call) else _is_bias(bias, call))
            and (out,) == step.call.outputs
            and step.call.inputs[position] == out
            and bias.dtype == out.dtype
            and self._uses[step.args[position]] == 1
            and self._follows(product, number)
        )

    def _maker(self, name: str, operator: str) -> _Made | None:
        made = self._made.get(name)
        return made if made is not None and _is_plain(made.step, operator) else None

    def _stays(self, name: str, since: int, until: int) -> bool:
        """Whether nothing but operators writes a value's memory between two steps."""
        return not any(since < at < until for at in self._writes.get(self._values[name].storage, ()))

    def _with(self, name: str, product: OpCall, add: OpCall, position: int) -> OpCall:
        """The call of a product and the bias that is added to it, the operand of `add` that is not at `position`."""
        key = product, add, position
        if key not in self._known:
            operands = (*product.inputs, add.inputs[1 - position])
            self._known[key] = OpCall(name, product.expr, operands, product.outputs)
        return self._known[key]

    def _used(self, steps: Sequence[Step | None]) -> list[Step]:
        """The steps without transposes whose results nothing uses any more."""
        made: list[Step] = []
        for step in reversed(steps):
            if step is None:
                continue
            if isinstance(step, OpStep) and _is_plain(step, "permute_dims") and not self._uses[step.results[0]]:
                self._uses[step.args[0]] -= 1
                continue
            made.append(step)
        return made[::-1]


def undoes(call: OpCall, inner: OpCall) -> bool:
    """Whether a transpose of what another one gives gives what that took."""
    before, after = _order(inner), _order(call)
    return inner.outputs == call.inputs and [before[dim] for dim in after] == sorted(before)


def turns_matrix(product: OpCall, transpose: OpCall) -> bool:
    """Whether a product is one with the matrix that a transpose turns, which torch has as one function."""
    return _is_linear(product) and transpose.outputs == product.inputs[1:] and _order(transpose) == [1, 0]


def linear_call(product: OpCall, transpose: OpCall) -> OpCall:
    """The product as one with the matrix as it was before the transpose."""
    return OpCall(LINEAR, product.expr, (product.inputs[0], *transpose.inputs), product.outputs)


def _is_plain(step: OpStep, operator: str) -> bool:
    return step.call.name == operator and step.kernel is None and not step.checked


def _is_softmax(product: OpCall, total: OpCall, parts: OpCall) -> bool:
    """Whether all is in one shape of one dtype that torch sums in, and the sum goes along one dim, and keeps it."""
    types = {*product.inputs, *product.outputs, *parts.inputs, *parts.outputs}
    one = len(types) == 1 and types.pop().dtype in ("float32", "float64")
    return one and total.attr("keepdims") and len(total.axes(total.attr("axis"))) == 1


def _is_linear(call: OpCall) -> bool:
    """Whether it is a product with one matrix, of floats of one dtype."""
    if call.name in CONV_ADD:
        return False
    dtypes = {tensor.dtype for tensor in (*call.inputs, *call.outputs)}
    return call.inputs[0].ndim > 0 and call.inputs[1].ndim == 2 and len(dtypes) == 1 and is_float(dtypes.pop())


def _is_bias(bias: TensorType, call: OpCall) -> bool:
    """Whether it is one number per channel of a convolution of floats of one dtype, whose dims are in torch's order."""
    if call.name not in CONV_ADD:
        return False
    channels = [1, call.outputs[0].shape[1], *[1] * (call.outputs[0].ndim - 2)]
    dtypes = {tensor.dtype for tensor in (*call.inputs, *call.outputs)}
    first = (call.attr("data_layout"), call.attr("out_layout") or call.attr("data_layout"))
    plain = all(layout.startswith("NC") for layout in first) and call.attr("kernel_layout").startswith("OI")
    return plain and list(bias.shape) == channels and len(dtypes) == 1 and is_float(dtypes.pop())


def _order(call: OpCall) -> list[int]:
    return [call.axis(dim) for dim in call.attr("axes", range(call.inputs[0].ndim)[::-1])]
