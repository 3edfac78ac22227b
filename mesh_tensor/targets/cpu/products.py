"""Products without loops beside them: a block that is set to 0 for a product is cleared by it, and one that is but a
copy of another, or of a part of a parameter, for products that follow, isn't made.

On a GPU a block of a parameter goes to shared memory before `T.gemm` takes it. A CPU has caches for that, and its
micro-kernel packs what it reads anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from tvm import tirx
from tvm.tirx.stmt_functor import substitute

from mesh_tensor.base.dtypes import itemsize
from mesh_tensor.tir.effects import op_name
from mesh_tensor.tir.memory import strides_of
from mesh_tensor.tir.nodes import expressions, int_or, is_const, nodes
from mesh_tensor.tir.rewrite import cast, sequence, statements, with_inner

from .blas import blas_wanted
from .exprs import GEMM, const, is_pure_index, same
from .fuse import offset, uses, uses_in, walk

#: Where the arguments of a product's call are.
FACTORS, RESULT = (1, 2), 3
M, B_ROW, C_ROW = 4, 9, 11
_N, _STRIDES, _C_COLUMN, _CLEAR = 5, ((7, 8), (B_ROW, 10)), 12, 13
_LEAVES_LOOP = ("tirx.break_loop", "tirx.continue_loop")
_PAGE = 4096  # bytes that a way of the nearest cache has, on x86 and most others


def lean_products(body: tirx.Stmt, params: frozenset[tirx.Var]) -> tirx.Stmt:
    """`body`, a re-targeted kernel, without loops that only prepare a block for a product; `params` are the data of the
    kernel's parameters, which may be the same memory.

    A copy of a parameter stays where the block may reach past the end (a copy fills that with 0), where anything else
    reads the block, and where a product's first factor is it transposed, or rows that want the same places of a cache:
    that one isn't packed. BLAS wants its blocks where the kernel has put them: what it computes may depend on how they
    are aligned."""
    if not any(is_product(stmt) for stmt in nodes(body, tirx.Evaluate)):
        return body
    return _Lean(body, frozenset() if blas_wanted() else params).run()


def map_sequences(stmt: tirx.Stmt, change: Callable[[list[tirx.Stmt]], list[tirx.Stmt]]) -> tirx.Stmt:
    """`stmt` with `change` applied to the statements of every sequence in it, inner ones first."""
    if isinstance(stmt, tirx.SeqStmt):
        return sequence(change([map_sequences(part, change) for part in statements(stmt)]))
    return with_inner(stmt, lambda part: map_sequences(part, change))


def own_blocks(body: tirx.Stmt) -> dict[tirx.Var, tirx.Buffer]:
    """The kernel's own buffers, by their data."""
    return {alloc.buffer.data: alloc.buffer for alloc in nodes(body, tirx.AllocBuffer)}


def uses_of(data: tirx.Var, where: tirx.Stmt) -> int:
    """In how many places of statements an access or a pointer is one to this memory."""
    return sum((use if isinstance(use, tirx.Var) else use.buffer.data).same_as(data) for use in uses_in(where))


def walks_all(loops: Sequence[tirx.For], indices: Sequence[tirx.PrimExpr], shape: Sequence[tirx.PrimExpr]) -> bool:
    """Whether the indices are the loops' variables, in their order, and each loop goes over all of its dim."""
    left = list(loops)
    for index, size in zip(indices, shape, strict=True):
        walked = bool(left) and index.same_as(left[0].loop_var) and is_const(left[0].min, 0) and left[0].step is None
        if walked and int_or(left[0].extent, None) == int_or(size, -1):
            left.pop(0)
        elif not (is_const(index, 0) and is_const(size, 1)):
            return False
    return not left


def source_of(load: tirx.BufferLoad, store: tirx.BufferStore) -> tirx.BufferLoad:
    """The element of which a store, at indices that are variables or numbers, made this element of its buffer."""
    at = {var: index for var, index in zip(store.indices, load.indices, strict=True) if isinstance(var, tirx.Var)}
    return tirx.BufferLoad(store.value.buffer, [substitute(index, at) for index in store.value.indices])


