"""Rules of operators that make tensors, or keep a part of one."""

from __future__ import annotations

from tvm import relax

from .call import OpCall
from .elementwise import dims_of
from .rule import OpRule
from .table import rule, whole_rule


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


@rule("arange", "eye", "eye_like", "hamming_window", "size")
def whole(call: OpCall) -> OpRule:
    return whole_rule(call)
