"""Blocks on chip of which only the first rows count: 64 rows for 4 heads, as matrix instructions want them.

What lies behind those rows is computed and dropped. For analysis and rewriting it isn't there: such dims are as long as
what counts, and so are the loops and regions over them, so that blocks follow each other in their dim without overlap;
`widen` gives them their lengths back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

from tvm import tirx

from mesh_tensor.tir.linear import Linear, vars_of
from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.rewrite import block_like, region_call, with_args
from mesh_tensor.tir.tile_ops import Gemm, TileOp, parse_tile_op

from .other_dims import reshaped
from .reader import read_kernel
from .statements import Access, Kernel, Loop, Statement

#: On a function: from a buffer's data to how long its dims were, and are. On a loop: how far it went, and goes. Around
#: a tile operation: how long its regions were, as (which of them, the destination first; dim; length).
MARK = "mesh_tensor.padded"
_GEMM_SIZES = slice(5, 8)

#: A buffer on chip and one of its dims; or a loop's variable.
_Node: TypeAlias = Any  # tuple[tirx.Buffer, int] | tirx.Var


def narrow(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel without the rows of blocks on chip that nothing depends on."""
    kernel = read_kernel(func)
    rows = _Rows(kernel)
    counts = rows.counts()
    if not counts:
        return func
    buffers = {buffer: _narrowed(buffer, counts) for buffer in kernel.on_chip}
    buffers = {buffer: new for buffer, new in buffers.items() if new is not buffer}
    body = _Narrower(kernel, counts, rows.used, buffers).visit(func.body)
    lengths = {old.data: [list(old.shape), list(new.shape)] for old, new in buffers.items()}
    return func.with_body(body).with_attr(MARK, lengths)


def _narrowed(buffer: tirx.Buffer, counts: Mapping[_Node, int]) -> tirx.Buffer:
    dims = range(len(buffer.shape))
    if not any((buffer, dim) in counts for dim in dims):
        return buffer
    return reshaped(buffer, [counts.get((buffer, dim), buffer.shape[dim]) for dim in dims])


class _Rows:
    """How many of their first rows count of the dims of buffers on chip.

    Dims that are indexed by one loop's variable, in statements of which each iteration writes a row of its own, have as
    many rows that count: as many as are used otherwise."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._on_chip = {buffer: [_length(size) for size in buffer.shape] for buffer in kernel.on_chip}
        self._with: dict[_Node, _Node] = {}
        self._needed: dict[_Node, int] = {}
        self._loops: dict[tirx.Var, int] = {}
        self.used: set[tirx.Var] = set()

    def counts(self) -> dict[_Node, int]:
        """Per dim or loop that is longer than what counts of it, how much that is."""
        if not any(length > 1 for lengths in self._on_chip.values() for length in lengths):
            return {}
        for statement in self._kernel.statements:
            self._read(statement)
        found: dict[_Node, int] = {}
        lengths: dict[_Node, int] = {(b, d): n for b, sizes in self._on_chip.items() for d, n in enumerate(sizes)}
        for node, length in {**lengths, **self._loops}.items():
            needed = self._needed.get(self._root(node), 0)
            if 0 < needed < length:
                found[node] = needed
        return found

    def _root(self, node: _Node) -> _Node:
        while node in self._with:
            node = self._with[node]
        return node

    def _join(self, node: _Node, other: _Node) -> None:
        a, b = self._root(node), self._root(other)
        if a != b:
            self._with[b] = a
            self._need(a, self._needed.pop(b, 0))

    def _need(self, node: _Node, rows: int) -> None:
        root = self._root(node)
        self._needed[root] = max(self._needed.get(root, 0), rows)

    def _need_all(self, access: Access, dims: Iterable[int]) -> None:
        for dim in dims if access.buffer in self._on_chip else ():
            self._need((access.buffer, dim), self._on_chip[access.buffer][dim])

    def _read(self, statement: Statement) -> None:
        if statement.unknown:
            for access in statement.accesses:
                self._need_all(access, range(len(access.indices)))
            for buffer in statement.may_write:
                for dim, length in enumerate(self._on_chip.get(buffer, ())):
                    self._need((buffer, dim), length)
        rows = {loop.var: _length(loop.extent) for loop in statement.loops if _is_plain(loop)}
        self._loops |= {var: length for var, length in rows.items() if length}
        for access in statement.accesses:
            self._indices(access, rows, is_write=access is statement.write)
        for var, length in rows.items():
            if not self._writes_rows(statement, var):
                self.used.add(var)
                self._need(var, _below(statement.conditions, var, length))

    def _indices(self, access: Access, rows: Mapping[tirx.Var, int], *, is_write: bool) -> None:
        """The access's dims on chip have the rows of the loop that walks them, or are needed as far as it goes."""
        for dim, form in enumerate(access.forms) if access.buffer in self._on_chip else ():
            var = _only(form)
            if var is not None and rows.get(var):
                self._join(var, (access.buffer, dim))
            elif form is not None and not form.terms and form.const >= 0:
                self._need((access.buffer, dim), form.const + 1)
            else:
                self._need_all(access, [dim])
                for used in vars_of([access.indices[dim]], self._kernel.binds) if is_write else ():
                    if used in rows:
                        self._need(used, rows[used])

    def _writes_rows(self, statement: Statement, var: tirx.Var) -> bool:
        """Whether each iteration writes a row of its own on chip, of what is in that row elsewhere, or of what a tile
        operation reads elsewhere: outside a parameter it reads 0."""
        write = statement.write
        if write is None or write.buffer not in self._on_chip or statement.unknown:
            return False
        dims = [d for d, i in enumerate(write.indices) if var in vars_of([i], self._kernel.binds)]
        if len(dims) != 1 or _only(write.forms[dims[0]]) != var:
            return False
        return statement.tile_op is not None or not any(
            var in vars_of(access.indices, self._kernel.binds)
            for access in statement.reads
            if access.buffer not in self._on_chip
        )


