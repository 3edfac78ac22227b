"""Reading a kernel: its body flattened to statements, in program order."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.base.recent import made_once
from mesh_tensor.tir import effects, tile_calls, tile_ops
from mesh_tensor.tir.linear import linear_form
from mesh_tensor.tir.nodes import conjuncts, function_name, nodes
from mesh_tensor.tir.prover import Prover
from mesh_tensor.tir.user_reports import assert_call, is_print, printed_buffers
from mesh_tensor.tir.views import left_views

from .statements import (
    OWN_ATTR,
    Access,
    Kernel,
    Loop,
    Statement,
    TileReader,
    body_statements,
    buffer_params,
    split_update,
)
from .supported import check_supported, safe_buffers

_READ = 16  # kernels that several passes ask for


@made_once(_READ)
def read_kernel(func: tirx.PrimFunc) -> Kernel:
    """Flatten `func`, a function with one grid."""
    loops, block, binds = _find_grid(func)
    reader = _Reader(func, block)
    check_supported(func, block)
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
        {str(name): str(op) for name, op in (func.attrs or {}).get(OWN_ATTR, {}).items()},
    )


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
                f"function {function_name(func)!r} is not one TileLang kernel: expected a `with T.Kernel(...)` body, "
                f"found {type(stmt).__name__}. A rule is of one T.Kernel: write one per function."
            )


def _until_left(loop: tirx.For | tirx.While, extent: tirx.PrimExpr) -> tirx.PrimExpr:
    """How far a loop goes: what may leave it is a part of that."""
    for condition in effects.break_conditions(loop):
        extent = tirx.if_then_else(condition, tirx.IntImm(extent.dtype, 0), extent)
    return extent


def _is_thread_index(value: tirx.PrimExpr) -> bool:
    return effects.op_name(value) == "tl.launch_thread_idx"


class _Reader:
    """Walks a kernel's body once and collects statements."""

    def __init__(self, func: tirx.PrimFunc, root: tirx.SBlock):
        self.func, self.root = func, root
        self.analyzer = Prover()
        self.binds: dict[tirx.Var, tirx.PrimExpr] = {}
        self.bound_reads: dict[tirx.Var, tuple[Access, ...]] = {}
        self.loops: list[Loop] = []
        self.conditions: list[tirx.PrimExpr] = []
        self.statements: list[Statement] = []
        self.allocs: list[tirx.Buffer] = []
        self.top = -1
        self.owners = left_views(func)

    def read(self, body: tirx.Stmt) -> list:
        tree: list = []
        for top, stmt in enumerate(body_statements(body)):
            self.top = top
            tree.extend(self._visit(stmt))
        if effects.leaves_kernel(body):
            self._may_be_skipped(self.statements)
        return tree

    def _may_be_skipped(self, statements: Sequence[Statement]) -> None:
        for statement in statements:
            statement.may_be_skipped = True

    def _visit(self, stmt: tirx.Stmt) -> list:
        if isinstance(stmt, tirx.SeqStmt):
            return [node for child in stmt.seq for node in self._visit(child)]
        if effects.is_break(stmt):
            return [self._add(self.statement(stmt))]
        effect = effects.side_effect(stmt) or self._view_in(stmt) or _vector(stmt)
        if effect is not None:
            if isinstance(stmt, tirx.Bind):
                self.binds[stmt.var] = stmt.value
            return [self._add(self._opaque(stmt, effect))]
        if isinstance(stmt, tirx.For):
            return [self._visit_loop(stmt)]
        if isinstance(stmt, tirx.While):
            return [self._visit_while(stmt)]
        if isinstance(stmt, tirx.IfThenElse):
            return [self._visit_if(stmt)]
        if isinstance(stmt, tirx.BufferStore):
            return [self._add(self._store(stmt))]
        if is_print(stmt):
            return [self._add(self.statement(stmt))]
        if isinstance(stmt, tirx.AssertStmt):
            return [self._add(self._read_only(stmt, stmt.condition))]
        if isinstance(stmt, tirx.Bind):
            self.binds[stmt.var] = stmt.value
            self.bound_reads[stmt.var] = self.loads([stmt.value])
            return [self._add(self.statement(stmt, reads=self.bound_reads[stmt.var], values=(stmt.value,)))]
        if isinstance(stmt, tirx.Evaluate):
            return [self._add(self._evaluate(stmt))]
        if isinstance(stmt, tirx.SBlockRealize) and _is_plain(stmt):
            self.allocs.extend(stmt.block.alloc_buffers)
            return self._visit(stmt.block.body)
        if isinstance(stmt, tirx.AttrStmt):
            return self._visit(stmt.body)
        return [self._add(self._opaque(stmt, type(stmt).__name__))]

    def _visit_loop(self, stmt: tirx.For) -> tuple | Statement:
        if stmt.step is not None and not (isinstance(stmt.step, (int, tirx.IntImm)) and int(stmt.step) == 1):
            return self._add(self._opaque(stmt, f"a loop with step {stmt.step}"))
        kind = "serial" if stmt.kind in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED) else "parallel"
        loop = Loop(stmt.loop_var, stmt.min, _until_left(stmt, stmt.extent), kind, stmt)
        return ("loop", loop, self._visit_body(stmt, loop))

    def _visit_while(self, stmt: tirx.While) -> tuple:
        """A loop that nothing counts: before every iteration a statement reads the condition, which is one of what the
        iteration does, too."""
        trips = _until_left(stmt, tirx.Cast("int32", stmt.condition))
        loop = Loop(tirx.Var("while", "int32"), tirx.IntImm("int32", 0), trips, "serial", None)
        self.loops.append(loop)
        test = self._add(self._read_only(tirx.Evaluate(stmt.condition), stmt.condition))
        self.loops.pop()
        self.conditions.append(stmt.condition)
        body = self._visit_body(stmt, loop)
        self.conditions.pop()
        return ("loop", loop, [test, *body])

    def _visit_body(self, stmt: tirx.For | tirx.While, loop: Loop) -> list:
        self.loops.append(loop)
        first = len(self.statements)
        tree = self._visit(stmt.body)
        self.loops.pop()
        if effects.leaves_loop(stmt):
            self._may_be_skipped(self.statements[first:])
        return tree

    def _visit_if(self, stmt: tirx.IfThenElse) -> tuple:
        outer = [*self.conditions]
        self.conditions += conjuncts(stmt.condition)
        then = self._visit(stmt.then_case)
        self.conditions = outer
        otherwise: list = []
        if stmt.else_case is not None:
            self.conditions.append(tirx.Not(stmt.condition))
            otherwise = self._visit(stmt.else_case)
            self.conditions.pop()
        return ("if", then, otherwise)

    def _add(self, statement: Statement) -> Statement:
        self.statements.append(statement)
        return statement

    def statement(self, node: tirx.Stmt, *, write=None, reads=(), values=(), extra=(), **flags) -> Statement:
        bounds = [e for loop in self.loops for e in (loop.min, loop.extent) if not isinstance(e, tirx.IntImm)]
        guards = self.loads([*self.conditions, *bounds])
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

    def _view_in(self, stmt: tirx.Stmt) -> str | None:
        """The view that a statement's own expressions, or what it stores to, go through."""
        if not self.owners or isinstance(stmt, (tirx.SBlockRealize, tirx.AttrStmt)):
            return None
        found = effects.buffers_of(stmt)
        return next((f"{_shape(b)}, a view of {self.owners[b].name}," for b in found if b in self.owners), None)

    def _opaque(self, stmt: tirx.Stmt, what: str) -> Statement:
        """A statement that nothing is known of: it reads and writes every buffer in it, anywhere."""
        pointed = [buffer for buffer in self._buffers() if buffer.data in effects.pointers(stmt)]
        anywhere = tuple(self.access(buffer, [tirx.IntImm("int32", 0)] * len(buffer.shape)) for buffer in pointed)
        written = tuple(self.owners.get(buffer, buffer) for buffer in (*effects.written(stmt), *pointed))
        return self.statement(stmt, reads=(*self.loads([stmt]), *anywhere), unknown=what, may_write=written)

    def _buffers(self) -> list[tirx.Buffer]:
        """The parameters and on-chip buffers that are known so far."""
        return [*self.func.buffer_map.values(), *self.root.alloc_buffers, *self.allocs]

    def access(self, buffer: tirx.Buffer, indices) -> Access:
        if buffer in self.owners:  # somewhere in its owner's memory
            shape = self.owners[buffer].shape
            return Access(self.owners[buffer], tuple(tirx.IntImm("int32", 0) for _ in shape), (None,) * len(shape))
        return Access(buffer, tuple(indices), tuple(linear_form(i, self.binds) for i in indices))

    def loads(self, places) -> tuple[Access, ...]:
        found: list[Access] = []
        for node in (node for place in places for node in nodes(place, tirx.BufferLoad, tirx.Var)):
            if isinstance(node, tirx.BufferLoad):
                found.append(self.access(node.buffer, node.indices))
            elif node in self.binds:
                found.extend(self.bound_reads[node] if node in self.bound_reads else self.loads([self.binds[node]]))
        return tuple(found)

    def _store(self, stmt: tirx.BufferStore) -> Statement:
        write = self.access(stmt.buffer, stmt.indices)
        op, value = split_update(stmt)
        return self.statement(
            stmt, write=write, reads=(*self.loads([value]), *self.loads(stmt.indices)), values=(value,), op=op
        )

    def _read_only(self, stmt: tirx.Stmt, condition: tirx.PrimExpr) -> Statement:
        return self.statement(stmt, reads=self.loads([condition]), values=(condition,))

    def _evaluate(self, stmt: tirx.Evaluate) -> Statement:
        if effects.changes_nothing(stmt):
            return self.statement(stmt)
        asserted = assert_call(stmt)
        if asserted is not None:
            return self._read_only(stmt, asserted.args[0])
        record = tile_calls.parse_tile_op(stmt)
        if record is None:
            if not nodes(stmt.value, tirx.Call):
                return self.statement(stmt, values=(stmt.value,))
            return self._opaque(stmt, _call_name(stmt.value))
        try:
            return TileReader(self, stmt).read(record)
        except tile_ops.Unmatched as error:
            return self._opaque(stmt, str(error))


