"""Blocks that are smaller than they were declared, once loops are joined: what one iteration leaves for the next
statement of the same iteration needs no memory, and what it leaves for nobody but itself needs that of one iteration.

A value that is stored once and read once by the next store takes its place; stores that nothing reads go. A block of
which each iteration of one loop uses its own slice, which it writes first, becomes that slice.

Blocks that are made for one product, such as the patches of a convolution, a few rows at a time: these stay in the
nearest cache from where they are made to where the product reads them.

That pays where the product's other factor stays there, too, or it would come there once per group of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, substitute

from mesh_tensor.base.dtypes import itemsize
from mesh_tensor.tir.effects import op_name
from mesh_tensor.tir.nodes import int_or, is_const, loads, nodes
from mesh_tensor.tir.rewrite import sequence, statements

from .blas import blas_wanted
from .exprs import const, loop_nest, same
from .fuse import accesses, uses_in, walk
from .products import FACTORS, RESULT, is_product, map_sequences, own_blocks, uses_of, walks_all, whole_store

_Accesses = list[tirx.BufferLoad | tirx.BufferStore]


def contract_blocks(body: tirx.Stmt, params: frozenset[tirx.Var]) -> tirx.Stmt:
    """`body`, a re-targeted kernel with its loops joined, with smaller blocks; `params` are the data of the kernel's
    parameters, which may be the same memory."""
    for block in private_blocks(body):
        passed_on = _passed_on(body, block, params)
        body = body if passed_on is None else passed_on
    for block in private_blocks(body):
        body = _of_one_iteration(body, block)
    return body


def private_blocks(body: tirx.Stmt) -> list[tirx.Buffer]:
    """The kernel's own buffers that nothing has a pointer to, or sees in another form."""
    own = own_blocks(body)
    pointed = {c.args[0].buffer.data for c in nodes(body, tirx.Call) if op_name(c) == "tirx.address_of"}
    named = [use for use in uses_in(body) if not isinstance(use, tirx.Var)]
    pointed |= {use.buffer.data for use in named if not use.buffer.same_as(own.get(use.buffer.data))}
    pointed |= set(nodes(body, tirx.Var))
    return [buffer for data, buffer in own.items() if data not in pointed and not buffer.strides]


def block_uses(where: tirx.Stmt, block: tirx.Buffer) -> _Accesses:
    """The accesses to a block, statement by statement."""
    return [use for use in uses_in(where) if not isinstance(use, tirx.Var) and use.buffer.same_as(block)]


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

    smaller = without_block(map_sequences(body, pass_on), block)
    return None if block_uses(smaller, block) else smaller


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
            alike = len(reads) == 1 and all(map(same, reads[0].indices, store.indices))
            return place if alike and not any(use is reads[0] for i in stmt.indices for use in loads(i)) else None
        if stmt.buffer.same_as(store.buffer):
            return None
        if stmt.buffer.data in sources or (stmt.buffer.data in params and sources & params):
            return None
    return None


def _with_value(stmt: tirx.BufferStore, store: tirx.BufferStore) -> tirx.BufferStore:
    def value(load: tirx.PrimExpr) -> tirx.PrimExpr | None:
        return store.value if load.buffer.same_as(store.buffer) else None

    evaluated = ir_transform(tirx.Evaluate(stmt.value), None, value, ["tirx.BufferLoad"])
    return tirx.BufferStore(stmt.buffer, evaluated.value, stmt.indices)


def without_block(body: tirx.Stmt, block: tirx.Buffer) -> tirx.Stmt:
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
    uses = block_uses(body, block)
    if len(block.shape) < 2 or not uses or not isinstance(uses[0].indices[0], tirx.Var):
        return body
    var = uses[0].indices[0]
    if not all(use.indices[0].same_as(var) for use in uses):
        return body
    loops = [part for part in walk(body) if isinstance(part, tirx.For) and part.loop_var.same_as(var)]
    if len(loops) != 1 or accesses(loops[0].body) is None or len(block_uses(loops[0].body, block)) != len(uses):
        return body
    first = next(part for part in statements(loops[0].body) if block_uses(part, block))
    return _sliced(body, block) if _sets_all(first, block) else body


def _sets_all(stmt: tirx.Stmt, block: tirx.Buffer) -> bool:
    """Whether a nest of loops stores every element of the slice before it reads that one, and touches no other."""
    loops = []
    while isinstance(stmt, tirx.For):
        loops.append(stmt)
        stmt = stmt.body
    uses = block_uses(stmt, block)
    if not uses or not walks_all(loops, list(uses[0].indices)[1:], list(block.shape)[1:]):
        return False
    first = next(part for part in statements(stmt) if block_uses(part, block))
    stored = isinstance(first, tirx.BufferStore) and first.buffer.same_as(block) and len(block_uses(first, block)) == 1
    return stored and all(all(map(same, use.indices, uses[0].indices)) for use in uses)


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


_NEAREST = 1 << 14  # bytes of the nearest cache that a factor may have: MT_NEAREST_BYTES in `csrc/mesh_tensor_gemm.h`
_GROUP = 1 << 13  # bytes of a group of rows
_LEAST_ROWS = 8
_ZERO = const(0, "int32")