class _Lean:
    def __init__(self, body: tirx.Stmt, params: frozenset[tirx.Var]) -> None:
        self._body, self._params = body, params
        self._own = own_blocks(body)
        self._gone: list[tirx.Var] = []

    def run(self) -> tirx.Stmt:
        body = map_sequences(self._body, self._without_copies)
        if self._gone:
            body = map_sequences(body, self._without_gone)
        return map_sequences(body, self._without_zeros)

    def _without_gone(self, parts: list[tirx.Stmt]) -> list[tirx.Stmt]:
        return [p for p in parts if not (isinstance(p, tirx.AllocBuffer) and p.buffer.data in self._gone)]

    def _without_zeros(self, parts: list[tirx.Stmt]) -> list[tirx.Stmt]:
        place = 0
        while place < len(parts):
            store = whole_store(parts[place], self._own)
            if store is not None and _is_zero(store.value):
                after = _cleared(parts[place + 1 :], store.buffer)
                parts = parts if after is None else [*parts[:place], *after]
                place -= after is not None
            place += 1
        return parts

    def _without_copies(self, parts: list[tirx.Stmt]) -> list[tirx.Stmt]:
        place = 0
        while place < len(parts):
            after = self._without_copy(parts[place], parts[place + 1 :])
            parts = parts if after is None else [*parts[:place], *after]
            place += after is None
        return parts

    def _without_copy(self, copy: tirx.Stmt, after: Sequence[tirx.Stmt]) -> list[tirx.Stmt] | None:
        """The statements `after` the copy of a block with products that read the block itself, if they can."""
        store = whole_store(copy, self._own)
        if store is None or not self._is_copy(store):
            return None
        block, source = store.buffer.data, store.value.buffer
        users = [place for place, stmt in enumerate(after) if uses_of(block, stmt)]
        products = [_factors(after[place], store.buffer) for place in users]
        if not users or 0 in products or uses_of(block, self._body) != 1 + sum(products):
            return None
        is_param = source.data in self._params
        memory = self._params if is_param else frozenset([source.data])
        if any(_changes(stmt, memory) for stmt in after[: users[-1] + 1]):
            return None
        if is_param and any(_packs_better(after[place], block, source) for place in users):
            return None
        self._gone.append(block)
        return [_reading(stmt, store) if uses_of(block, stmt) else stmt for stmt in after]

    def _is_copy(self, store: tirx.BufferStore) -> bool:
        """It stores the same element of another block of the same form, or of a part of a parameter."""
        value, buffer = store.value, store.buffer
        if not isinstance(value, tirx.BufferLoad) or value.buffer.dtype != buffer.dtype:
            return False
        source = value.buffer
        if source.data in self._params:
            return _is_part(store)
        if source.data.same_as(buffer.data) or not source.same_as(self._own.get(source.data)) or source.strides:
            return False
        same_form = [int(s) for s in source.shape] == [int(s) for s in buffer.shape]
        return same_form and all(map(same, value.indices, store.indices))


def is_product(stmt: tirx.Stmt) -> bool:
    """Whether a statement is the call of a product."""
    if not isinstance(stmt, tirx.Evaluate) or op_name(stmt.value) != "tirx.call_extern":
        return False
    return bool(stmt.value.args[0].value.startswith(GEMM))


def whole_store(stmt: tirx.Stmt, own: dict[tirx.Var, tirx.Buffer]) -> tirx.BufferStore | None:
    """The store of loops that do nothing but set every element of a block once."""
    loops: list[tirx.For] = []
    while isinstance(stmt, tirx.For):
        loops.append(stmt)
        stmt = stmt.body
    if not isinstance(stmt, tirx.BufferStore) or not stmt.buffer.same_as(own.get(stmt.buffer.data)):
        return None
    return stmt if walks_all(loops, stmt.indices, stmt.buffer.shape) and not stmt.buffer.strides else None


def _is_zero(value: tirx.PrimExpr) -> bool:
    if isinstance(value, tirx.FloatImm):
        return value.value == 0.0 and math.copysign(1.0, value.value) > 0
    return is_const(value, 0)


def _is_part(store: tirx.BufferStore) -> bool:
    """Whether the block has what lies at the same places of a parameter's last two dims, with contiguous rows."""
    variables, indices = list(store.indices), list(store.value.indices)
    if len(variables) != 2 or len(indices) < 2 or not all(isinstance(var, tirx.Var) for var in variables):
        return False
    if is_const(store.buffer.shape[-1], 1) or not is_const(strides_of(store.value.buffer)[-1], 1):
        return False
    if any(not is_pure_index(index) or any(uses(index, var) for var in variables) for index in indices[:-2]):
        return False
    places = zip(indices[-2:], variables, strict=True)
    return all(offset(index, var, set(variables)) is not None for index, var in places)


def _packs_better(product: tirx.Stmt, block: tirx.Var, source: tirx.Buffer) -> bool:
    """Whether a product's first factor, which it doesn't pack, is better read of the block: where that is transposed,
    or rows of the source that follow each other want the same places of a cache."""
    args = product.value.args
    row = int_or(strides_of(source)[-2], None)
    far = row is not None and row * itemsize(source.dtype) % _PAGE == 0
    return _points_to(args[FACTORS[0]], {block}) and (far or not is_const(args[_STRIDES[0][1]], 1))


