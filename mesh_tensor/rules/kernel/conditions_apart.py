"""Conditions of which a program asks one for all that it does,

    if block * 64 < rows[group]: total = 0; for k: total += A @ B; C[...] = f(total) else: C[...] = 0

said of each statement, so that what a loop in them reduces can be completed before it is used. Nothing that they do
changes the condition.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm import tirx

from mesh_tensor.tir.effects import leaves_kernel, op_name, written
from mesh_tensor.tir.nodes import loads, nodes, used
from mesh_tensor.tir.rewrite import guarded, sequence
from mesh_tensor.tir.tile_calls import parse_tile_op
from mesh_tensor.tir.tile_ops import Fill
from mesh_tensor.tir.user_reports import prints
from mesh_tensor.tir.views import left_views

from .normalize import with_own_variables
from .statements import Kernel, body_statements, hinted_like


def conditions_apart(kernel: Kernel) -> tirx.PrimFunc | None:
    """The kernel with each statement under the conditions around it; None if there are none around several. Views and
    prints are told in the order in which they are written."""
    stmts = body_statements(kernel.root.body)
    if not any(map(_is_around_several, stmts)) or left_views(kernel.func) or prints(kernel.func.body):
        return None
    made = [part for stmt in stmts for part in _apart(stmt, kernel)]
    return with_own_variables(kernel.with_body(hinted_like(kernel.root.body, sequence(made))))


def _is_around_several(stmt: tirx.Stmt) -> bool:
    """Whether a condition, which nothing changes on the way, is around statements of which one is a loop."""
    if not isinstance(stmt, tirx.IfThenElse) or leaves_kernel(stmt) or nodes(stmt.then_case, tirx.Bind):
        return False
    loaded = {load.buffer.data for load in loads(stmt.condition)}
    calls = [op_name(call) for call in nodes(stmt.condition, tirx.Call)]
    if calls or any(buffer.data in loaded for buffer in written(stmt)):
        return False
    inner = body_statements(stmt.then_case)
    return len(inner) > 1 and any(isinstance(part, tirx.For) for part in inner)


def _apart(stmt: tirx.Stmt, kernel: Kernel) -> Iterator[tirx.Stmt]:
    """The statements under a condition, each under its own; what sets all of a buffer on chip that nothing outside of
    the condition uses may do so anyway."""
    if not _is_around_several(stmt):
        yield stmt
        return
    inner = [part for branch in body_statements(stmt.then_case) for part in _apart(branch, kernel)]
    for at, part in enumerate(inner):
        yield part if _only_starts(part, inner[:at], stmt, kernel) else guarded(part, [stmt.condition])
    if stmt.else_case is not None:
        yield guarded(stmt.else_case, [tirx.Not(stmt.condition)])


def _only_starts(part: tirx.Stmt, before: list[tirx.Stmt], stmt: tirx.IfThenElse, kernel: Kernel) -> bool:
    """Whether a statement under a condition sets all of a buffer that is used after it, under the condition alone."""
    record = parse_tile_op(part) if isinstance(part, tirx.Evaluate) else None
    if not isinstance(record, Fill) or not record.dst.is_whole or used(record.value):
        return False
    buffer = record.dst.buffer
    others = [other for other in body_statements(kernel.root.body) if not other.same_as(stmt)]
    others += before if stmt.else_case is None else [*before, stmt.else_case]
    return buffer in kernel.root.alloc_buffers and not any(buffer.data in used(other) for other in others)
