"""A kernel as a flat list of statements: what is read and written, at which index, inside which loops.

Tile operations become statements of the same kind as stores: their element loops get variables of their own (loops of
kind "tile"). Everything that follows - live ranges, factors, reductions - looks at statements and not at TIR.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tvm import arith, ir, tirx

from ..errors import MeshTensorError
from . import effects, tile_ops
from .linear import Linear, linear_form, vars_of

#: T.reduce's operations that do not start like the operation they combine with.
COMBINER = {"abssum": "sum", "absmax": "max"}


@dataclass(eq=False)
class Loop:
    """One loop variable. `kind` is grid, serial (unrolled too), parallel (T.Parallel, vectorized) or tile (an element
    loop of a tile operation). `node` is the TIR loop, None for tile loops."""

    var: tirx.Var
    min: tirx.PrimExpr
    extent: tirx.PrimExpr
    kind: str
    node: tirx.For | None


@dataclass(eq=False)
class Access:
    """`buffer[indices]`; `forms` are the indices as linear forms (None where an index is none)."""

    buffer: tirx.Buffer
    indices: tuple[tirx.PrimExpr, ...]
    forms: tuple[Linear | None, ...]


@dataclass(eq=False)
class Statement:
    """`write = value` (`op` None) or `write = write op value`, for every value of the loops' variables.

    `fresh` marks an update that first sets what it writes to the operation's neutral element. `values` are the
    expressions in which a loop variable would be a value and not an index; `conditions` guard the statement, outermost
    first. `top` counts the statements of the kernel's body, the outermost level at which a kernel can be cut.
    `unknown` says why the statement is not understood; it then has no `write`, but `may_write` has the buffers that it
    may store to."""

    node: tirx.Stmt
    loops: tuple[Loop, ...]
    conditions: tuple[tirx.PrimExpr, ...]
    top: int
    write: Access | None
    reads: tuple[Access, ...]
    values: tuple[tirx.PrimExpr, ...]
    op: str | None = None
    fresh: bool = False
    tile_op: tile_ops.TileOp | None = None
    unknown: str | None = None
    may_write: tuple[tirx.Buffer, ...] = ()

    def writes(self, buffer: tirx.Buffer) -> bool:
        """Whether the statement stores to the buffer, or may if it is not understood."""
        written = self.may_write if self.write is None else (self.write.buffer,)
        return any(buffer.same_as(other) for other in written)

    @property
    def target(self) -> Access:
        """What a statement that is known to write writes."""
        assert self.write is not None
        return self.write

    @property
    def operation(self) -> str:
        """The operation of a statement that is known to combine."""
        assert self.op is not None
        return self.op

    @property
    def accesses(self) -> tuple[Access, ...]:
        return self.reads if self.write is None else (self.write, *self.reads)

    @property
    def vars(self) -> set[tirx.Var]:
        return {loop.var for loop in self.loops}


@dataclass(eq=False)
class Kernel:
    """One grid of a function: its parameters, on-chip buffers, statements, and the nesting they came from.

    `tree` mirrors the body for passes that need program order: a list of Statement | ("loop", Loop, tree) |
    ("if", tree, tree)."""

    func: tirx.PrimFunc
    params: dict[str, tirx.Buffer]
    on_chip: tuple[tirx.Buffer, ...]
    grid: tuple[Loop, ...]
    root: tirx.SBlock
    statements: list[Statement]
    tree: list
    binds: dict[tirx.Var, tirx.PrimExpr]
    loops: dict[tirx.Var, Loop] = field(default_factory=dict)
    analyzer: arith.Analyzer = field(default_factory=arith.Analyzer)

    def is_param(self, buffer: tirx.Buffer) -> bool:
        return any(buffer.same_as(param) for param in self.params.values())


def buffer_params(func: tirx.PrimFunc) -> dict[str, tirx.Buffer]:
    """The function's buffer parameters by name, in order."""
    return {func.buffer_map[p].name: func.buffer_map[p] for p in func.params if p in func.buffer_map}


