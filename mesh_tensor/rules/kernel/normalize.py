"""Bring a kernel into the form that analysis and rewriting expect.

Index bindings are inlined; regions have constant extents where they can; accesses through views become accesses to what
they are views of; compound operations become what they are made of; grid loops that walk two dims at once become two
loops, and so do loops that do something every n iterations; loops that end early go on, and do nothing; iterations and
programs that are given up become conditions; what a print is made of becomes one statement; rows on chip that nothing
depends on go.
"""

from __future__ import annotations

from tvm import arith, tirx

from mesh_tensor.tir.compound_ops import parts_of
from mesh_tensor.tir.early_exits import without_early_exits
from mesh_tensor.tir.effects import op_name
from mesh_tensor.tir.fused_loops import unfuse
from mesh_tensor.tir.intervals import with_intervals
from mesh_tensor.tir.late_fills import with_early_fills
from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.reducers import without_reducers
from mesh_tensor.tir.rewrite import call_like, sequence
from mesh_tensor.tir.short_loops import lengthen
from mesh_tensor.tir.single_dims import with_plain_single_dims
from mesh_tensor.tir.tile_position import as_helper
from mesh_tensor.tir.user_reports import mark_prints
from mesh_tensor.tir.views import resolve_views

from .padded_blocks import narrow


def normalize(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same kernel, in which every index is an expression of loop variables, and no memory goes by two names.

    Raises:
        MeshTensorError: a buffer is in no memory that is known, or a view is not understood.
    """
    func = without_early_exits(func)
    body = tirx.stmt_functor.ir_transform(func.body, None, parts_of, ["tirx.Evaluate"])
    func = without_reducers(func if body.same_as(func.body) else func.with_body(body))
    func = _with_plain_extents(with_plain_single_dims(_inline_bindings(func)))
    func = with_early_fills(with_intervals(func))
    return narrow(lengthen(unfuse(resolve_views(mark_prints(func)))))


def _with_plain_extents(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`x[k * 64 : (k + 1) * 64]` is 64 long: the extents of regions are constants where they can be."""
    analyzer = arith.Analyzer()

    def plain(call: tirx.Call) -> tirx.Call | None:
        if op_name(call) != "tl.region" or all(isinstance(extent, tirx.IntImm) for extent in call.args[2:]):
            return None
        extents = [analyzer.simplify(extent) for extent in call.args[2:]]
        return call_like(call, [*call.args[:2], *extents])

    body = tirx.stmt_functor.ir_transform(func.body, None, plain, ["tirx.Call"])
    return func if body.same_as(func.body) else func.with_body(body)


def _inline_bindings(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Inline `x = by * 64 + i` bindings that load nothing."""
    bound: dict[tirx.Var, tirx.PrimExpr] = {}
    for bind in nodes(func.body, tirx.Bind):
        if _is_index(bind.value):
            bound[bind.var] = tirx.stmt_functor.substitute(bind.value, bound)
    if not bound:
        return func
    drop = set(bound)

    def remove(node: object) -> object:
        return tirx.Evaluate(0) if isinstance(node, tirx.Bind) and node.var in drop else None

    body = tirx.stmt_functor.ir_transform(func.body, None, remove, ["tirx.Bind"])
    return func.with_body(_without_noops(tirx.stmt_functor.substitute(body, bound)))


def _is_index(value: tirx.PrimExpr) -> bool:
    """Integer arithmetic that reads no memory and calls nothing but conversions and the helpers for tiles."""
    if not value.dtype.startswith(("int", "uint", "bool")):
        return False
    calls = [call for call in nodes(value, tirx.Call) if op_name(call) != "tirx.if_then_else"]
    return not nodes(value, tirx.BufferLoad) and all(as_helper(call) is not None for call in calls)


def _without_noops(body: tirx.Stmt) -> tirx.Stmt:
    def clean(node: tirx.SeqStmt) -> tirx.Stmt | None:
        kept = [s for s in node.seq if not (isinstance(s, tirx.Evaluate) and isinstance(s.value, tirx.IntImm))]
        return None if len(kept) == len(node.seq) else sequence(kept)

    return tirx.stmt_functor.ir_transform(body, None, clean, ["tirx.SeqStmt"])
