"""Blocks that are smaller than they were declared, once loops are joined: what one iteration leaves for the next
statement of the same iteration needs no memory, and what it leaves for nobody but itself needs that of one iteration.

A value that is stored once and read once by the next store takes its place; stores that nothing reads go. A block of
which each iteration of one loop uses its own slice, which it writes first, becomes that slice.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from mesh_tensor.tir.effects import op_name
from mesh_tensor.tir.nodes import loads, nodes
from mesh_tensor.tir.rewrite import sequence, statements

from .fuse import accesses, expressions, walk
from .products import map_sequences, own_blocks, walks_all

_Accesses = list[tirx.BufferLoad | tirx.BufferStore]


def contract_blocks(body: tirx.Stmt, params: frozenset[tirx.Var]) -> tirx.Stmt:
    """`body`, a re-targeted kernel with its loops joined, with smaller blocks; `params` are the data of the kernel's
    parameters, which may be the same memory."""
    for block in _private_blocks(body):
        passed_on = _passed_on(body, block, params)
        body = body if passed_on is None else passed_on
    for block in _private_blocks(body):
        body = _of_one_iteration(body, block)
    return body


def _private_blocks(body: tirx.Stmt) -> list[tirx.Buffer]:
    """The kernel's own buffers that nothing has a pointer to, or sees in another form."""
    own = own_blocks(body)
    pointed = {c.args[0].buffer.data for c in nodes(body, tirx.Call) if op_name(c) == "tirx.address_of"}
    pointed |= {use.buffer.data for use in _all(body) if not use.buffer.same_as(own.get(use.buffer.data))}
    pointed |= set(nodes(body, tirx.Var))
    return [buffer for data, buffer in own.items() if data not in pointed and not buffer.strides]


def _all(where: tirx.Stmt) -> _Accesses:
    """The accesses, statement by statement: one that is part of several statements is found in each."""
    found: _Accesses = []
    for part in walk(where):
        found += [load for expr in expressions(part) for load in loads(expr)]
        found += [part] if isinstance(part, tirx.BufferStore) else []
    return found


def _uses(where: tirx.Stmt, block: tirx.Buffer) -> _Accesses:
    return [use for use in _all(where) if use.buffer.same_as(block)]


def _passed_on(body: tirx.Stmt, block: tirx.Buffer, params: frozenset[tirx.Var]) -> tirx.Stmt | None:
    """The kernel without the block, if every value in it is only read by a store that follows in the same sequence."""

    def pass_on(parts: list[tirx.Stmt]) -> list[tirx.Stmt]:
        kept, place = list(parts), 0
        while place < len(kept):
            store = kept[place]
            if isinstance(store, tirx.BufferStore) and store.buffer.same_as(block):
                reader = _only_reader(store, kept[place + 1 :], params)
                if reader is not None:
                    where = place + 1 + reader
                    kept[where] = _with_value(kept[where], store)
            place += 1
        return [part for part in kept if not _is_of(part, block)]

    smaller = _without(map_sequences(body, pass_on), block)
    return None if _uses(smaller, block) else smaller


def _is_of(stmt: tirx.Stmt, block: tirx.Buffer) -> bool:
    return isinstance(stmt, tirx.BufferStore | tirx.AllocBuffer) and bool(stmt.buffer.same_as(block))


def _only_reader(store: tirx.BufferStore, after: Sequence[tirx.Stmt], params: frozenset[tirx.Var]) -> int | None:
    """Which of the statements is the only one to read what is stored, up to the next store of the block; None if that
    isn't one read, of the same element, before anything changes that the value is made of."""
    sources = {load.buffer.data for expr in (store.value, *store.indices) for load in loads(expr)}
    for place, stmt in enumerate(after):
        if not isinstance(stmt, tirx.BufferStore):
            return None
        reads = [load for load in loads(stmt) if load.buffer.same_as(store.buffer)]
        if reads:
            same = len(reads) == 1 and all(map(_same, reads[0].indices, store.indices))
            return place if same and not any(use is reads[0] for i in stmt.indices for use in loads(i)) else None
        if stmt.buffer.same_as(store.buffer):
            return None
        if stmt.buffer.data in sources or (stmt.buffer.data in params and sources & params):
            return None
    return None