def read_kernel(func: tirx.PrimFunc) -> Kernel:
    """Flatten `func`, a function with one grid."""
    reader = _Reader(func)
    loops, block, binds = _find_grid(func)
    reader.binds.update(binds)
    reader.loops = list(loops)
    tree = reader.read(block.body)
    params = buffer_params(func)
    return Kernel(
        func,
        params,
        (*block.alloc_buffers, *reader.allocs),
        loops,
        block,
        reader.statements,
        tree,
        reader.binds,
        {loop.var: loop for statement in reader.statements for loop in statement.loops} | {x.var: x for x in loops},
        reader.analyzer,
    )


def body_statements(stmt: tirx.Stmt) -> list[tirx.Stmt]:
    """The statements of a sequence, nested sequences flattened."""
    if isinstance(stmt, tirx.SeqStmt):
        return [inner for child in stmt.seq for inner in body_statements(child)]
    return [stmt]


def _find_grid(func: tirx.PrimFunc) -> tuple[tuple[Loop, ...], tirx.SBlock, dict]:
    """The grid's loops, the block that holds the kernel's body, and what is bound above it."""
    stmt = func.body
    loops: list[Loop] = []
    binds: dict[tirx.Var, tirx.PrimExpr] = {}
    while True:
        if isinstance(stmt, tirx.SBlockRealize):
            if stmt.block.name_hint != "root":
                return tuple(loops), stmt.block, binds
            stmt = stmt.block.body
        elif isinstance(stmt, tirx.For):
            loops.append(Loop(stmt.loop_var, stmt.min, stmt.extent, "grid", stmt))
            stmt = stmt.body
        elif isinstance(stmt, tirx.SeqStmt) and all(isinstance(s, tirx.Bind) for s in stmt.seq[:-1]):
            binds.update({s.var: s.value for s in stmt.seq[:-1] if not _is_thread_index(s.value)})
            stmt = stmt.seq[-1]
        else:
            raise MeshTensorError(
                f"function {_name(func)!r} is not one TileLang kernel: expected a `with T.Kernel(...)` body, found "
                f"{type(stmt).__name__}. Write one T.Kernel per function."
            )


def _is_thread_index(value: tirx.PrimExpr) -> bool:
    return isinstance(value, tirx.Call) and isinstance(value.op, ir.Op) and value.op.name == "tl.launch_thread_idx"


def _name(func: tirx.PrimFunc) -> str:
    return str(func.attrs["global_symbol"]) if func.attrs and "global_symbol" in func.attrs else "main"