def known_uses(kernel: Kernel, buffer: tirx.Buffer) -> list[tuple[Statement, Access]]:
    """All accesses of a parameter; none if something is not understood that may use it, or more than its elements are
    seen."""
    if buffer in safe_buffers(kernel.params.values(), kernel.root):
        return []
    found: list[tuple[Statement, Access]] = []
    for statement in kernel.statements:
        mine = [(statement, access) for access in statement.accesses if access.buffer.same_as(buffer)]
        if statement.unknown and (mine or statement.writes(buffer)):
            return []
        if is_print(statement.node) and buffer in printed_buffers(statement.node):
            return []
        found += mine
    return found


def _vector(stmt: tirx.Stmt) -> str | None:
    """What an access of several elements at once is called; None without one."""
    is_vector = isinstance(stmt, (tirx.BufferStore, tirx.Bind)) and nodes(stmt, tirx.Ramp, tirx.Broadcast)
    return "an access of a vector" if is_vector else None


def _shape(buffer: tirx.Buffer) -> str:
    return f"{buffer.name or 'a buffer'} ({', '.join(str(size) for size in buffer.shape)}) {buffer.dtype}"


def _call_name(expr: tirx.PrimExpr) -> str:
    return next((name for call in [expr, *nodes(expr, tirx.Call)] if (name := effects.op_name(call))), "call")


def _is_plain(stmt: tirx.SBlockRealize) -> bool:
    """A block that only groups statements: no variables of its own, no condition, no initialisation."""
    block = stmt.block
    always = isinstance(stmt.predicate, tirx.IntImm) and bool(stmt.predicate.value)
    return always and not len(block.iter_vars) and not len(block.match_buffers) and block.init is None
