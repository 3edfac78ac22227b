"""Rounds: loops of few iterations, each of which reduces something and goes on with what came of it,

    for r in range(k): largest = max(scores); best[r] = largest; scores = where(scores == largest, -inf, scores)

said one iteration after the other, so that what a round reduces can be completed before the round goes on. That changes
nothing, whatever is in the loop. Programs that take blocks in waves have rounds, too,

    for w in range(waves): if w * programs + pid < blocks: total = 0; for k: total += A @ B; C[...] = cast(total)

of which each statement is under the condition then, and each round has a sum of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tvm import ir, tirx

from mesh_tensor.tir.effects import leaves_kernel, leaves_loop
from mesh_tensor.tir.loops import is_backward
from mesh_tensor.tir.nodes import int_or, nodes, used
from mesh_tensor.tir.rewrite import buffer_like, exchange_buffers, guarded, sequence
from mesh_tensor.tir.tile_calls import parse_tile_op
from mesh_tensor.tir.tile_ops import Fill, Gemm, Reduce
from mesh_tensor.tir.user_reports import prints
from mesh_tensor.tir.views import left_views

from .normalize import with_own_variables
from .statements import Kernel, body_statements, hinted_like

_MOST = 16  # rounds, of all loops together: each of them is cut, and planned
_CHANGING = (tirx.BufferLoad, tirx.Call)
_KINDS = (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED)


def in_rounds(kernel: Kernel) -> tirx.PrimFunc | None:
    """The kernel with its rounds one after the other; None if there are none, or too many. Views and prints are told in
    the order in which they are written."""
    if left_views(kernel.func) or prints(kernel.func.body):
        return None
    stmts = body_statements(kernel.root.body)
    rounds = {stmt: found for stmt in stmts if isinstance(stmt, tirx.For) and (found := _round(stmt))}
    if not rounds or sum(int(loop.extent) for loop in rounds) > _MOST:
        return None
    made, allocated = list[tirx.Stmt](), [*kernel.root.alloc_buffers]
    for stmt in stmts:
        if stmt not in rounds:
            made.append(stmt)
            continue
        own = _own_sums(kernel, stmt, rounds[stmt])
        values = range(int(stmt.min), int(stmt.min) + int(stmt.extent))
        for value in reversed(values) if is_backward(stmt) else values:
            into = {buffer: buffer_like(buffer, f"round{value}") for buffer in own}
            allocated += into.values()
            at = {stmt.loop_var: tirx.IntImm(stmt.loop_var.dtype, value)}
            body = exchange_buffers(tirx.stmt_functor.substitute(sequence(rounds[stmt]), at), into)
            made += body_statements(copied(body))
    return with_own_variables(kernel.with_body(hinted_like(kernel.root.body, sequence(made)), allocated))


def _round(loop: tirx.For) -> list[tirx.Stmt]:
    """The statements of an iteration, if it reduces a buffer on chip, and uses what comes of it; not of loops over
    blocks, one of which is loaded while another is worked on."""
    if loop.kind not in _KINDS or int_or(loop.min, None) is None or int_or(loop.extent, 0) < 1:
        return []
    if "num_stages" in loop.annotations or leaves_loop(loop) or leaves_kernel(loop.body):
        return []
    ways = (body_statements(loop.body), list(_one_by_one(loop.body)))
    return next((stmts for stmts in ways if _uses_reduced(stmts)), [])


def _one_by_one(body: tirx.Stmt) -> Iterator[tirx.Stmt]:
    """The statements, each under the conditions that are for several of them: where those say which program and round
    it is, nothing changes that on the way."""
    for stmt in body_statements(body):
        is_alone = isinstance(stmt, tirx.IfThenElse) and stmt.else_case is None
        if is_alone and not nodes(stmt.condition, *_CHANGING) and not nodes(stmt.then_case, tirx.Bind):
            yield from (guarded(part, [stmt.condition]) for part in _one_by_one(stmt.then_case))
        else:
            yield stmt


def _uses_reduced(stmts: Sequence[tirx.Stmt]) -> bool:
    return any(uses(stmt, reduced) for at, stmt in enumerate(stmts) for reduced in reduced_in(stmts[:at]))


def reduced_in(stmts: Sequence[tirx.Stmt]) -> Iterator[tirx.Buffer]:
    """What tile operations among the statements reduce dims into, and what loops sum products in."""
    for stmt in stmts:
        _, inner = _conditions(stmt)
        if isinstance(inner, tirx.For):
            records = map(parse_tile_op, nodes(inner.body, tirx.Evaluate))
            yield from (record.dst.buffer for record in records if isinstance(record, Gemm) and not record.clears)
        elif isinstance(record := parse_tile_op(inner), Reduce):
            yield record.dst.buffer


def _conditions(stmt: tirx.Stmt) -> tuple[list[tirx.PrimExpr], tirx.Stmt]:
    """The conditions around a single statement, the first one that is asked first, and the statement."""
    conditions = []
    while isinstance(stmt, tirx.IfThenElse) and stmt.else_case is None:
        conditions.append(stmt.condition)
        stmt = stmt.then_case
    return conditions, stmt


def uses(stmt: tirx.Stmt, buffer: tirx.Buffer) -> bool:
    return any(access.buffer.data.same_as(buffer.data) for access in nodes(stmt, tirx.BufferLoad, tirx.BufferStore))


def _own_sums(kernel: Kernel, loop: tirx.For, stmts: Sequence[tirx.Stmt]) -> list[tirx.Buffer]:
    """The buffers of which nothing goes from one round to another: a round sets all of one under the conditions under
    which it uses it. Where it does so under none, live ranges tell that."""
    known = [dict(note.items()) for note in kernel.root.annotations.values() if hasattr(note, "items")]
    rest = [stmt for stmt in body_statements(kernel.root.body) if not stmt.same_as(loop)]
    named = nodes(kernel.root.body, tirx.Var)
    return [
        buffer
        for buffer in dict.fromkeys(reduced_in(stmts))
        if buffer in kernel.root.alloc_buffers
        and not any(buffer.data in note for note in known)
        and not any(buffer.data.same_as(var) for var in named)
        and not any(uses(stmt, buffer) for stmt in rest)
        and _is_set_first([_conditions(stmt) for stmt in stmts if uses(stmt, buffer)], buffer)
    ]


def _is_set_first(uses: Sequence[tuple[list[tirx.PrimExpr], tirx.Stmt]], buffer: tirx.Buffer) -> bool:
    """Whether the first of the uses of a buffer sets all of it, under conditions that the others are under, too, and
    that nothing changes on the way."""
    (first, setting), *others = uses
    record = parse_tile_op(setting) if isinstance(setting, tirx.Evaluate) else None
    if not isinstance(record, Fill) or not record.dst.is_whole or buffer.data in used(record.value):
        return False
    starts = [conditions[: len(first)] for conditions, _ in others]
    is_fixed = bool(first) and not any(nodes(condition, *_CHANGING) for condition in first)
    return is_fixed and all(len(s) == len(first) and all(map(ir.structural_equal, s, first)) for s in starts)


def copied(body: tirx.Stmt) -> tirx.Stmt:
    """The same statements as nodes of their own: a statement has one place in a kernel."""

    def copy(stmt: tirx.Evaluate | tirx.BufferStore | tirx.Bind) -> tirx.Stmt:
        if isinstance(stmt, tirx.BufferStore):
            return tirx.BufferStore(stmt.buffer, stmt.value, stmt.indices, stmt.predicate)
        return tirx.Bind(stmt.var, stmt.value) if isinstance(stmt, tirx.Bind) else tirx.Evaluate(stmt.value)

    return tirx.stmt_functor.ir_transform(body, None, copy, ["tirx.Evaluate", "tirx.BufferStore", "tirx.Bind"])
