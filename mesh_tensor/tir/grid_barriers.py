"""Kernels that wait for their whole grid (`T.sync_grid`): what stands before and after is two kernels, the second of
which runs when all programs of the first are through.

A program's memory on chip does not outlast it. So they are taken apart where the part after the barrier fills what it
uses on chip before it reads that, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tvm import ir, tirx

from .effects import is_hint, leaves_kernel, op_name
from .nodes import is_const, nodes
from .rewrite import block_like, replace_block, sequence, statements, with_body
from .tile_ops import parse_tile_op

#: The loops and branches around a statement, outermost first.
_Around = tuple[tuple[tirx.Stmt, bool], ...]


def without_grid_barriers(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function, whose kernels are those between barriers of the whole grid, one after the other. A kernel stays as
    it is where it has barriers elsewhere than at its outermost level, or something on chip is needed on both sides."""
    if not any(map(_is_barrier, nodes(func.body, tirx.Evaluate))):
        return func

    def apart(node: tirx.SBlock) -> tirx.SBlock | None:
        if node.name_hint != "root":
            return None
        kernels = [part for stmt in statements(node.body) for part in _between_barriers(stmt)]
        return with_body(node, sequence(kernels))

    body = tirx.stmt_functor.ir_transform(func.body, None, apart, ["tirx.SBlock"])
    return func.with_body(body)


def _between_barriers(kernel: tirx.Stmt) -> list[tirx.Stmt]:
    blocks = [block for block in nodes(kernel, tirx.SBlock) if block.name_hint == "tilelang_root"]
    if len(blocks) != 1 or not isinstance(kernel, (tirx.For, tirx.SBlockRealize)):
        return [kernel]
    (block,) = blocks
    hints, body = _unwrapped(block.body)
    parts: list[list[tirx.Stmt]] = [[]]
    for stmt in statements(body):
        if _is_barrier(stmt):
            parts.append([])
        else:
            parts[-1].append(stmt)
    if len(parts) == 1 or leaves_kernel(body) or any(map(_is_barrier, _inside(sum(parts, [])))):
        return [kernel]
    found: list[tirx.Stmt] = []
    before: list[tirx.Stmt] = []
    for part in parts:
        bound = _bound(before, part)
        if bound is None or not all(_is_filled_first(data, part) for data in _on_chip(block, before, part)):
            return [kernel]
        if not all(isinstance(stmt, tirx.Bind) for stmt in part):
            found.append(_with_body(kernel, block, hints, [*bound, *part]))
        before += part
    return found or [kernel]


def _is_barrier(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.Evaluate) and op_name(stmt.value) == "tl.sync_grid"


def _inside(stmts: Sequence[tirx.Stmt]) -> list[tirx.Evaluate]:
    return [found for stmt in stmts for found in nodes(stmt, tirx.Evaluate)]


def _unwrapped(stmt: tirx.Stmt) -> tuple[list[tirx.AttrStmt], tirx.Stmt]:
    """The hints around all of a body, and the body."""
    hints = []
    while True:
        if is_hint(stmt):
            hints.append(stmt)
            stmt = stmt.body
        elif isinstance(stmt, tirx.SeqStmt) and is_hint(stmt.seq[-1]):
            hint = stmt.seq[-1]
            stmt = tirx.AttrStmt(hint.node, hint.attr_key, hint.value, sequence([*stmt.seq[:-1], hint.body]))
        else:
            return hints, stmt


def _with_body(
    kernel: tirx.Stmt, block: tirx.SBlock, hints: Sequence[tirx.AttrStmt], stmts: Sequence[tirx.Stmt]
) -> tirx.Stmt:
    body = sequence(list(stmts))
    used = _memory(body)
    for hint in reversed(hints):
        body = tirx.AttrStmt(hint.node, hint.attr_key, hint.value, body)
    allocated = [buffer for buffer in block.alloc_buffers if buffer.data in used]
    return replace_block(kernel, block_like(block, body, allocated), {})


