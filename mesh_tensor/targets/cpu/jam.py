"""Rows that are reduced one after the other with the same operand, several at a time, where that changes nothing.

    for row: t = 0; for k: t += A[row, k] * x[k]; y[row] = t

becomes

    for group: t0 = 0; t1 = 0; ...; for k: t0 += A[8 * group, k] * x[k]; t1 += A[8 * group + 1, k] * x[k]; ...

(unroll and jam.) One row alone waits for each sum before the next, and for the memory of a single stream.

What each row computes, and in which order, stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, substitute

from mesh_tensor.base.dtypes import itemsize
from mesh_tensor.tir.effects import op_name
from mesh_tensor.tir.nodes import int_or, loads, nodes
from mesh_tensor.tir.rewrite import sequence, statements, with_inner

from .exprs import const, is_pure_index, loop_nest, same
from .fuse import accesses, apart, uses, walk

_AT_ONCE = (8, 4)
_MOST_STORES = 16  # of a row: what is written eight times takes its compiler as long
_STACK = 1 << 13  # bytes that the blocks of the rows of a group may have
_ZERO = const(0, "int32")


def rows_together(body: tirx.Stmt, params: frozenset[tirx.Var]) -> tirx.Stmt:
    """`body`, a re-targeted kernel with its reductions in steps, with such rows in groups; `params` are the data of the
    kernel's parameters, which may be the same memory."""
    if isinstance(body, tirx.For) and (size := _rows_at_once(body)) and _is_independent(body, params):
        return _grouped(body, size)
    return with_inner(body, lambda part: rows_together(part, params))


def _rows_at_once(rows: tirx.For) -> int:
    """How many rows a group has, if the loop reduces rows with a shared operand; 0 otherwise."""
    extent = int_or(rows.extent, 0)
    size = next((size for size in _AT_ONCE if extent >= size), 0)
    if not size or rows.step is not None or not is_pure_index(rows.min):
        return 0
    parts = list(walk(rows.body))
    if sum(isinstance(part, tirx.BufferStore) for part in parts) > _MOST_STORES:
        return 0
    blocks = [part.buffer for part in parts if isinstance(part, tirx.AllocBuffer)]
    widths = [math.prod(int_or(dim, _STACK) for dim in block.shape) * itemsize(block.dtype) for block in blocks]
    return size if sum(widths) * size <= _STACK and _reduces(rows.body, rows.loop_var, []) else 0


def _reduces(stmt: tirx.Stmt, row: tirx.Var, loops: list[tirx.Var]) -> bool:
    """Whether loops that are the same for all rows hold a reduction of something of the row with something shared."""
    if isinstance(stmt, tirx.SeqStmt):
        return any(_reduces(part, row, loops) for part in statements(stmt))
    if isinstance(stmt, tirx.For):
        return _is_common(stmt, row) and _reduces(stmt.body, row, [*loops, stmt.loop_var])
    if not isinstance(stmt, tirx.BufferStore):
        return False
    read = [load for load in loads(stmt.value) if not load.buffer.same_as(stmt.buffer)]
    before = [load for load in loads(stmt.value) if load.buffer.same_as(stmt.buffer)]
    carried = any(all(map(same, load.indices, stmt.indices)) for load in before)
    reduced = [var for var in loops if not any(uses(index, var) for index in stmt.indices)]
    walked = [load for load in read if any(uses(index, var) for index in load.indices for var in reduced)]
    of_row = [any(uses(index, row) for index in load.indices) for load in walked]
    return carried and any(of_row) and not all(of_row)


def _is_common(loop: tirx.For, row: tirx.Var) -> bool:
    """Whether the loop is the same for all rows."""
    ends = loop.min, loop.extent
    return loop.step is None and all(is_pure_index(end) and not uses(end, row) for end in ends)


def _is_independent(rows: tirx.For, params: frozenset[tirx.Var]) -> bool:
    """Whether what one row touches no other does, unless all of them only read it."""
    touched = accesses(rows.body)
    own = {part.buffer.data for part in walk(rows.body) if isinstance(part, tirx.AllocBuffer)}
    pointed = {c.args[0].buffer.data for c in nodes(rows.body, tirx.Call) if op_name(c) == "tirx.address_of"}
    inner = {part.loop_var for part in walk(rows.body) if isinstance(part, tirx.For)}
    return touched is not None and pointed <= own and apart(touched, rows.loop_var, inner, params)


def _grouped(rows: tirx.For, size: int) -> tirx.Stmt:
    group = tirx.Var(f"{rows.loop_var.name}_group", "int32")
    whole, rest = divmod(int(rows.extent), size)
    bodies = [_row(rows, rows.min + group * size + place) for place in range(size)]
    groups = loop_nest([(group, _ZERO, const(whole, "int32"))], _together(bodies))
    if not rest:
        return groups
    last = _row(rows, rows.min + group + whole * size)
    return sequence([groups, loop_nest([(group, _ZERO, const(rest, "int32"))], last)])


def _row(rows: tirx.For, row: tirx.PrimExpr) -> tirx.Stmt:
    """What the loop does for one row, in blocks of that row's own."""
    copies: dict[tirx.Buffer, tirx.Buffer] = {}
    for part in walk(rows.body):
        if isinstance(part, tirx.AllocBuffer):
            block = part.buffer
            copies[block] = tirx.decl_buffer(list(block.shape), block.dtype, block.name, scope=block.scope())

    def change(node: tirx.Stmt | tirx.PrimExpr) -> tirx.Stmt | tirx.PrimExpr | None:
        block = copies.get(node.buffer)
        if block is None:
            return None
        if isinstance(node, tirx.BufferLoad):
            return tirx.BufferLoad(block, list(node.indices))
        if isinstance(node, tirx.BufferStore):
            return tirx.BufferStore(block, node.value, list(node.indices))
        return tirx.AllocBuffer(block)

    body = ir_transform(rows.body, None, change, ["tirx.BufferLoad", "tirx.BufferStore", "tirx.AllocBuffer"])
    return substitute(body, {rows.loop_var: row})


def _together(rows: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """The same statements of several rows, statement by statement; those of loops that all of them have, in one."""
    first = rows[0]
    if isinstance(first, tirx.SeqStmt):
        return sequence([_together(parts) for parts in zip(*map(statements, rows), strict=True)])
    if isinstance(first, tirx.For) and _is_joined(first, rows):
        return with_inner(first, lambda _: _together([loop.body for loop in rows]))
    return sequence(rows)


def _is_joined(first: tirx.For, rows: Sequence[tirx.For]) -> bool:
    """Whether the rows' loops become one: loops around others, and those that compilers don't make vectors of."""
    ends = [(loop.min, loop.extent) for loop in rows]
    alike = first.step is None and all(same(a, b) for pair in ends for a, b in zip(ends[0], pair, strict=True))
    parts = statements(first.body)
    stores = [part for part in parts if isinstance(part, tirx.BufferStore)]
    in_order = any(not any(uses(index, first.loop_var) for index in store.indices) for store in stores)
    return alike and all(map(is_pure_index, ends[0])) and (in_order or any(isinstance(p, tirx.For) for p in parts))
