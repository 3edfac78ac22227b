"""Rules of what stands in graphs for loops: where values enter one and leave it, and rows that its steps take and give.

`loop.enter`: a value before the first step. `loop.next`: what a step hands on to the next one, or in the end out of the
loop. `loop.test`: whether there is a next step. `loop.stack`: rows, one of each step, as one tensor. `loop.row`: the
row of a tensor that a count says.
"""

from __future__ import annotations

from tvm import relax

from .call import OpCall, packed
from .elementwise import dims_of
from .rule import LocalCall, OpRule, rule

MARKS = frozenset({"loop.enter", "loop.next", "loop.stack", "loop.test"})


@rule("loop.enter", "loop.next", "loop.test")
def same(call: OpCall) -> OpRule:
    """What goes in comes out."""
    dims = dims_of(call.inputs[0].ndim)
    return OpRule((dims,), (dims,))


@rule("loop.stack")
def stack(call: OpCall) -> OpRule:
    """Every device has its part of all rows."""
    dims = dims_of(call.inputs[0].ndim)
    return OpRule((dims,), ((None, *dims),))


@rule("loop.row")
def row(call: OpCall) -> OpRule:
    """Every device takes its part of the row."""
    dims = dims_of(call.outputs[0].ndim)
    return OpRule(((None, *dims), ()), (dims,), localize=_local_row)


def _local_row(local: LocalCall) -> relax.Expr:
    return packed("loop.row", list(local.args), relax.TensorStructInfo(local.out_tiles[0], local.dtypes[0]))
