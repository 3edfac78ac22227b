"""Blocks that are but copies of a parameter, read where they lie in it.

    for i: for j: x[i, j] = X[row + i, j]; total += x[i, j]        for i: for j: total += X[row + i, j]
    for i: for j: Y[row + i, j] = x[i, j] - total                  for i: for j: Y[row + i, j] = X[row + i, j] - total

A GPU's kernel takes a block to memory on chip first. On a CPU, a large one only pushes what it is a copy of out of the
caches, and has to be written.

Parameters may be the same memory: nothing may be written to one, between the copy and what is read of the block, that
could be what was copied. The element that a read is of may be written after it, by the same iteration (`in_step`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from mesh_tensor.base.dtypes import itemsize
from mesh_tensor.tir.memory import strides_of
from mesh_tensor.tir.nodes import int_or
from mesh_tensor.tir.rewrite import inner

from .contract import block_uses, private_blocks, without_block
from .exprs import is_pure_index
from .fuse import MemoryAccess, accesses, bytes_of_step, in_step, same_memory, walk
from .products import source_of, walks_all

_LARGE = 1 << 14  # bytes of a block from which its copy costs more than another look at the parameter


def without_copies(body: tirx.Stmt, params: frozenset[tirx.Var]) -> tirx.Stmt:
    """`body`, a re-targeted kernel with its loops joined, without large blocks that repeat a part of a parameter;
    `params` are the data of the kernel's parameters, which may be the same memory."""
    for block in private_blocks(body):
        if math.prod(int_or(size, 0) for size in block.shape) * itemsize(block.dtype) < _LARGE:
            continue
        store = next((use for use in block_uses(body, block) if isinstance(use, tirx.BufferStore)), None)
        if store is not None and _Copy(body, store, params).can_go():
            body = without_block(_reading_source(body, store), block)
    return body


