"""Rules of matrix products."""

from __future__ import annotations

from tvm import relax

from .call import OpCall
from .elementwise import broadcast_dims, dims_of
from .rule import LocalCall, OpRule
from .table import rule


@rule("matmul")
def matmul(call: OpCall) -> OpRule:
    """Batch dims broadcast; rows and columns are parallel; what is contracted is summed."""
    a, b = call.inputs
    batch = call.outputs[0].shape[: call.outputs[0].ndim - (a.ndim > 1) - (b.ndim > 1)]
    left = (*broadcast_dims(a.shape[:-2], batch), *(("m",) if a.ndim > 1 else ()), "k")
    right = (*broadcast_dims(b.shape[:-2], batch), "k", *(("n",) if b.ndim > 1 else ()))
    out = (*dims_of(len(batch)), *(("m",) if a.ndim > 1 else ()), *(("n",) if b.ndim > 1 else ()))
    linear = (frozenset({0}), frozenset({1}))
    return OpRule((left, right), (out,), {"k": "sum"}, linear=linear, localize=_product)


def _product(local: LocalCall) -> relax.Expr:
    dtype = "float32" if local.wide else local.call.outputs[0].dtype
    return relax.op.matmul(*local.args, out_dtype=dtype)
