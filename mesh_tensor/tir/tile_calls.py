"""The records of tile operations, read from TileLang's calls.

TileLang keeps `T.copy`, `T.gemm`, ... as opaque calls until its own lowering. Everything that has to understand them
(the sharding rule, the CPU re-targeting, the interpreter) reads them through :func:`parse_tile_op`, so the layout of
the calls' arguments is known in the records only.
"""

from __future__ import annotations

from tvm import ir, tirx

from mesh_tensor.base.errors import refuse

from .effects import op_name
from .nodes import nodes
from .regions import Region
from .tile_ops import TILE_OPS, Atomic, TileOp

_PREVIOUS = {"tl.atomic_add_ret_elem_op": "sum", "tl.atomic_max_ret_elem_op": "max", "tl.atomic_min_ret_elem_op": "min"}
#: What is complete where it stands, in place of what need not be; and what says so of a product.
_AT_ONCE = {
    "tl.tileop.async_copy": "tl.tileop.copy",
    "tl.tileop.gemm": "tl.tileop.gemm",
    "tl.tileop.wgmma_gemm": "tl.tileop.gemm",
}
_DEFERRED = "wg_wait"
_THROUGH = "copy through a buffer of this program, or through a parameter"
_BY_ROWS = "T.copy each row: `T.copy(X[rows[i], 0], block[i, 0:n])`, or `T.copy(block[i, 0:n], X[rows[i], 0])`"
#: What annotations ask for that regions don't say: their keys, what that is, the way out.
_BEYOND = (
    (("dst_block", "cluster_mask"), "a copy to other blocks of a cluster", _THROUGH),
    (("is_gather4", "is_scatter4"), "a copy of rows that are named one by one", _BY_ROWS),
    (("use_2cta",), "a product of two blocks of a cluster", "T.gemm of what this program has"),
)


def parse_tile_op(stmt: tirx.Stmt) -> TileOp | None:
    """The tile operation that the statement `T.evaluate(call)` is, or None if it is none that is known here. Refused
    where its arguments are not what TileLang gives it."""
    if not isinstance(stmt, tirx.Evaluate) or not isinstance(stmt.value, tirx.Call):
        return None
    call = stmt.value
    kind = TILE_OPS.get(op_name(call))
    try:
        return None if kind is None else kind.read(op_name(call), call.args)
    except (AttributeError, IndexError, TypeError) as error:
        why = f"its arguments are not those that TileLang gives it ({error})"
        refuse(f"{op_name(call)} is malformed", why=why, fix="write it with tilelang.language")


def completed(body: tirx.Stmt) -> tirx.Stmt:
    """The same with copies and products that are complete where they stand, for who reads what they make before the
    author waits for it."""

    def complete(call: tirx.Call) -> tirx.Call | None:
        name, asked = op_name(call), dict((call.annotations or {}).items())
        instead = _AT_ONCE.get(name)
        if instead is None or (instead == name and _DEFERRED not in asked):
            return None
        kept = {key: value for key, value in asked.items() if key != _DEFERRED}
        return tirx.Call(call.dtype, ir.Op.get(instead), call.args, annotations=kept, span=call.span)

    return tirx.stmt_functor.ir_transform(body, None, complete, ["tirx.Call"])


def beyond_regions(stmt: tirx.Evaluate) -> tuple[str, str] | None:
    """What a tile operation asks for, in its annotations, that its regions don't say, and the way out; None for all
    other statements."""
    asked = dict((stmt.value.annotations or {}).items()) if op_name(stmt.value).startswith("tl.tileop.") else {}
    for keys, what, fix in _BEYOND:
        found = [key for key in keys if key in asked]
        if found:
            return f"{what} ({', '.join(found)}) is not supported", fix
    by_places = [key for key, value in asked.items() if isinstance(value, tirx.PrimExpr) and key != "barrier"]
    computed = [key for key in by_places if nodes(tirx.Evaluate(asked[key]), tirx.Var, tirx.BufferLoad)]
    if not computed:
        return None
    what = f"{op_name(stmt.value)} has annotations that are computed ({', '.join(computed)})"
    return what, "annotate it with numbers"


def parse_previous(expr: object) -> Atomic | None:
    """The update of one element that an atomic with `return_prev=True` makes; its value is what was there before."""
    if not isinstance(expr, tirx.Call) or op_name(expr) not in _PREVIOUS:
        return None
    return Atomic(Region.at(expr.args[0]), expr.args[1], _PREVIOUS[expr.op.name])