class _Copy:
    """The first store to a block, which may be all that is ever stored there, and be of a parameter."""

    def __init__(self, body: tirx.Stmt, store: tirx.BufferStore, params: frozenset[tirx.Var]) -> None:
        self._body, self._store, self._block, self._params = body, store, store.buffer, params
        self._path = _path(body, store)
        named = [place for place, at in enumerate(self._path) if isinstance(at, tirx.For) and self._walks(at)]
        self._top = named[0] if named else len(self._path) - 1
        self._loops = [self._path[place] for place in named]

    def can_go(self) -> bool:
        """Whether nothing changes when its readers read the parameter."""
        if not self._is_plain() or not self._sets_all():
            return False
        seen = 0
        for at, loops, after in self._later():
            reads = [use for part in after for use in block_uses(part, self._block)]
            if not all(self._is_set(read, loops) for read in reads) or not self._unchanged([at], after):
                return False
            seen += len(reads)
        return len(block_uses(self._body, self._block)) == 1 + seen

    def _walks(self, loop: tirx.For) -> bool:
        return any(loop.loop_var.same_as(index) for index in self._store.indices)

    def _is_plain(self) -> bool:
        """It is of a contiguous part of a parameter, as it lies there."""
        source = self._store.value
        if not isinstance(source, tirx.BufferLoad) or source.buffer.data not in self._params:
            return False
        if source.dtype != self._block.dtype or not all(map(is_pure_index, source.indices)):
            return False
        width, read = itemsize(source.dtype), MemoryAccess(source.buffer, tuple(source.indices), False)
        steps = [
            (bytes_of_step(read, index), int_or(stride, -1) * width)
            for index, stride in zip(self._store.indices, strides_of(self._block), strict=True)
            if isinstance(index, tirx.Var)
        ]
        return bool(steps) and all(of_source == of_block for of_source, of_block in steps)

    def _sets_all(self) -> bool:
        """Loops that hold nothing but loops and sequences, on the way to it, store every element."""
        nest = self._path[self._top :]
        known = all(isinstance(at, tirx.SeqStmt | tirx.BufferStore) or at in self._loops for at in nest)
        bound = {part.var for part in walk(nest[0]) if isinstance(part, tirx.Bind)}
        free = {var for index in self._store.value.indices for var in tirx.analysis.undefined_vars(index)}
        return known and not bound & free and walks_all(self._loops, self._store.indices, self._block.shape)

    def _later(self) -> list[tuple[tirx.Stmt, list[tirx.For], list[tirx.Stmt]]]:
        """The statements after it, sequence by sequence: what each sequence follows, and the loops that hold it."""
        found, loops = [], []
        for place in range(max(self._top - 1, 0), len(self._path) - 1):
            at, child = self._path[place : place + 2]
            if place >= self._top and isinstance(at, tirx.For):
                loops.append(at)
            if isinstance(at, tirx.SeqStmt):
                place_in = next(place for place, part in enumerate(at.seq) if part.same_as(child))
                found.append((child, list(loops), list(at.seq)[place_in + 1 :]))
        return found

    def _is_set(self, read: tirx.BufferLoad | tirx.BufferStore, loops: Sequence[tirx.For]) -> bool:
        """Whether it is a read of an element that was stored by the same iteration of the loops."""
        around = {loop.loop_var for loop in loops}
        pairs = zip(self._store.indices, read.indices, strict=True)
        return isinstance(read, tirx.BufferLoad) and all(
            here.same_as(there) for here, there in pairs if isinstance(here, tirx.Var) and here in around
        )

    def _unchanged(self, before: Sequence[tirx.Stmt], parts: Sequence[tirx.Stmt]) -> bool:
        """Whether what `parts` read of the block is not written before they do, by them or by what is before them."""
        readers = [place for place, part in enumerate(parts) if block_uses(part, self._block)]
        if not readers:
            return True
        last = readers[-1]
        return not any(map(self._may_write, (*before, *parts[:last]))) and self._reads_first(parts[last])

    def _may_write(self, stmt: tirx.Stmt) -> bool:
        """Whether what the block is a copy of may be written."""
        touched = accesses(stmt)
        return touched is None or any(self._is_source(access) for access in touched if access.writes)

    def _is_source(self, access: MemoryAccess) -> bool:
        source = self._store.value
        return same_memory(access, MemoryAccess(source.buffer, tuple(source.indices), False), self._params)

    def _reads_first(self, stmt: tirx.Stmt) -> bool:
        """Whether each element is read before it may be written."""
        touched = accesses(stmt)
        if touched is None:
            return False
        writes = [access for access in touched if access.writes and self._is_source(access)]
        loads = block_uses(stmt, self._block)
        if not writes or not loads or isinstance(stmt, tirx.BufferStore):
            return True
        if isinstance(stmt, tirx.SeqStmt):
            return self._unchanged([], inner(stmt))
        if not isinstance(stmt, tirx.For):
            return False
        bound = {part.loop_var for part in walk(stmt) if isinstance(part, tirx.For)}
        reads = [source_of(load, self._store) for load in loads]
        here = [MemoryAccess(read.buffer, tuple(read.indices), False) for read in reads]
        apart = all(in_step(r, stmt.loop_var, w, stmt.loop_var, bound) for r in here for w in writes)
        return apart and self._reads_first(stmt.body)


def _path(body: tirx.Stmt, store: tirx.BufferStore) -> list[tirx.Stmt]:
    """The statements that hold `store`, outermost first, and itself."""
    if body.same_as(store):
        return [body]
    for part in inner(body):
        if found := _path(part, store):
            return [body, *found]
    return []


def _reading_source(body: tirx.Stmt, store: tirx.BufferStore) -> tirx.Stmt:
    def read(load: tirx.BufferLoad) -> tirx.BufferLoad | None:
        return source_of(load, store) if load.buffer.same_as(store.buffer) else None

    return ir_transform(body, None, read, ["tirx.BufferLoad"])