def group_rows(body: tirx.Stmt, params: frozenset[tirx.Var]) -> tirx.Stmt:
    """`body`, a re-targeted kernel, with such products row group by row group; `params` are the data of the kernel's
    parameters, which may be the same memory."""
    return body if blas_wanted() else _RowGroups(body, params).run()


class _RowGroups:
    def __init__(self, body: tirx.Stmt, params: frozenset[tirx.Var]) -> None:
        self._body, self._params, self._own = body, params, own_blocks(body)
        self._smaller: dict[tirx.Buffer, tirx.Buffer] = {}

    def run(self) -> tirx.Stmt:
        body = map_sequences(self._body, self._grouped)
        return map_sequences(body, self._declared) if self._smaller else body

    def _declared(self, parts: list[tirx.Stmt]) -> list[tirx.Stmt]:
        def declared(part: tirx.Stmt) -> tirx.Stmt:
            is_smaller = isinstance(part, tirx.AllocBuffer) and part.buffer in self._smaller
            return tirx.AllocBuffer(self._smaller[part.buffer]) if is_smaller else part

        return [declared(part) for part in parts]

    def _grouped(self, parts: list[tirx.Stmt]) -> list[tirx.Stmt]:
        for place, nest in enumerate(parts):
            store = whole_store(nest, self._own)
            if store is None or [type(index) for index in store.indices] != [tirx.Var, tirx.Var]:
                continue
            if uses_of(store.buffer.data, self._body) != 2:
                continue
            after = parts[place + 1 :]
            user = next((at for at, stmt in enumerate(after) if uses_of(store.buffer.data, stmt)), None)
            rows = 0 if user is None else self._rows(store, after[user])
            if user is not None and rows and self._may_pass(store, after[:user]):
                grouped = self._by_group(nest, store, after[user], rows)
                return self._grouped([*parts[:place], *after[:user], grouped, *after[user + 1 :]])
        return parts

    def _rows(self, store: tirx.BufferStore, stmt: tirx.Stmt) -> int:
        """The rows of a group, if the statement is a product that has the block as its first factor, and it pays."""
        if not is_product(stmt):
            return 0
        a, b, c, *sizes = list(stmt.value.args)[1:13]
        rows, depth = (int(size) for size in store.buffer.shape)
        m, _, k, a_m, a_k, b_k, b_n, c_m, c_n = (int_or(size, -1) for size in sizes)
        result, width = c.args[0].buffer, itemsize(store.buffer.dtype)
        is_factor = a.args[0].buffer.same_as(store.buffer) and all(is_const(i, 0) for i in a.args[0].indices)
        is_whole = [m, k, a_m, a_k] == [rows, depth, depth, 1]
        plain = result.same_as(self._own.get(result.data)) and len(result.shape) == 2 and not result.strides
        own = {a.args[0].buffer.data, b.args[0].buffer.data, *(load.buffer.data for load in loads(store.value))}
        plain = plain and result.data not in own and [c_m, c_n] == [int(result.shape[1]), 1]
        if not (is_factor and is_whole and plain):
            return 0
        stays = b_n == 1 and b_k > 0 and depth * b_k * itemsize(b.args[0].buffer.dtype) <= _NEAREST
        fitting = [1 << bit for bit in range(12) if rows % (1 << bit) == 0 and (depth * width << bit) <= _GROUP]
        large = rows * depth * width > 2 * _NEAREST
        return fitting[-1] if stays and large and fitting and fitting[-1] >= _LEAST_ROWS else 0

    def _may_pass(self, store: tirx.BufferStore, between: Sequence[tirx.Stmt]) -> bool:
        """Whether the block may be made after the statements `between`."""
        sources = {load.buffer.data for load in loads(store.value)}
        for stmt in between:
            found = None if isinstance(stmt, tirx.AllocBuffer) else accesses(stmt)
            if found is None:
                return False
            written = {access.buffer.data for access in found if access.writes}
            if written & sources or (written & self._params and sources & self._params):
                return False
        return True

    def _by_group(self, nest: tirx.For, store: tirx.BufferStore, product: tirx.Stmt, rows: int) -> tirx.Stmt:
        block, group = store.buffer, tirx.Var("group", "int32")
        small = tirx.decl_buffer([rows, block.shape[1]], block.dtype, block.name, scope=block.scope())
        self._smaller[block] = small
        i, j = store.indices
        first = group * rows
        value = substitute(store.value, {i: first + i})
        made = loop_nest(
            [(i, _ZERO, const(rows, "int32")), (j, _ZERO, nest.body.extent)], tirx.BufferStore(small, value, [i, j])
        )
        args = list(product.value.args)
        args[FACTORS[0]] = tirx.address_of(tirx.BufferLoad(small, [_ZERO, _ZERO]))
        row, column = args[RESULT].args[0].indices
        args[RESULT] = tirx.address_of(tirx.BufferLoad(args[RESULT].args[0].buffer, [row + first, column]))
        args[RESULT + 1] = const(rows, "int64")
        multiplied = tirx.Evaluate(tirx.Call(product.value.dtype, product.value.op, args))
        groups = const(int(block.shape[0]) // rows, "int32")
        return loop_nest([(group, _ZERO, groups)], sequence([made, multiplied]))
