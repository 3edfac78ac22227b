"""Blocks that are made for one product, such as the patches of a convolution, a few rows at a time: these stay in the
nearest cache from where they are made to where the product reads them.

That pays where the product's other factor stays there, too, or it would come there once per group of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.stmt_functor import substitute

from mesh_tensor.base.dtypes import itemsize
from mesh_tensor.tir.nodes import int_or, is_const, loads
from mesh_tensor.tir.rewrite import sequence

from .blas import blas_wanted
from .exprs import const, loop_nest
from .fuse import accesses
from .products import FACTORS, RESULT, is_product, map_sequences, own_blocks, uses_of, whole_store

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