class _Reader:
    """Walks a kernel's body once and collects statements."""

    def __init__(self, func: tirx.PrimFunc):
        self.func = func
        self.analyzer = arith.Analyzer()
        self.binds: dict[tirx.Var, tirx.PrimExpr] = {}
        self.bound_reads: dict[tirx.Var, tuple[Access, ...]] = {}
        self.loops: list[Loop] = []
        self.conditions: list[tirx.PrimExpr] = []
        self.statements: list[Statement] = []
        self.allocs: list[tirx.Buffer] = []
        self.top = -1

    def read(self, body: tirx.Stmt) -> list:
        tree: list = []
        for top, stmt in enumerate(body_statements(body)):
            self.top = top
            tree.extend(self._visit(stmt))
        return tree

    def _visit(self, stmt: tirx.Stmt) -> list:
        if isinstance(stmt, tirx.SeqStmt):
            return [node for child in stmt.seq for node in self._visit(child)]
        effect = effects.side_effect(stmt)
        if effect is not None:
            if isinstance(stmt, tirx.Bind):
                self.binds[stmt.var] = stmt.value
            return [self._add(self._opaque(stmt, effect))]
        if isinstance(stmt, tirx.For):
            return [self._visit_loop(stmt)]
        if isinstance(stmt, tirx.IfThenElse):
            return [self._visit_if(stmt)]
        if isinstance(stmt, tirx.BufferStore):
            return [self._add(self._store(stmt))]
        if isinstance(stmt, tirx.Bind):
            self.binds[stmt.var] = stmt.value
            self.bound_reads[stmt.var] = self._loads([stmt.value])
            return [self._add(self._statement(stmt, reads=self.bound_reads[stmt.var], values=(stmt.value,)))]
        if isinstance(stmt, tirx.Evaluate):
            return [self._add(self._evaluate(stmt))]
        if isinstance(stmt, tirx.SBlockRealize) and _is_plain(stmt):
            self.allocs.extend(stmt.block.alloc_buffers)
            return self._visit(stmt.block.body)
        if isinstance(stmt, tirx.AttrStmt):
            return self._visit(stmt.body)
        return [self._add(self._opaque(stmt, type(stmt).__name__))]

    def _visit_loop(self, stmt: tirx.For) -> tuple | Statement:
        if stmt.step is not None and not _is_const(stmt.step, 1):
            return self._add(self._opaque(stmt, f"a loop with step {stmt.step}"))
        kind = "serial" if stmt.kind in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED) else "parallel"
        loop = Loop(stmt.loop_var, stmt.min, stmt.extent, kind, stmt)
        self.loops.append(loop)
        tree = self._visit(stmt.body)
        self.loops.pop()
        return ("loop", loop, tree)

    def _visit_if(self, stmt: tirx.IfThenElse) -> tuple:
        self.conditions.append(stmt.condition)
        then = self._visit(stmt.then_case)
        self.conditions.pop()
        otherwise: list = []
        if stmt.else_case is not None:
            self.conditions.append(tirx.Not(stmt.condition))
            otherwise = self._visit(stmt.else_case)
            self.conditions.pop()
        return ("if", then, otherwise)

    def _add(self, statement: Statement) -> Statement:
        self.statements.append(statement)
        return statement

    def _statement(self, node: tirx.Stmt, *, write=None, reads=(), values=(), extra=(), **flags) -> Statement:
        bounds = [e for loop in self.loops for e in (loop.min, loop.extent) if not isinstance(e, tirx.IntImm)]
        guards = self._loads([*self.conditions, *bounds])
        return Statement(
            node,
            (*self.loops, *extra),
            tuple(self.conditions),
            self.top,
            write,
            (*reads, *guards),
            (*values, *self.conditions),
            **flags,
        )

    def _opaque(self, stmt: tirx.Stmt, what: str) -> Statement:
        """A statement that nothing is known of: it reads and writes every buffer in it, anywhere."""
        return self._statement(stmt, reads=self._loads([stmt]), unknown=what, may_write=effects.written(stmt))

    def _access(self, buffer: tirx.Buffer, indices) -> Access:
        return Access(buffer, tuple(indices), tuple(linear_form(i, self.binds) for i in indices))

    def _loads(self, nodes) -> tuple[Access, ...]:
        found: list[Access] = []

        def visit(node: object) -> None:
            if isinstance(node, tirx.BufferLoad):
                found.append(self._access(node.buffer, node.indices))
            elif isinstance(node, tirx.Var) and node in self.binds:
                found.extend(self.bound_reads[node] if node in self.bound_reads else self._loads([self.binds[node]]))

        for node in nodes:
            if not isinstance(node, int):
                tirx.stmt_functor.post_order_visit(node, visit)
        return tuple(found)

    def _store(self, stmt: tirx.BufferStore) -> Statement:
        write = self._access(stmt.buffer, stmt.indices)
        op, value = split_update(stmt)
        return self._statement(
            stmt, write=write, reads=(*self._loads([value]), *self._loads(stmt.indices)), values=(value,), op=op
        )

    def _evaluate(self, stmt: tirx.Evaluate) -> Statement:
        record = tile_ops.parse_tile_op(stmt)
        if record is None:
            if not any(True for _ in _calls(stmt.value)):
                return self._statement(stmt, values=(stmt.value,))
            return self._opaque(stmt, _call_name(stmt.value))
        try:
            return _TileReader(self, stmt).read(record)
        except _Unmatched as error:
            return self._opaque(stmt, str(error))


class _Unmatched(Exception):
    """A tile operation whose regions do not pair up."""


