"""Rules of operators that take elements by index."""

from __future__ import annotations

from tvm import relax

from .call import OpCall
from .rule import LocalCall, OpRule
from .table import rule


@rule("take")
def take(call: OpCall) -> OpRule:
    """Where the table's rows are split, each device takes what it has, and 0 for the rest."""
    table, indices = call.inputs[0], call.inputs[1]
    axis = 0 if call.attr("axis") is None else call.axis(call.attr("axis"))
    rows = tuple(f"i{d}" for d in range(indices.ndim))
    dims = tuple("row" if d == axis else f"d{d}" for d in range(table.ndim))
    out = (*dims[:axis], *rows, *dims[axis + 1 :])
    linear = (frozenset({0}),)
    return OpRule((dims, rows), (out,), {"row": "sum"}, linear=linear, localize=_local_take, positional=_ROW)


_ROW = frozenset({"row"})


def _local_take(local: LocalCall) -> relax.Expr:
    call, layout = local.call, local.layouts[0]
    axis = 0 if call.attr("axis") is None else call.axis(call.attr("axis"))
    if layout is None or not layout.axes_of(axis):
        return local.again()
    args = [relax.ShapeExpr(call.inputs[0].shape), relax.StringImm(layout.text()), relax.PrimValue(axis)]
    info = relax.TensorStructInfo(local.out_tiles[0], "float32" if local.wide else call.outputs[0].dtype)
    mode = relax.StringImm(call.attr("mode", "fast"))
    return relax.op.call_pure_packed("mesh.local_take", *local.args, *args, mode, sinfo_args=[info])
