"""`mesh.narrowed`: a gradient in the dtype in which devices add up their parts of it.

`R.call_pure_packed("mesh.narrowed", gradient)`: its type says which. What else makes fewer bits of a sum takes it when
it is complete; this takes its parts, because a caller has asked for it (`training_step(reduce_dtype=)`).
"""

from __future__ import annotations

from tvm import relax

from mesh_tensor.base.dtypes import TensorType, is_float
from mesh_tensor.base.errors import refuse

from .call import OpCall, tensor_type
from .call_text import info_of
from .elementwise import dims_of
from .rule import LocalCall, OpRule, rule

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
