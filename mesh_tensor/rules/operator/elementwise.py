"""Rules of operators that work element by element, that make tensors, or that keep a part of one.

`mesh.narrowed`: a gradient in the dtype in which devices add up their parts of it.

`R.call_pure_packed("mesh.narrowed", gradient)`: its type says which. What else makes fewer bits of a sum takes it when
it is complete; this takes its parts, because a caller has asked for it (`training_step(reduce_dtype=)`).
"""

from __future__ import annotations

from tvm import relax

from mesh_tensor.base.dtypes import TensorType, is_float
from mesh_tensor.base.errors import refuse

from .call import OpCall, tensor_infos, tensor_type
from .call_text import info_of
from .rule import Dim, LocalCall, OpRule, rule, whole_rule

_UNARY = (
    "abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh erf exp floor isfinite isinf isnan log logical_not"
    " negative round rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc clip astype wrap_param nn.gelu nn.gelu_tanh"
    " nn.relu nn.silu nn.leakyrelu nn.selu nn.softplus"
)
_BINARY = (
    "add subtract multiply divide floor_divide mod floor_mod power maximum minimum equal not_equal less less_equal"
    " greater greater_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor left_shift"
    " right_shift atan2 log_add_exp ewise_fma where"
)
# The sets of arguments (by position) that an operator is linear in.
_LINEAR: dict[str, tuple[set[int], ...]] = {
    "add": ({0, 1},),
    "subtract": ({0, 1},),
    "multiply": ({0}, {1}),
    "divide": ({0},),
    "negative": ({0},),
    "ewise_fma": ({0, 2}, {1, 2}),
    "where": ({1, 2},),
}


@rule(*_UNARY.split(), *_BINARY.split())
def elementwise(call: OpCall) -> OpRule:
    """Dims are aligned at the end; a dim of size 1 that is repeated takes no part."""
    out = call.outputs[0]
    inputs = tuple(broadcast_dims(tensor.shape, out.shape) for tensor in call.inputs)
    return OpRule(inputs, (dims_of(out.ndim),), linear=_linear(call))


@rule("builtin.stop_lift_params", "grad.end_checkpoint", "grad.no_grad", "grad.start_checkpoint")
def identity(call: OpCall) -> OpRule:
    dims = dims_of(call.outputs[0].ndim)
    return OpRule((dims,), (dims,), linear=(frozenset({0}),), moves=True)


@rule("nn.prelu", "quantize", "dequantize")
def per_channel(call: OpCall) -> OpRule:
    """Parameters have an element per position of a dim, or one for all."""
    dims, axis = dims_of(call.outputs[0].ndim), call.axis(call.attr("axis"))
    size = call.outputs[0].shape[axis] if dims else 1
    rest = tuple(tuple(dims[axis] if t.shape[d] == size else None for d in range(t.ndim)) for t in call.inputs[1:])
    return OpRule((dims, *rest), (dims,))


@rule("bucketize")
def bucketize(call: OpCall) -> OpRule:
    dims = dims_of(call.outputs[0].ndim)
    return OpRule((dims, (None,)), (dims,))


def dims_of(ndim: int, letter: str = "d") -> tuple[str, ...]:
    """A factor per dim."""
    return tuple(f"{letter}{dim}" for dim in range(ndim))


def broadcast_dims(shape: tuple[int, ...], out: tuple[int, ...], letter: str = "d") -> tuple[Dim, ...]:
    """The factors of an operand that is broadcast to `out`."""
    skipped = len(out) - len(shape)
    return tuple(None if size != out[skipped + d] else f"{letter}{skipped + d}" for d, size in enumerate(shape))


def _linear(call: OpCall) -> tuple[frozenset[int], ...]:
    """The sets of operands that the operator is linear in. A number among the arguments is no operand: what adds one
    is not linear."""
    if call.name == "divide" and not is_float(call.outputs[0].dtype):
        return ()
    tensors = [position for position, arg in enumerate(call.expr.args) if tensor_infos(arg.struct_info)]
    return tuple(
        frozenset(map(tensors.index, arguments))
        for arguments in _LINEAR.get(call.name, ())
        if arguments <= set(tensors)
    )


@rule("full")
def full(call: OpCall) -> OpRule:
    out = call.outputs[0]
    return OpRule(((),), (dims_of(out.ndim),), localize=lambda c: relax.op.full(c.out_tiles[0], c.args[0], out.dtype))


@rule("zeros", "ones")
def constant(call: OpCall) -> OpRule:
    out = call.outputs[0]
    make = relax.op.zeros if call.name == "zeros" else relax.op.ones
    return OpRule((), (dims_of(out.ndim),), localize=lambda c: make(c.out_tiles[0], out.dtype))


@rule("full_like", "zeros_like", "ones_like")
def like(call: OpCall) -> OpRule:
    dims = dims_of(call.outputs[0].ndim)
    return OpRule((dims, *((),) * (len(call.inputs) - 1)), (dims,))


@rule("tril", "triu")
def triangle(call: OpCall) -> OpRule:
    """Of every matrix of the last two dims, which are whole."""
    dims = (*dims_of(call.inputs[0].ndim - 2), None, None)
    return OpRule((dims,), (dims,), linear=(frozenset({0}),))


rule("arange", "eye", "eye_like", "hamming_window", "size")(whole_rule)


def divides_integers(call: OpCall) -> bool:
    """Whether integers are divided, by those of a tensor."""
    divides = call.name in ("divide", "floor_divide", "mod", "floor_mod")
    return divides and len(call.inputs) == 2 and not is_float(call.outputs[0].dtype)


NARROWED = "mesh.narrowed"


def narrowed_call(gradient: relax.Expr, dtype: str) -> relax.Call:
    """The gradient in that dtype."""
    info = info_of(TensorType(tensor_type(gradient.struct_info, "a gradient").shape, dtype))
    return relax.op.call_pure_packed(NARROWED, gradient, sinfo_args=[info])


@rule(NARROWED)
def narrowed(call: OpCall) -> OpRule:
    """Element by element."""
    if len(call.inputs) != 1 or call.inputs[0].shape != call.outputs[0].shape or not is_float(call.inputs[0].dtype):
        refuse(f"mesh.narrowed of {call.inputs} to {call.outputs}", fix="give it one tensor of floats")
    dims = dims_of(call.inputs[0].ndim)
    return OpRule((dims,), (dims,), linear=(frozenset({0}),), localize=_local)


def _local(local: LocalCall) -> relax.Expr:
    info = info_of(TensorType(local.out_tiles[0], local.call.outputs[0].dtype))
    return relax.op.call_pure_packed(NARROWED, *local.args, sinfo_args=[info])
