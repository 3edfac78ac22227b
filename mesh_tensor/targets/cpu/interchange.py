"""Loops over rows inside of a loop over blocks of columns, put outside of it, where that changes nothing.

A GPU's kernel takes a block of some rows and columns at a time. On a CPU, rows that lie a page or more apart want the
same places of the nearest cache, and are more streams than a processor fetches ahead: walked one after the other, each
from its first column to its last, they come at the speed of memory.

    for block: x = X[block]; for row: y[row] += A[row, block] * x

becomes

    for row: for block: y[row] += A[row, block] * X[block]

What each row computes, and in which order, stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, substitute

from mesh_tensor.tir.nodes import int_or, loads, nodes
from mesh_tensor.tir.rewrite import statements, with_inner

from .contract import without_block
from .exprs import is_pure_index
from .fuse import MemoryAccess, accesses, apart, bytes_of_step, uses, uses_in, walk
from .products import own_blocks, uses_of, walks_all

_PAGE = 4096  # bytes that a way of the nearest cache has, on x86 and most others
_STAYS_NEAR = 1 << 18  # bytes that every row may read again


def rows_outermost(body: tirx.Stmt, params: frozenset[tirx.Var]) -> tirx.Stmt:
    """`body`, a re-targeted kernel with its loops joined, with such loops interchanged; `params` are the data of the
    kernel's parameters, which may be the same memory."""
    return _Interchange(body, params).run()


class _Interchange:
    def __init__(self, body: tirx.Stmt, params: frozenset[tirx.Var]) -> None:
        self._body, self._params, self._own = body, params, own_blocks(body)
        self._gone: list[tirx.Buffer] = []

    def run(self) -> tirx.Stmt:
        body = self._stmt(self._body)
        for block in self._gone:
            body = without_block(body, block)
        return body

    def _stmt(self, stmt: tirx.Stmt) -> tirx.Stmt:
        changed = with_inner(stmt, self._stmt)
        return self._loop(changed) if isinstance(changed, tirx.For) else changed

    def _loop(self, columns: tirx.For) -> tirx.For:
        *copies, rows = statements(columns.body)
        if not isinstance(rows, tirx.For) or not _plain(columns, rows):
            return columns
        copied = [self._copied(copy) for copy in copies]
        stores = [store for made in copied for store in made]
        if not all(copied) or not all(self._is_read_by(rows, store) for store in stores):
            return columns
        inlined = rows
        for store in stores:
            inlined = _with_source(inlined, store)
        touched = accesses(inlined.body)
        if touched is None or not self._independent(columns, inlined, touched):
            return columns
        if any(a.writes and a.buffer.data in self._params for a in touched) and stores:
            return columns  # a copy of a parameter may be of what is written here
        if not self._pays(columns, inlined, touched):
            return columns
        self._gone += [store.buffer for store in stores]
        return with_inner(rows, lambda _: with_inner(columns, lambda _: inlined.body))

    def _copied(self, stmt: tirx.Stmt) -> list[tirx.BufferStore]:
        """The stores of loops that do nothing but set every element of blocks of the kernel's own; none otherwise."""
        nest: list[tirx.For] = []
        while isinstance(stmt, tirx.For):
            nest.append(stmt)
            stmt = stmt.body
        stores = statements(stmt)
        for store in stores:
            if not isinstance(store, tirx.BufferStore) or not store.buffer.same_as(self._own.get(store.buffer.data)):
                return []
            if store.buffer.strides or not walks_all(nest, store.indices, store.buffer.shape):
                return []
        return stores

    def _is_read_by(self, rows: tirx.For, store: tirx.BufferStore) -> bool:
        """Whether a block is a copy that nothing but the loop has a use for, which only reads it."""
        block = store.buffer
        found = [use for use in uses_in(rows) if isinstance(use, tirx.BufferLoad) and use.buffer.same_as(block)]
        alone = uses_of(block.data, self._body) == 1 + len(found) and len(found) == uses_of(block.data, rows)
        value = store.value
        plain = value.dtype == block.dtype and not nodes(value, tirx.Call) and all(map(is_pure_index, store.indices))
        sources = {load.buffer.data for load in loads(value)}
        return alone and bool(found) and plain and sources <= self._params

    def _independent(self, columns: tirx.For, rows: tirx.For, touched: Sequence[MemoryAccess]) -> bool:
        """Whether what one row touches no other does, unless all of them only read it."""
        bound = {columns.loop_var, *(part.loop_var for part in walk(rows.body) if isinstance(part, tirx.For))}
        return apart(touched, rows.loop_var, bound, self._params)

    def _pays(self, columns: tirx.For, rows: tirx.For, touched: Sequence[MemoryAccess]) -> bool:
        """Whether rows of a parameter come to be walked in order, and what each of them reads again stays near."""
        if int_or(rows.extent, 0) < 2 or int_or(columns.extent, 0) < 2:
            return False
        far = False
        for access in touched:
            moved = access.buffer.data in self._params and any(uses(i, columns.loop_var) for i in access.indices)
            if not moved:
                continue
            step = bytes_of_step(access, columns.loop_var)
            if any(uses(index, rows.loop_var) for index in access.indices):
                far |= 0 < step < _PAGE and bytes_of_step(access, rows.loop_var) >= _PAGE
            elif not 0 <= step * int(columns.extent) <= _STAYS_NEAR:
                return False
        return far


def _plain(columns: tirx.For, rows: tirx.For) -> bool:
    ends = columns.min, columns.extent, rows.min, rows.extent
    pure = columns.step is None and rows.step is None and all(map(is_pure_index, ends))
    return pure and not uses(rows.min, columns.loop_var) and not uses(rows.extent, columns.loop_var)


def _with_source(rows: tirx.For, store: tirx.BufferStore) -> tirx.For:
    """The loop with what the block is a copy of, for the block."""

    def source(load: tirx.PrimExpr) -> tirx.PrimExpr | None:
        if not load.buffer.same_as(store.buffer):
            return None
        at = dict(zip(store.indices, load.indices, strict=True))
        return substitute(store.value, {var: index for var, index in at.items() if isinstance(var, tirx.Var)})

    return ir_transform(rows, None, source, ["tirx.BufferLoad"])