def _same(a: tirx.PrimExpr, b: tirx.PrimExpr) -> bool:
    return bool(tirx.analysis.expr_deep_equal(a, b))


def _with_value(stmt: tirx.BufferStore, store: tirx.BufferStore) -> tirx.BufferStore:
    def value(load: tirx.PrimExpr) -> tirx.PrimExpr | None:
        return store.value if load.buffer.same_as(store.buffer) else None

    evaluated = ir_transform(tirx.Evaluate(stmt.value), None, value, ["tirx.BufferLoad"])
    return tirx.BufferStore(stmt.buffer, evaluated.value, stmt.indices)


def _without(body: tirx.Stmt, block: tirx.Buffer) -> tirx.Stmt:
    """The kernel without the block's stores and declaration, and without loops that held nothing else."""

    def drop(stmt: tirx.Stmt) -> tirx.Stmt | None:
        if isinstance(stmt, tirx.SeqStmt):
            left = [kept for part in statements(stmt) if (kept := drop(part)) is not None]
            return sequence(left) if left else None
        if isinstance(stmt, tirx.For):
            inner = drop(stmt.body)
            return inner and tirx.For(stmt.loop_var, stmt.min, stmt.extent, tirx.ForKind.SERIAL, inner, step=stmt.step)
        if isinstance(stmt, tirx.IfThenElse):
            then_case, else_case = drop(stmt.then_case), stmt.else_case and drop(stmt.else_case)
            if then_case is None:
                return else_case and tirx.IfThenElse(tirx.Not(stmt.condition), else_case, None)
            return tirx.IfThenElse(stmt.condition, then_case, else_case)
        if isinstance(stmt, tirx.While):
            return tirx.While(stmt.condition, drop(stmt.body) or tirx.Evaluate(0))
        return None if _is_of(stmt, block) else stmt

    return drop(body) or tirx.Evaluate(0)


def _of_one_iteration(body: tirx.Stmt, block: tirx.Buffer) -> tirx.Stmt:
    """The kernel with the block's first dim gone, if one loop walks it, and nothing stays for its next iteration."""
    uses = _uses(body, block)
    if len(block.shape) < 2 or not uses or not isinstance(uses[0].indices[0], tirx.Var):
        return body
    var = uses[0].indices[0]
    if not all(use.indices[0].same_as(var) for use in uses):
        return body
    loops = [part for part in walk(body) if isinstance(part, tirx.For) and part.loop_var.same_as(var)]
    if len(loops) != 1 or accesses(loops[0].body) is None or len(_uses(loops[0].body, block)) != len(uses):
        return body
    first = next(part for part in statements(loops[0].body) if _uses(part, block))
    if not _sets_all(first, block):
        return body
    return _sliced(body, block)


def _sets_all(stmt: tirx.Stmt, block: tirx.Buffer) -> bool:
    """Whether a nest of loops stores every element of the slice before it reads that one, and touches no other."""
    loops = []
    while isinstance(stmt, tirx.For):
        loops.append(stmt)
        stmt = stmt.body
    uses = _uses(stmt, block)
    if not uses or not walks_all(loops, list(uses[0].indices)[1:], list(block.shape)[1:]):
        return False
    first = next(part for part in statements(stmt) if _uses(part, block))
    stored = isinstance(first, tirx.BufferStore) and first.buffer.same_as(block) and len(_uses(first, block)) == 1
    return stored and all(all(map(_same, use.indices, uses[0].indices)) for use in uses)


def _sliced(body: tirx.Stmt, block: tirx.Buffer) -> tirx.Stmt:
    small = tirx.decl_buffer(list(block.shape)[1:], block.dtype, block.name, scope=block.scope())

    def change(node: tirx.Stmt | tirx.PrimExpr) -> tirx.Stmt | tirx.PrimExpr | None:
        if not node.buffer.same_as(block):
            return None
        if isinstance(node, tirx.BufferLoad):
            return tirx.BufferLoad(small, list(node.indices)[1:])
        if isinstance(node, tirx.BufferStore):
            return tirx.BufferStore(small, node.value, list(node.indices)[1:])
        return tirx.AllocBuffer(small)

    return ir_transform(body, None, change, ["tirx.BufferLoad", "tirx.BufferStore", "tirx.AllocBuffer"])
