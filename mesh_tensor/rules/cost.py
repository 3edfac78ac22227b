"""What a kernel computes, counted from its statements."""

from __future__ import annotations

from tvm import ir, tirx

from . import tile_ops
from .reader import read_kernel
from .statements import Statement

_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)
_NO_WORK = ("tirx.if_then_else", "tl.region", "tl.access_ptr", "tl.infinity", "tirx.reinterpret")


def count_flops(func: tirx.PrimFunc) -> int:
    """Floating-point operations of one run of a kernel: 2 per multiply-add, 1 per other operation or function.

    Loops whose extent is no constant count once. Branches count as taken."""
    kernel = read_kernel(func)
    return sum(_flops(statement) for statement in kernel.statements)


def _flops(statement: Statement) -> int:
    times = 1
    for loop in statement.loops:
        times *= int(loop.extent) if isinstance(loop.extent, tirx.IntImm) else 1
    record = statement.tile_op
    if isinstance(record, tile_ops.Gemm):
        return 2 * times
    if isinstance(record, (tile_ops.Reduce, tile_ops.Atomic)):
        return times
    if statement.write is None or record is not None:
        return 0
    work = sum(_operations(value) for value in statement.values[:1])
    return times * (work + (statement.op is not None))


def _operations(expr: tirx.PrimExpr) -> int:
    count = 0

    def visit(node: object) -> None:
        nonlocal count
        if isinstance(node, _ARITHMETIC) and node.dtype.startswith(("float", "bfloat")):
            count += 1
        elif isinstance(node, tirx.Call) and isinstance(node.op, ir.Op) and node.op.name not in _NO_WORK:
            count += node.dtype.startswith(("float", "bfloat"))

    tirx.stmt_functor.post_order_visit(expr, visit)
    return count