class _TileReader:
    """Turns one tile operation into one statement."""

    def __init__(self, reader: _Reader, stmt: tirx.Evaluate):
        self.reader, self.stmt = reader, stmt
        self.loops: list[Loop] = []

    def read(self, record: tile_ops.TileOp) -> Statement:
        makers: dict[type, Callable[[Any], Statement]] = {
            tile_ops.Copy: self._copy,
            tile_ops.Fill: self._fill,
            tile_ops.Gemm: self._gemm,
            tile_ops.Reduce: self._reduce,
            tile_ops.Atomic: self._atomic,
            tile_ops.Transpose: self._transpose,
        }
        if type(record) not in makers:
            raise _Unmatched(f"T.{type(record).__name__.lower()}")
        return makers[type(record)](record)

    def _loop(self, extent) -> tirx.Var:
        var = tirx.Var(f"t{len(self.loops)}", "int32")
        self.loops.append(Loop(var, tirx.IntImm("int32", 0), extent, "tile", None))
        return var

    def _at(self, region: tile_ops.Region, element: dict[int, tirx.Var]) -> Access:
        indices = [low + element[d] if d in element else low for d, low in enumerate(region.mins)]
        return self.reader._access(region.buffer, indices)

    def _pair(self, a: tile_ops.Region, b: tile_ops.Region) -> tuple[Access, Access]:
        if len(a.long_dims) != len(b.long_dims):
            raise _Unmatched(f"{a.buffer.name} and {b.buffer.name} have regions of different rank")
        at_a, at_b = {}, {}
        for da, db in zip(a.long_dims, b.long_dims, strict=True):
            self._check_equal(a, da, b, db)
            at_a[da] = at_b[db] = self._loop(a.extents[da])
        return self._at(a, at_a), self._at(b, at_b)

    def _check_equal(self, a: tile_ops.Region, da: int, b: tile_ops.Region, db: int) -> None:
        if not self.reader.analyzer.can_prove_equal(a.extents[da], b.extents[db]):
            raise _Unmatched(
                f"{a.buffer.name} dim {da} ({a.extents[da]}) and {b.buffer.name} dim {db} ({b.extents[db]}) differ"
            )

    def _make(self, record, write: Access, reads=(), values=(), **flags) -> Statement:
        mins = [i for access in (write, *reads) for i in access.indices]
        indirect = self.reader._loads(mins)
        return self.reader._statement(
            self.stmt,
            write=write,
            reads=(*reads, *indirect),
            values=tuple(values),
            extra=self.loops,
            tile_op=record,
            **flags,
        )

    def _copy(self, record: tile_ops.Copy) -> Statement:
        src, dst = self._pair(record.src, record.dst)
        return self._make(record, dst, (src,))

    def _transpose(self, record: tile_ops.Transpose) -> Statement:
        flipped = _flip_last_two(record.src)
        src, dst = self._pair(flipped, record.dst)
        src = self.reader._access(record.src.buffer, [*src.indices[:-2], src.indices[-1], src.indices[-2]])
        return self._make(record, dst, (src,))

    def _fill(self, record: tile_ops.Fill) -> Statement:
        dst = self._at(record.dst, {d: self._loop(record.dst.extents[d]) for d in record.dst.long_dims})
        return self._make(record, dst, self.reader._loads([record.value]), (record.value,))

    def _atomic(self, record: tile_ops.Atomic) -> Statement:
        if isinstance(record.value, tile_ops.Region):
            src, dst = self._pair(record.value, record.dst)
            return self._make(record, dst, (src,), op=record.op)
        dst = self._at(record.dst, {d: self._loop(record.dst.extents[d]) for d in record.dst.long_dims})
        return self._make(record, dst, self.reader._loads([record.value]), (record.value,), op=record.op)

    def _gemm(self, record: tile_ops.Gemm) -> Statement:
        a, b, c = record.a, record.b, record.c
        m, n = len(c.extents) - 2, len(c.extents) - 1
        am, ak = (-1, -2) if record.trans_a else (-2, -1)
        bk, bn = (-1, -2) if record.trans_b else (-2, -1)
        i, j, k = self._loop(c.extents[m]), self._loop(c.extents[n]), self._loop(a.extents[ak])
        la, lb = len(a.extents), len(b.extents)
        reads = (self._at(a, {la + am: i, la + ak: k}), self._at(b, {lb + bk: k, lb + bn: j}))
        return self._make(record, self._at(c, {m: i, n: j}), reads, op="sum", fresh=record.clear)

    def _reduce(self, record: tile_ops.Reduce) -> Statement:
        src, dst = record.src, record.dst
        element = {d: self._loop(extent) for d, extent in enumerate(src.extents)}
        kept = [d for d in range(len(src.extents)) if d != record.dim]
        if len(dst.extents) == len(src.extents):
            at_dst = {d: element[d] for d in kept}
        elif len(dst.extents) == len(kept):
            at_dst = {position: element[d] for position, d in enumerate(kept)}
        elif not kept or all(_is_const(src.extents[d], 1) for d in kept):
            at_dst = {}
        else:
            raise _Unmatched(f"T.reduce of {src.buffer.name} into {dst.buffer.name}")
        op = COMBINER.get(record.op, record.op)
        return self._make(record, self._at(dst, at_dst), (self._at(src, element),), op=op, fresh=record.clear)


