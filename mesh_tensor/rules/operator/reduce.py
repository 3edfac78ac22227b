"""Rules of reductions and scans along dims, and of what looks for elements along them."""

from __future__ import annotations

import math

from tvm import relax

from mesh_tensor.base.dtypes import NARROW, is_float

from .call import OpCall
from .rule import Dim, LocalCall, OpRule
from .table import rule, whole_rule

SOFTMAX_GRADIENT = "fused.softmax_gradient"
_OPS = {"sum": "sum", "mean": "sum", "max": "max", "min": "min", "prod": "prod"}


@rule("sum", "mean", "max", "min", "prod", "variance", "std")
def reduce(call: OpCall) -> OpRule:
    """A split dim is reduced part by part where the parts can be combined: not to a variance, nor to a mean of integers
    (whose division rounds), nor to a product in low precision (whose parts leave its range); and no device combines
    bools."""
    axes = call.axes(call.attr("axis"))
    tensor = call.inputs[0]
    op = _OPS.get(call.name) if _combines(call.name, tensor.dtype) else None
    dims = tuple(f"d{d}" if d not in axes or op else None for d in range(tensor.ndim))
    reduced = {f"d{d}": op for d in axes} if op else {}
    linear = (frozenset({0}),) if op == "sum" else ()
    localize = _sum if op == "sum" else None
    return OpRule((dims,), (_kept(call, axes),), reduced, linear=linear, localize=localize)


def _combines(name: str, dtype: str) -> bool:
    if name == "mean":
        return is_float(dtype)
    return dtype != "bool" and not (name == "prod" and dtype in NARROW)


def _kept(call: OpCall, axes: tuple[int, ...]) -> tuple[Dim, ...]:
    """The dims of what is left of a tensor when it is reduced along `axes`."""
    keep = bool(call.attr("keepdims"))
    return tuple(None if d in axes else f"d{d}" for d in range(call.inputs[0].ndim) if d not in axes or keep)


def _sum(local: LocalCall) -> relax.Expr:
    """A mean of a part is the sum of the tile's elements over the number of the whole tensor's."""
    call, (tile,) = local.call, local.in_tiles
    axes = call.axes(call.attr("axis"))
    if not local.wide and all(tile[d] == call.inputs[0].shape[d] for d in axes):
        return local.again()
    dtype = "float32" if local.wide else call.outputs[0].dtype
    x = relax.op.astype(local.args[0], dtype) if dtype != call.inputs[0].dtype else local.args[0]
    total = relax.op.sum(x, list(axes), bool(call.attr("keepdims")))
    if call.name == "sum":
        return total
    return relax.op.divide(total, relax.const(math.prod(call.inputs[0].shape[d] for d in axes), dtype))


@rule("collapse_sum_to", "collapse_sum_like")
def collapse_sum(call: OpCall) -> OpRule:
    """The sum over what would be broadcast: dims that the result lacks, or has with size 1."""
    source, out = call.inputs[0], call.outputs[0]
    skipped = source.ndim - out.ndim
    dims = tuple(f"d{d}" for d in range(source.ndim))
    kept = tuple(dims[skipped + d] if size == source.shape[skipped + d] else None for d, size in enumerate(out.shape))
    if source.dtype == "bool":
        return whole_rule(call)
    reduced = dict.fromkeys((d for d in dims if d not in kept), "sum")
    inputs = (dims, kept)[: len(call.inputs)]
    return OpRule(inputs, (kept,), reduced, linear=(frozenset({0}),)[: 3 - len(inputs)], localize=_collapsed)


def _collapsed(local: LocalCall) -> relax.Expr:
    source, out = local.call.inputs[0], local.call.outputs[0]
    skipped = source.ndim - out.ndim
    axes = [d for d in range(source.ndim) if d < skipped or out.shape[d - skipped] != source.shape[d]]
    x = relax.op.astype(local.args[0], "float32") if local.wide else local.args[0]
    return relax.op.reshape(relax.op.sum(x, axes), local.out_tiles[0])


@rule("argmax", "argmin", "median")
def find(call: OpCall) -> OpRule:
    """Along dims, which are whole; without any, in the flattened tensor."""
    axis = call.attr("axis")
    if axis is None or axis == ():
        return whole_rule(call)
    axes = call.axes(axis)
    dims = tuple(None if d in axes else f"d{d}" for d in range(call.inputs[0].ndim))
    return OpRule((dims,), (_kept(call, axes),) * len(call.outputs))


@rule("nn.softmax", "nn.log_softmax", "cumsum", "cumprod", "sort", "argsort", "topk")
def along_a_dim(call: OpCall) -> OpRule:
    """One dim, which is whole: the last one, unless it is named. A scan without a dim is of the flattened tensor."""
    axis = call.attr("axis")
    if axis is None and call.name.startswith("cum"):
        return whole_rule(call)
    dim = call.axis(-1 if axis is None else axis)
    dims = tuple(None if d == dim else f"d{d}" for d in range(call.inputs[0].ndim))
    return OpRule((dims,), (dims,) * len(call.outputs))