def _only(form: Linear | None) -> tirx.Var | None:
    """The variable that an index is."""
    if form is None or form.const or list(form.terms.values()) != [1]:
        return None
    return next(iter(form.terms))


def _is_plain(loop: Loop) -> bool:
    return loop.kind in ("tile", "parallel") and isinstance(loop.min, tirx.IntImm) and int(loop.min) == 0


def _length(size: object) -> int:
    """A constant length; 0 for others, which stay as they are."""
    return int(size) if isinstance(size, (int, tirx.IntImm)) else 0


def _below(conditions: Sequence[tirx.PrimExpr], var: tirx.Var, length: int) -> int:
    """How far the variable goes where the conditions hold."""
    for condition in _parts(conditions):
        if isinstance(condition, tirx.LT) and var.same_as(condition.a) and isinstance(condition.b, tirx.IntImm):
            length = min(length, max(int(condition.b), 0))
    return length


def _parts(conditions: Iterable[tirx.PrimExpr]) -> Iterator[tirx.PrimExpr]:
    for condition in conditions:
        if isinstance(condition, tirx.And):
            yield from _parts((condition.a, condition.b))
        else:
            yield condition


class _Narrower:
    """Makes dims, and what goes over them, as long as what counts."""

    def __init__(
        self,
        kernel: Kernel,
        counts: Mapping[_Node, int],
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

    def exchange(node: tirx.BufferLoad | tirx.BufferStore | tirx.SBlock) -> object:
        if isinstance(node, tirx.SBlock):
            allocs = [buffers.get(buffer, buffer) for buffer in node.alloc_buffers]
            return block_like(node, node.body, allocs)
        if node.buffer not in buffers:
            return None
        if isinstance(node, tirx.BufferLoad):
            return tirx.BufferLoad(buffers[node.buffer], node.indices)
        return tirx.BufferStore(buffers[node.buffer], node.value, node.indices)

    kinds = ["tirx.BufferLoad", "tirx.BufferStore", "tirx.SBlock"]
    return tirx.stmt_functor.ir_transform(body, None, exchange, kinds)


def widen(local: tirx.PrimFunc, source: tirx.PrimFunc) -> tirx.PrimFunc:
    """The local kernel, made of what `narrow` gave, in which the dims on chip are as long as they were, and so is what
    goes over them. Dims that hold the tiles of a dim that is split stay."""
    lengths = (source.attrs or {}).get(MARK)
    if lengths is None:
        return local
    allocated = [buffer for block in nodes(local.body, tirx.SBlock) for buffer in block.alloc_buffers]
    buffers = {b: reshaped(b, _widened(b, *lengths[b.data])) for b in allocated if b.data in lengths}
    dims = {(b.data, d): _length(size) for b, new in buffers.items() for d, size in enumerate(new.shape)}
    body = tirx.stmt_functor.ir_transform(local.body, None, _Widener(dims).visit, ["tirx.AttrStmt", "tirx.For"])
    return local.with_body(_on(body, buffers))


def _widened(buffer: tirx.Buffer, old: Sequence, new: Sequence) -> list[tirx.PrimExpr]:
    sizes = zip(buffer.shape, old, new, strict=True)
    return [was if _length(size) == _length(narrow) else size for size, was, narrow in sizes]


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
        widens = _length(node.extent) == _length(narrow) and self._are_long(node, int(was))
        extent = was if widens else node.extent
        return tirx.For(node.loop_var, node.min, extent, node.kind, node.body, node.thread_binding, marks, node.step)

    def _are_long(self, loop: tirx.For, length: int) -> bool:
        """Whether all dims that the loop walks are long enough."""
        walked = [
            self._dims.get((access.buffer.data, dim), _length(access.buffer.shape[dim]))
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
                size = self._dims.get((buffer.data, dim), _length(buffer.shape[dim]))
                if size < length and (buffer.scope() != "global" or not n):
                    return None
            return _with_extents(stmt, new)

        return widened
