"""Shapes as values: those of known sizes become literals of the calls that take them; results whose size the data says
are refused by name."""

from __future__ import annotations

import numpy as np
from tvm import relax, tirx

from mesh_tensor.base.errors import refuse

from .call import op_name, tensor_infos

# Operators whose results are as large as the data says, and what does that in known sizes.
SIZED_BY_DATA = {
    "dynamic_strided_slice": "use R.strided_slice, or R.take with as many indices as there are to be",
    "nonzero": "use R.where with a mask of the tensor's own shape",
    "unique": "use R.sort and compare neighbours, or compute it before the module is called",
}


def with_known_sizes(expr: relax.Call, where: str) -> relax.Expr:
    """An operator's call with sizes in place of the variables that stand for shapes of known sizes; such a shape as a
    tensor (`R.shape_to_tensor`) is a constant.

    Raises:
        MeshTensorError: how large its result is depends on the data; `where` names its binding.
    """
    name = op_name(expr.op)
    if name in SIZED_BY_DATA:
        if any(not isinstance(info.shape, relax.ShapeExpr) for info in tensor_infos(expr.struct_info)):
            refuse(
                f"how large the result of R.{name} is depends on the data",
                where=f"{where} = {expr}",
                why="layouts are decided for sizes that are known ahead",
                fix=SIZED_BY_DATA[name],
            )
        return expr
    known = [_known_shape(arg) for arg in expr.args]
    if all(sizes is None for sizes in known):
        return expr
    if name == "shape_to_tensor":
        return relax.const(np.array([int(size) for size in known[0] or ()]), "int64")
    args = [arg if sizes is None else relax.ShapeExpr(sizes) for arg, sizes in zip(expr.args, known, strict=True)]
    made = relax.Call(expr.op, args, expr.attrs, expr.sinfo_args)
    relax.expr._update_struct_info(made, expr.struct_info)
    return made


def _known_shape(arg: relax.Expr) -> list[tirx.PrimExpr] | None:
    """The sizes that a variable stands for, if it is a shape of known sizes."""
    if not isinstance(arg, relax.Var) or not isinstance(arg.struct_info, relax.ShapeStructInfo):
        return None
    values = arg.struct_info.values
    return None if values is None or not all(isinstance(v, tirx.IntImm) for v in values) else list(values)
