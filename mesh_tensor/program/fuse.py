"""Operators that run as one: products with a transposed matrix; products and convolutions with a bias, which is added
before they are rounded to 16 bits; and chains (`fuse_chains`). What lies between them is never made, unless others use
it. A transpose that undoes another is what that was made of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from tvm import relax

from mesh_tensor.base.dtypes import TensorType, is_float
from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.rules.operator.conv import CONV_ADD
from mesh_tensor.rules.operator.linear_algebra import LINEAR, MATMUL_ADD

from .fuse_chains import CHAINS
from .made_values import Made, MadeValues, is_plain
from .program import ProgramValue
from .steps import OpStep, Step

#: From products to what they are with a bias.
_WITH_BIAS = {"matmul": MATMUL_ADD, LINEAR: LINEAR, **CONV_ADD}


def check_fuse(fuse: object) -> bool:
    """Whether operators are taken together, as a user says it: "auto" or "off". Refused where it is neither."""
    if isinstance(fuse, str) and fuse in ("auto", "off"):
        return fuse == "auto"
    return refuse(
        f"fuse={shown(fuse)} is unknown",
        why="it is 'auto', or 'off', where each operator runs alone",
        fix="leave it out: then it is 'auto'",
    )


def fused(
    steps: Sequence[Step],
    values: Mapping[str, ProgramValue],
    lasting: Collection[str],
    constants: Mapping[str, relax.Constant],
) -> list[Step]:
    """The steps, where operators are taken together. `lasting`: values that somebody uses afterwards."""
    others = [number for number, step in enumerate(steps) if not isinstance(step, OpStep)]
    return _Fuser(steps, MadeValues(steps, others, values, lasting, constants)).steps()


class _Fuser:
    def __init__(self, steps: Sequence[Step], known: MadeValues) -> None:
        self._all, self._known = steps, known
        self._same: dict[str, str] = {}  # values that are others

    def steps(self) -> list[Step]:
        """The steps, in order."""
        made: list[Step | None] = []
        for number, step in enumerate(self._all):
            if isinstance(step, OpStep):
                step = replace(step, args=tuple([self._same.get(name, name) for name in step.args]))
                if not self._undone(step):
                    step = self._with_bias(self._transposed(step, number), number, made)
                    step = self._last_of_chain(step, number, made)
                    self._known.add(step, number)
            made.append(step)
        return self._used(made)

    def _undone(self, step: OpStep) -> bool:
        """Whether it is a transpose that undoes another one, so that what it makes is there."""
        inner = self._known.maker(step.args[0], "permute_dims") if is_plain(step, "permute_dims") else None
        if inner is None or step.whole or step.results[0] in self._known.lasting:
            return False
        source, result = inner.step.args[0], step.results[0]
        if not undoes(step.call, inner.step.call) or not self._known.stays(source, inner.at, len(self._all)):
            return False
        self._known.uses[source] += self._known.uses[result]
        self._known.uses[result], self._same[result] = 0, source
        return True

    def _transposed(self, step: OpStep, number: int) -> OpStep:
        """A product with a matrix that is transposed before, as one with that matrix."""
        matrix = self._known.maker(step.args[1], "permute_dims") if is_plain(step, "matmul") else None
        if matrix is None or not turns_matrix(step.call, matrix.step.call):
            return step
        source = matrix.step.args[0]
        if not self._known.stays(source, matrix.at, number):
            return step
        self._known.uses[step.args[1]] -= 1
        self._known.uses[source] += 1
        product, transpose = step.call, matrix.step.call
        call = self._known.call((product, transpose), lambda: linear_call(product, transpose))
        names = (*matrix.step.stands_for, *step.stands_for)
        return replace(step, call=call, args=(step.args[0], source), one_for=names)

    def _with_bias(self, step: OpStep, number: int, made: list[Step | None]) -> OpStep:
        """A sum of a product, or a convolution, and a bias, as one; the product is not made before."""
        if not is_plain(step, "add") or len(step.args) != 2:
            return step
        for position in (0, 1):
            made_by = (self._known.maker(step.args[position], name) for name in _WITH_BIAS)
            product = next((one for one in made_by if one is not None), None)
            if product is not None and self._may_add(product, step, position, number):
                call = self._with(_WITH_BIAS[product.step.call.name], product.step.call, step.call, position)
                made[product.at] = None
                self._known.uses[step.args[position]] = 0
                args = (*product.step.args, step.args[1 - position])
                names = (*product.step.stands_for, *step.stands_for)
                return replace(step, call=call, args=args, flops=step.flops + product.step.flops, one_for=names)
        return step

    def _last_of_chain(self, step: OpStep, number: int, made: list[Step | None]) -> OpStep:
        """The last step of a chain, as all of it."""
        for find in CHAINS:
            chain = find(self._known, step, number)
            if chain is not None:
                for inner in chain.inner:
                    made[inner.at], self._known.uses[inner.step.results[0]] = None, 0
                self._known.uses.subtract(chain.again)
                return chain.step
        return step

    def _may_add(self, product: Made, step: OpStep, position: int, number: int) -> bool:
        call, bias = product.step.call, step.call.inputs[1 - position]
        (out,) = call.outputs
        return (
            len(call.inputs) == 2
            and (bias.shape == out.shape[-1:] if _is_linear(call) else _is_bias(bias, call))
            and (out,) == step.call.outputs
            and step.call.inputs[position] == out
            and bias.dtype == out.dtype
            and self._known.uses[step.args[position]] == 1
            and self._known.follows(product, number)
        )

    def _with(self, name: str, product: OpCall, add: OpCall, position: int) -> OpCall:
        """The call of a product and the bias that is added to it, the operand of `add` that is not at `position`."""
        operands = (*product.inputs, add.inputs[1 - position])
        make = partial(OpCall, name, product.expr, operands, product.outputs)
        return self._known.call((product, add, position), make)

    def _used(self, steps: Sequence[Step | None]) -> list[Step]:
        """The steps without transposes whose results nothing uses any more."""
        made: list[Step] = []
        for step in reversed(steps):
            if step is None:
                continue
            if isinstance(step, OpStep) and is_plain(step, "permute_dims") and not self._known.uses[step.results[0]]:
                self._known.uses[step.args[0]] -= 1
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
