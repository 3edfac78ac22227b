"""Rules of operators that work element by element."""

from __future__ import annotations

from .call import OpCall
from .rule import Dim, OpRule
from .table import rule

_UNARY = (
    "abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh erf exp floor isfinite isinf isnan log logical_not"
    " negative round rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc clip astype nn.gelu nn.gelu_tanh nn.relu"
    " nn.silu nn.leakyrelu nn.selu nn.softplus"
)
_BINARY = (
    "add subtract multiply divide floor_divide mod floor_mod power maximum minimum equal not_equal less less_equal"
    " greater greater_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor left_shift"
    " right_shift atan2 log_add_exp ewise_fma where"
)
_ADDS = frozenset({"add", "subtract"})


@rule(*_UNARY.split(), *_BINARY.split())
def elementwise(call: OpCall) -> OpRule:
    """Dims are aligned at the end; a dim of size 1 that is repeated takes no part."""
    out = call.outputs[0]
    inputs = tuple(broadcast_dims(tensor.shape, out.shape) for tensor in call.inputs)
    return OpRule(inputs, (dims_of(out.ndim),), linear=_linear(call))


def dims_of(ndim: int) -> tuple[str, ...]:
    """A factor per dim."""
    return tuple(f"d{dim}" for dim in range(ndim))


def broadcast_dims(shape: tuple[int, ...], out: tuple[int, ...]) -> tuple[Dim, ...]:
    """The factors of an operand that is broadcast to `out`."""
    skipped = len(out) - len(shape)
    return tuple(None if size != out[skipped + d] else f"d{skipped + d}" for d, size in enumerate(shape))


def _linear(call: OpCall) -> tuple[frozenset[int], ...]:
    whole = frozenset(range(len(call.inputs)))
    if call.name in _ADDS and len(call.inputs) == 2:
        return (whole,)
    if call.name == "multiply" and len(call.inputs) == 2:
        return (frozenset({0}), frozenset({1}))
    if call.name == "divide" and call.outputs[0].dtype.startswith(("float", "bfloat")):
        return (frozenset({0}),)
    if call.name == "negative":
        return (whole,)
    if call.name == "where":
        return (frozenset({1, 2}),)
    return ()