def _bound(before: Sequence[tirx.Stmt], part: Sequence[tirx.Stmt]) -> list[tirx.Stmt] | None:
    """What binds the variables that a part takes from before, without memory or calls; None if that is not all."""
    named = {var for stmt in part for var in nodes(stmt, tirx.Var)}
    found: list[tirx.Stmt] = []
    for stmt in reversed(before):
        if not isinstance(stmt, tirx.Bind) or stmt.var not in named:
            continue
        if nodes(stmt.value, tirx.BufferLoad, tirx.Call):
            return None
        named |= set(nodes(stmt.value, tirx.Var))
        found.insert(0, stmt)
    return found


def _memory(stmt: tirx.Stmt) -> set[tirx.Var]:
    accesses = nodes(stmt, tirx.BufferLoad, tirx.BufferStore)
    return {access.buffer.data for access in accesses} | set(nodes(stmt, tirx.Var))


def _on_chip(block: tirx.SBlock, before: Sequence[tirx.Stmt], part: Sequence[tirx.Stmt]) -> set[tirx.Var]:
    """The memory on chip that is used on both sides."""
    own = {buffer.data for buffer in block.alloc_buffers}
    used = [set[tirx.Var]().union(*map(_memory, stmts)) for stmts in (before, part)]
    return own & used[0] & used[1]


def _is_filled_first(data: tirx.Var, part: Sequence[tirx.Stmt]) -> bool:
    """Whether all of a buffer is written before anything else is done with it, wherever something is."""
    (first, around), *others = _uses(sequence(list(part)), data, ())
    return _fills(first, data) and all(other[: len(around)] == around for _, other in others)


def _uses(stmt: tirx.Stmt, data: tirx.Var, around: _Around) -> Iterator[tuple[tirx.Stmt, _Around]]:
    """The statements that use the memory, in their order; a loop that fills it is one of them."""
    if data not in _memory(stmt):
        return
    if isinstance(stmt, tirx.SeqStmt):
        for child in stmt.seq:
            yield from _uses(child, data, around)
    elif isinstance(stmt, tirx.For) and not _fills(stmt, data):
        if data in _memory(tirx.Evaluate(stmt.extent)) | _memory(tirx.Evaluate(stmt.min)):
            yield stmt, around
        yield from _uses(stmt.body, data, (*around, (stmt, True)))
    elif isinstance(stmt, tirx.IfThenElse):
        if data in _memory(tirx.Evaluate(stmt.condition)):
            yield stmt, around
        yield from _uses(stmt.then_case, data, (*around, (stmt, True)))
        if stmt.else_case is not None:
            yield from _uses(stmt.else_case, data, (*around, (stmt, False)))
    else:
        yield stmt, around


def _fills(stmt: tirx.Stmt, data: tirx.Var) -> bool:
    """Whether a statement, or a nest of loops around a single store, overwrites all of a buffer, and does not read
    it."""
    if isinstance(stmt, tirx.Evaluate):
        record = parse_tile_op(stmt)
        if record is None or not record.dst.buffer.data.same_as(data):
            return False
        if any(source.buffer.data.same_as(data) for source in record.sources):
            return False
        starts = all(is_const(low, 0) for low in record.dst.mins)
        return starts and _is_whole(record.dst.buffer, record.dst.extents) and (not record.reduction or record.clears)
    loops: list[tirx.For] = []
    while isinstance(stmt, tirx.For):
        loops.append(stmt)
        stmt = stmt.body
    if not isinstance(stmt, tirx.BufferStore) or not stmt.buffer.data.same_as(data):
        return False
    if data in _memory(tirx.Evaluate(stmt.value)) or not all(is_const(loop.min, 0) for loop in loops):
        return False
    places = [index for index in stmt.indices if not is_const(index, 0)]
    walked = {loop.loop_var: loop.extent for loop in loops}
    if len(places) != len(loops) or {*places} != walked.keys():
        return False
    one = tirx.IntImm("int32", 1)
    return _is_whole(stmt.buffer, [walked.get(index, one) for index in stmt.indices])


def _is_whole(buffer: tirx.Buffer, extents: Sequence[tirx.PrimExpr]) -> bool:
    return all(ir.structural_equal(extent, size) for extent, size in zip(extents, buffer.shape, strict=True))
