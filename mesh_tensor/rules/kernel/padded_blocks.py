"""Blocks on chip of which only the first rows count: 64 rows for 4 heads, as matrix instructions want them.

What lies behind those rows is computed and dropped. For analysis and rewriting it isn't there: such dims are as long as
what counts, and so are the loops and regions over them, so that blocks follow each other in their dim without overlap;
`widen` gives them their lengths back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from tvm import tirx

from mesh_tensor.tir.linear import vars_of
from mesh_tensor.tir.nodes import int_or, nodes
from mesh_tensor.tir.rewrite import block_like, exchange_buffers, region_call, reshaped, with_args
from mesh_tensor.tir.tile_calls import parse_tile_op
from mesh_tensor.tir.tile_ops import Gemm, TileOp

from .padded_rows import Node, PaddedRows
from .reader import read_kernel
from .statements import Access, Kernel, Statement

#: On a function: from a buffer's data to how long its dims were, and are. On a loop: how far it went, and goes. Around
#: a tile operation: how long its regions were, as (which of them, the destination first; dim; length).
MARK = "mesh_tensor.padded"
_GEMM_SIZES = slice(5, 8)


def narrow(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel without the rows of blocks on chip that nothing depends on."""
    kernel = read_kernel(func)
    rows = PaddedRows(kernel)
    counts = rows.counts()
    if not counts:
        return func
    buffers = {buffer: _narrowed(buffer, counts) for buffer in kernel.on_chip}
    buffers = {buffer: new for buffer, new in buffers.items() if new is not buffer}
    body = _Narrower(kernel, counts, rows.used, buffers).visit(func.body)
    lengths = {old.data: [list(old.shape), list(new.shape)] for old, new in buffers.items()}
    return func.with_body(body).with_attr(MARK, lengths)


def _narrowed(buffer: tirx.Buffer, counts: Mapping[Node, int]) -> tirx.Buffer:
    dims = range(len(buffer.shape))
    if not any((buffer, dim) in counts for dim in dims):
        return buffer
    return reshaped(buffer, [counts.get((buffer, dim), buffer.shape[dim]) for dim in dims])


class _Narrower:
    """Makes dims, and what goes over them, as long as what counts."""

    def __init__(
        self,
        kernel: Kernel,
        counts: Mapping[Node, int],
        used: Set[tirx.Var],
        buffers: Mapping[tirx.Buffer, tirx.Buffer],
    ) -> None:
        self._counts, self._used, self._buffers = counts, used, buffers
        self._tile_ops = {s.node: s for s in kernel.statements if s.tile_op is not None}

    def visit(self, body: tirx.Stmt) -> tirx.Stmt:
        body = tirx.stmt_functor.ir_transform(body, self._tile_op, self._other, ["tirx.Evaluate", "tirx.For"])
        return _on(body, self._buffers)

    def _tile_op(self, node: tirx.Stmt) -> tirx.Stmt | None:
        statement = self._tile_ops.get(node) if isinstance(node, tirx.Evaluate) else None
        if statement is None:
            return None
        walked = [statement.element_dims(access) for access in _operands(statement)]
        new = [
            (n, dim, self._counts[var])
            for n, dims in enumerate(walked)
            for dim, var in dims.items()
            if var in self._counts
        ]
        if not new:
            return None
        old = [[n, dim, _extent(statement, n, dim)] for n, dim, _ in new]
        return tirx.AttrStmt(old, MARK, tirx.IntImm("int32", 0), _with_extents(node, new))

    def _other(self, node: tirx.Stmt) -> tirx.Stmt | None:
        if not isinstance(node, tirx.For) or node.loop_var not in self._counts:
            return None
        # what is used of a row must not be used of others: such a loop stays as short as what counts
        length = tirx.IntImm(node.loop_var.dtype, self._counts[node.loop_var])
        mark = {} if node.loop_var in self._used else {MARK: [node.extent, length]}
        marks = {**dict(node.annotations), **mark}
        return tirx.For(node.loop_var, node.min, length, node.kind, node.body, node.thread_binding, marks, node.step)


def _operands(statement: Statement) -> tuple[Access, ...]:
    record = statement.tile_op
    return (statement.target, *statement.reads[: 0 if record is None else len(record.sources)])


def _extent(statement: Statement, operand: int, dim: int) -> int:
    record = statement.tile_op
    assert record is not None
    return int((record.dst, *record.sources)[operand].extents[dim])


