"""Rounds: loops of few iterations, each of which reduces something and goes on with what came of it,

    for r in range(k): largest = max(scores); best[r] = largest; scores = where(scores == largest, -inf, scores)

said one iteration after the other, so that what a round reduces can be completed before the round goes on. That changes
nothing, whatever is in the loop.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm import tirx

from mesh_tensor.tir.effects import leaves_kernel, leaves_loop
from mesh_tensor.tir.nodes import int_or
from mesh_tensor.tir.rewrite import replace_block, sequence, with_body
from mesh_tensor.tir.tile_calls import parse_tile_op
from mesh_tensor.tir.tile_ops import Reduce
from mesh_tensor.tir.user_reports import prints
from mesh_tensor.tir.views import left_views

from .normalize import with_own_variables
from .statements import Kernel, body_statements, hinted_like, mentions

_MOST = 16  # rounds, of all loops together: each of them is cut, and planned
_KINDS = (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED)


def in_rounds(kernel: Kernel) -> tirx.PrimFunc | None:
    """The kernel with its rounds one after the other; None if there are none, or too many. Views and prints are told in
    the order in which they are written."""
    if left_views(kernel.func) or prints(kernel.func.body):
        return None
    stmts = body_statements(kernel.root.body)
    loops = [stmt for stmt in stmts if isinstance(stmt, tirx.For) and _has_rounds(stmt)]
    if not loops or sum(int(loop.extent) for loop in loops) > _MOST:
        return None
    body = sequence([part for stmt in stmts for part in (_rounds(stmt) if stmt in loops else [stmt])])
    block = with_body(kernel.root, hinted_like(kernel.root.body, body))
    return with_own_variables(kernel.func.with_body(replace_block(kernel.func.body, block, {})))


def _has_rounds(loop: tirx.For) -> bool:
    """Whether iterations reduce a buffer on chip, and use what comes of it; not those over blocks, one of which is
    loaded while another is worked on."""
    if loop.kind not in _KINDS or int_or(loop.min, None) is None or int_or(loop.extent, 0) < 1:
        return False
    if "num_stages" in loop.annotations or leaves_loop(loop) or leaves_kernel(loop.body):
        return False
    stmts = body_statements(loop.body)
    return any(mentions(stmt, reduced) for at, stmt in enumerate(stmts) for reduced in _reduced(stmts[:at]))


def _reduced(stmts: list[tirx.Stmt]) -> Iterator[tirx.Buffer]:
    """What tile operations among the statements reduce dims into."""
    for stmt in stmts:
        record = parse_tile_op(stmt) if isinstance(stmt, tirx.Evaluate) else None
        if isinstance(record, Reduce):
            yield record.dst.buffer


def _rounds(loop: tirx.For) -> Iterator[tirx.Stmt]:
    start = int(loop.min)
    for value in range(start, start + int(loop.extent)):
        at = {loop.loop_var: tirx.IntImm(loop.loop_var.dtype, value)}
        yield from body_statements(_copied(tirx.stmt_functor.substitute(loop.body, at)))


def _copied(body: tirx.Stmt) -> tirx.Stmt:
    """The same statements as nodes of their own: a statement has one place in a kernel."""

    def copy(stmt: tirx.Evaluate | tirx.BufferStore | tirx.Bind) -> tirx.Stmt:
        if isinstance(stmt, tirx.BufferStore):
            return tirx.BufferStore(stmt.buffer, stmt.value, stmt.indices, stmt.predicate)
        return tirx.Bind(stmt.var, stmt.value) if isinstance(stmt, tirx.Bind) else tirx.Evaluate(stmt.value)

    return tirx.stmt_functor.ir_transform(body, None, copy, ["tirx.Evaluate", "tirx.BufferStore", "tirx.Bind"])