def _cleared(after: Sequence[tirx.Stmt], buffer: tirx.Buffer) -> list[tirx.Stmt] | None:
    """The statements with the first product that adds to all of `buffer` clearing it instead, if that is its first use
    and surely happens."""
    for place, stmt in enumerate(after):
        if not uses_of(buffer.data, stmt):
            if _may_leave(stmt):
                return None
            continue
        if isinstance(stmt, tirx.For):
            changed = _cleared_in_first(stmt, buffer)
        else:
            changed = _clearing(stmt, const(1, "int32"), buffer)
        return None if changed is None else [*after[:place], changed, *after[place + 1 :]]
    return None


def _cleared_in_first(loop: tirx.For, buffer: tirx.Buffer) -> tirx.Stmt | None:
    """The same in the first iteration of a loop that has one."""
    if int_or(loop.extent, 0) < 1 or loop.step is not None:
        return None
    parts = statements(loop.body)
    place = next((place for place, part in enumerate(parts) if uses_of(buffer.data, part)), None)
    if place is None or any(map(_may_leave, parts[:place])):
        return None
    changed = _clearing(parts[place], tirx.Cast("int32", tirx.EQ(loop.loop_var, loop.min)), buffer)
    if changed is None:
        return None
    body = sequence([*parts[:place], changed, *parts[place + 1 :]])
    return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, body)


def _may_leave(stmt: tirx.Stmt) -> bool:
    """Whether what follows a statement may be left out after it."""
    return any(op_name(call) in _LEAVES_LOOP for call in nodes(stmt, tirx.Call))


def _clearing(stmt: tirx.Stmt, when: tirx.PrimExpr, buffer: tirx.Buffer) -> tirx.Stmt | None:
    """A product that adds to all of `buffer`, and has no other use for it, as one that clears it `when` that holds."""
    if not is_product(stmt) or uses_of(buffer.data, stmt) != 1:
        return None
    args = list(stmt.value.args)
    if any(_points_to(args[place], {buffer.data}) for place in FACTORS):
        return None
    dst = args[RESULT].args[0]
    sizes = [int_or(args[place], -1) for place in (M, _N, C_ROW, _C_COLUMN)]
    rows, columns = math.prod(int(size) for size in buffer.shape) // max(sizes[1], 1), sizes[1]
    whole = sizes == [rows, columns, columns, 1] and rows * columns == math.prod(int(size) for size in buffer.shape)
    starts = dst.buffer.same_as(buffer) and all(is_const(index, 0) for index in dst.indices)
    if not (whole and starts and is_const(args[_CLEAR], 0)):
        return None
    return tirx.Evaluate(tirx.Call(stmt.value.dtype, stmt.value.op, [*args[:_CLEAR], when]))


def _factors(stmt: tirx.Stmt, block: tirx.Buffer) -> int:
    """How often a product reads a block as a factor; 0 if the statement is none, or has another use for the block, as
    for a view of it, whose rows are others."""
    if not is_product(stmt):
        return 0
    args, width = stmt.value.args, int_or(block.shape[-1], 0)
    strides = [{int_or(args[place], 0) for place in places} for places in _STRIDES]
    read = [args[place].args[0].buffer.same_as(block) for place in FACTORS]
    factors = [is_read and of == {1, width} for is_read, of in zip(read, strides, strict=True)]
    return sum(factors) if uses_of(block.data, stmt) == sum(factors) else 0


def _changes(stmt: tirx.Stmt, memory: Collection[tirx.Var]) -> bool:
    """Whether a statement may write memory: anything but a plain load or a factor of a product may."""
    return any(_changes_itself(part, memory) for part in walk(stmt))


def _changes_itself(part: tirx.Stmt, memory: Collection[tirx.Var]) -> bool:
    if isinstance(part, tirx.BufferStore) and part.buffer.data in memory:
        return True
    if is_product(part):
        return _points_to(part.value.args[RESULT], memory)
    found = [node for expr in expressions(part) for node in nodes(expr, tirx.Call, tirx.Var)]
    return any(node in memory if isinstance(node, tirx.Var) else _points_to(node, memory) for node in found)


def _points_to(call: tirx.Call, memory: Collection[tirx.Var]) -> bool:
    return op_name(call) == "tirx.address_of" and call.args[0].buffer.data in memory


def _reading(product: tirx.Evaluate, store: tirx.BufferStore) -> tirx.Stmt:
    """The product with what a block was stored from in place of the block."""
    call, row = product.value, cast(strides_of(store.value.buffer)[-2], "int64")
    args = list(call.args)
    for factor, strides in zip(FACTORS, _STRIDES, strict=True):
        if _points_to(args[factor], {store.buffer.data}):
            args[factor] = tirx.address_of(source_of(args[factor].args[0], store))
            for stride in strides:
                args[stride] = args[stride] if is_const(args[stride], 1) else row
    return tirx.Evaluate(tirx.Call(call.dtype, call.op, args))
