"""Whether two expressions are the same."""

from __future__ import annotations

from tvm import ir, tirx


def same_expression(a: tirx.PrimExpr, b: tirx.PrimExpr) -> bool:
    """Whether two expressions have the same structure over the same variables and buffers.

    To `structural_equal` alone, loads from any two buffers of one shape and dtype are the same."""
    return bool(ir.structural_equal(a, b)) and bool(ir.structural_equal(_named(a), _named(b)))


def _named(expr: tirx.PrimExpr) -> tirx.Stmt:
    """The expression with every load as a call of the buffer's own name."""

    def name(load: tirx.BufferLoad) -> tirx.PrimExpr:
        return tirx.call_extern(load.dtype, f"buffer_{hash(load.buffer)}", *load.indices)

    return tirx.stmt_functor.ir_transform(tirx.Evaluate(expr), None, name, ["tirx.BufferLoad"])
