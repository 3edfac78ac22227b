"""Rules of reductions."""

from __future__ import annotations

import math

from tvm import relax

from .call import OpCall
from .rule import LocalCall, OpRule
from .table import rule

_OPS = {"sum": "sum", "mean": "sum", "max": "max", "min": "min", "prod": "prod"}


@rule("sum", "mean", "max", "min", "prod", "variance", "std")
def reduce(call: OpCall) -> OpRule:
    axes = call.axes(call.attr("axis"))
    op = _OPS.get(call.name)
    tensor = call.inputs[0]
    dims = tuple(f"d{d}" if d not in axes or op else None for d in range(tensor.ndim))
    kept = tuple(None if d in axes else f"d{d}" for d in range(tensor.ndim) if d not in axes or call.attr("keepdims"))
    reduced = {f"d{d}": op for d in axes} if op else {}
    linear = (frozenset({0}),) if call.name in ("sum", "mean") else ()
    localize = _sum if op == "sum" else None
    return OpRule((dims,), (kept,), reduced, linear=linear, localize=localize)


def _sum(local: LocalCall) -> relax.Expr:
    """A mean is the sum of the tile's elements over the number of the whole tensor's."""
    call = local.call
    axes = call.axes(call.attr("axis"))
    dtype = "float32" if local.wide else call.outputs[0].dtype
    tile = relax.op.astype(local.args[0], dtype) if dtype != call.inputs[0].dtype else local.args[0]
    total = relax.op.sum(tile, list(axes), bool(call.attr("keepdims")))
    if call.name == "sum":
        return total
    return relax.op.divide(total, relax.const(math.prod(call.inputs[0].shape[d] for d in axes), dtype))