def _with_extents(stmt: tirx.Evaluate, lengths: Iterable[tuple[int, int, int]]) -> tirx.Stmt:
    """The tile operation, in which regions (the destination is 0) have other lengths in some dims."""
    record = parse_tile_op(stmt)
    assert record is not None
    args = list(stmt.value.args)
    at = _positions(record)
    for operand, dim, length in lengths:
        if operand not in at:
            continue
        load, mode, *extents = args[at[operand]].args
        extents[dim] = tirx.IntImm("int32", length)
        args[at[operand]] = region_call(load.buffer, load.indices, extents, int(mode))
    new = with_args(stmt, args)
    made = parse_tile_op(new)
    if isinstance(made, Gemm):
        args[_GEMM_SIZES] = [element.extent for element in made.elements(lambda a, b: True)]
        return with_args(stmt, args)
    return new


def _positions(record: TileOp) -> dict[int, int]:
    """Where in a tile operation's call its regions are: the sources come first."""
    count = len(record.sources)
    return {0: count, **{n + 1: n for n in range(count)}}


def _on(body: tirx.Stmt, buffers: Mapping[tirx.Buffer, tirx.Buffer]) -> tirx.Stmt:
    """The statement on other buffers, which it allocates, too."""

    def allocating(block: tirx.SBlock) -> tirx.SBlock:
        return block_like(block, block.body, [buffers.get(buffer, buffer) for buffer in block.alloc_buffers])

    return tirx.stmt_functor.ir_transform(exchange_buffers(body, buffers), None, allocating, ["tirx.SBlock"])


def widen(local: tirx.PrimFunc, source: tirx.PrimFunc) -> tirx.PrimFunc:
    """The local kernel, made of what `narrow` gave, in which the dims on chip are as long as they were, and so is what
    goes over them. Dims that hold the tiles of a dim that is split stay."""
    lengths = (source.attrs or {}).get(MARK)
    if lengths is None:
        return local
    allocated = [buffer for block in nodes(local.body, tirx.SBlock) for buffer in block.alloc_buffers]
    buffers = {b: reshaped(b, _widened(b, *lengths[b.data])) for b in allocated if b.data in lengths}
    dims = {(b.data, d): int_or(size, 0) for b, new in buffers.items() for d, size in enumerate(new.shape)}
    body = tirx.stmt_functor.ir_transform(local.body, None, _Widener(dims).visit, ["tirx.AttrStmt", "tirx.For"])
    return local.with_body(_on(body, buffers))


def _widened(buffer: tirx.Buffer, old: Sequence, new: Sequence) -> list[tirx.PrimExpr]:
    sizes = zip(buffer.shape, old, new, strict=True)
    return [was if int_or(size, 0) == int_or(narrow, 0) else size for size, was, narrow in sizes]


class _Widener:
    """Undoes what a `_Narrower` did, where it is still over the buffers that it was over.

    `dims`: how long the dims of buffers on chip are again."""

    def __init__(self, dims: Mapping[tuple[tirx.Var, int], int]) -> None:
        self._dims = dims

    def visit(self, node: tirx.Stmt) -> tirx.Stmt | None:
        if getattr(node, "attr_key", None) == MARK:
            return tirx.stmt_functor.ir_transform(node.body, None, self._tile_op(node.node), ["tirx.Evaluate"])
        if not isinstance(node, tirx.For) or MARK not in node.annotations:
            return None
        was, narrow = node.annotations[MARK]
        marks = {key: value for key, value in node.annotations.items() if key != MARK}
        widens = int_or(node.extent, 0) == int_or(narrow, 0) and self._are_long(node, int(was))
        extent = was if widens else node.extent
        return tirx.For(node.loop_var, node.min, extent, node.kind, node.body, node.thread_binding, marks, node.step)

    def _are_long(self, loop: tirx.For, length: int) -> bool:
        """Whether all dims that the loop walks are long enough."""
        walked = [
            self._dims.get((access.buffer.data, dim), int_or(access.buffer.shape[dim], 0))
            for access in nodes(loop.body, tirx.BufferLoad, tirx.BufferStore)
            for dim, index in enumerate(access.indices)
            if loop.loop_var in vars_of([index], {}) and access.buffer.scope() != "global"
        ]
        return all(size >= length for size in walked)

    def _tile_op(self, lengths: Sequence[Sequence[int]]) -> Callable[[tirx.Evaluate], tirx.Stmt | None]:
        def widened(stmt: tirx.Evaluate) -> tirx.Stmt | None:
            record = parse_tile_op(stmt)
            if record is None:
                return None
            regions = (record.dst, *record.sources)
            new = [(int(n), int(dim), int(length)) for n, dim, length in lengths if int(n) < len(regions)]
            for n, dim, length in new:
                buffer = regions[n].buffer
                size = self._dims.get((buffer.data, dim), int_or(buffer.shape[dim], 0))
                if size < length and (buffer.scope() != "global" or not n):
                    return None
            return _with_extents(stmt, new)

        return widened
