"""Rules of neural network operators."""

from __future__ import annotations

from .call import OpCall
from .elementwise import dims_of
from .rule import Dim, OpRule
from .table import rule


@rule("nn.softmax", "nn.log_softmax", "cumsum", "cumprod")
def along_a_dim(call: OpCall) -> OpRule:
    axis = call.axis(call.attr("axis", -1))
    dims = tuple(None if d == axis else f"d{d}" for d in range(call.inputs[0].ndim))
    return OpRule((dims,), (dims,))


@rule("nn.layer_norm", "nn.rms_norm")
def normalize(call: OpCall) -> OpRule:
    axes = call.axes(call.attr("axes"))
    dims = tuple(None if d in axes else f"d{d}" for d in range(call.inputs[0].ndim))
    rest: tuple[tuple[Dim, ...], ...] = tuple((None,) * t.ndim for t in call.inputs[1:])
    return OpRule((dims, *rest), (dims,))


@rule("nn.dropout")
def dropout(call: OpCall) -> OpRule:
    dims = dims_of(call.inputs[0].ndim)
    return OpRule((dims,), (dims, dims))