def split_update(stmt: tirx.BufferStore) -> tuple[str | None, tirx.PrimExpr]:
    """`b[i] = b[i] op e` as (op, e); any other store as (None, its value)."""
    value = stmt.value
    ops = {tirx.Add: "sum", tirx.Sub: "sum", tirx.Mul: "prod", tirx.Max: "max", tirx.Min: "min"}
    calls = {"tirx.bitwise_and": "bitand", "tirx.bitwise_or": "bitor", "tirx.bitwise_xor": "bitxor"}
    op = ops.get(type(value))
    if op is not None:
        a, b = value.a, value.b
    elif isinstance(value, tirx.Call) and isinstance(value.op, ir.Op) and value.op.name in calls:
        op, (a, b) = calls[value.op.name], value.args
    else:
        return None, value
    if _is_load_of(a, stmt) and not _reads(b, stmt.buffer):
        return op, b
    if _is_load_of(b, stmt) and not _reads(a, stmt.buffer) and not isinstance(value, tirx.Sub):
        return op, a
    return None, value


def _is_load_of(expr: tirx.PrimExpr, store: tirx.BufferStore) -> bool:
    return (
        isinstance(expr, tirx.BufferLoad)
        and expr.buffer.same_as(store.buffer)
        and all(ir.structural_equal(a, b) for a, b in zip(expr.indices, store.indices, strict=True))
    )


def _reads(expr: tirx.PrimExpr, buffer: tirx.Buffer) -> bool:
    found = []
    tirx.stmt_functor.post_order_visit(
        expr,
        lambda node: found.append(1) if isinstance(node, tirx.BufferLoad) and node.buffer.same_as(buffer) else None,
    )
    return bool(found)


def _calls(expr: tirx.PrimExpr) -> Iterator[tirx.Call]:
    found: list[tirx.Call] = []
    tirx.stmt_functor.post_order_visit(expr, lambda n: found.append(n) if isinstance(n, tirx.Call) else None)
    return iter(found)


def _call_name(expr: tirx.PrimExpr) -> str:
    return next(
        (c.op.name for c in [expr, *_calls(expr)] if isinstance(c, tirx.Call) and isinstance(c.op, ir.Op)), "call"
    )


def _flip_last_two(region: tile_ops.Region) -> tile_ops.Region:
    def flip(items: tuple) -> tuple:
        return (*items[:-2], items[-1], items[-2])

    return tile_ops.Region(region.buffer, flip(region.mins), flip(region.extents))


def _is_plain(stmt: tirx.SBlockRealize) -> bool:
    """A block that only groups statements: no variables of its own, no condition, no initialisation."""
    block = stmt.block
    always = isinstance(stmt.predicate, tirx.IntImm) and bool(stmt.predicate.value)
    return always and not len(block.iter_vars) and not len(block.match_buffers) and block.init is None


def _is_const(expr: object, value: int) -> bool:
    return isinstance(expr, (int, tirx.IntImm)) and int(expr) == value


def used_vars(statement: Statement, kernel: Kernel) -> set[tirx.Var]:
    """Every loop variable that the statement's values, conditions, loop bounds or indices mention."""
    bounds = [e for loop in statement.loops for e in (loop.min, loop.extent) if not isinstance(e, tirx.IntImm)]
    indices = [i for access in statement.accesses for i in access.indices]
    return vars_of([*statement.values, *bounds, *indices], kernel.binds)
