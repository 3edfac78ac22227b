"""Accumulators that are filled for the next iteration at the end of each: filled at the start of each instead.

`fill; for k: {...; fill}` is `fill; for k: {fill; ...}; fill`: the same values, and nothing is carried from one
iteration to the next.
"""

from __future__ import annotations

from tvm import ir, tirx

from .effects import leaves_kernel, leaves_loop
from .nodes import nodes
from .rewrite import loop_like, sequence
from .tile_ops import Fill, Region, parse_tile_op


def with_early_fills(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same kernel, in which loops that find a buffer filled, and leave it filled, fill it themselves."""
    if not any(_filled(stmt) for stmt in nodes(func.body, tirx.Evaluate)):
        return func

    def rotated(node: tirx.SeqStmt) -> tirx.Stmt | None:
        made: list[tirx.Stmt] = []
        for stmt in node.seq:
            made += _rotated(stmt, made) if isinstance(stmt, tirx.For) else [stmt]
        return None if len(made) == len(node.seq) else sequence(made)

    body = tirx.stmt_functor.ir_transform(func.body, None, rotated, ["tirx.SeqStmt"])
    return func if body.same_as(func.body) else func.with_body(body)


def _rotated(loop: tirx.For, before: list[tirx.Stmt]) -> list[tirx.Stmt]:
    """The loop, with its last fills at the start and behind it, where what stands before it ends with them, too."""
    if not isinstance(loop.body, tirx.SeqStmt) or leaves_loop(loop) or leaves_kernel(loop):
        return [loop]
    stmts, fills = list(loop.body.seq), list[tirx.Stmt]()
    for fill in [stmt for stmt in stmts if _filled(stmt)]:
        buffer = _filled(fill)
        since = _last_use(before, buffer)
        if _last_use(stmts, buffer) is fill and since is not None and ir.structural_equal(since, fill):
            stmts.remove(fill)
            fills.append(fill)
    if not fills:
        return [loop]
    return [loop_like(loop, loop.extent, sequence([*fills, *stmts]), start=loop.min), *fills]


def _filled(stmt: tirx.Stmt) -> tirx.Buffer | None:
    """The buffer on chip all of which the statement fills with a constant."""
    record = parse_tile_op(stmt) if isinstance(stmt, tirx.Evaluate) else None
    if not isinstance(record, Fill) or isinstance(record.value, Region) or record.dst.buffer.scope() == "global":
        return None
    if nodes(tirx.Evaluate(record.value), tirx.Var, tirx.BufferLoad):
        return None
    starts = all(isinstance(low, tirx.IntImm) and int(low) == 0 for low in record.dst.mins)
    ends = all(ir.structural_equal(e, s) for e, s in zip(record.dst.extents, record.dst.buffer.shape, strict=True))
    return record.dst.buffer if starts and ends else None


def _last_use(stmts: list[tirx.Stmt], buffer: tirx.Buffer) -> tirx.Stmt | None:
    """The last statement that may read or write the buffer's memory, through views, too."""
    return next((stmt for stmt in reversed(stmts) if _uses(stmt, buffer)), None)


def _uses(stmt: tirx.Stmt, buffer: tirx.Buffer) -> bool:
    accesses = nodes(stmt, tirx.BufferLoad, tirx.BufferStore)
    return any(a.buffer.data.same_as(buffer.data) for a in accesses) or any(
        var.same_as(buffer.data) for var in nodes(stmt, tirx.Var)
    )
