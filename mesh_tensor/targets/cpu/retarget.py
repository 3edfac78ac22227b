"""Re-target a GPU-style TileLang kernel for a CPU.

The result holds nothing but serial loops, allocations, loads, stores and expressions: tile operations are expanded (a
`T.gemm` becomes a call into the CPU runtime's header), grid and parallel loops become serial, pipelining and thread
annotations go; scopes of buffers are left as they are and mean nothing. Every access to memory is inside its buffer:
where that can't be proved, loads read 0 and stores are dropped. A program (one block of the grid) runs as one thread:
barriers mean nothing, and whatever asks which thread it is is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

from tvm import tirx

from mesh_tensor.base.errors import refuse
from mesh_tensor.tir.effects import FIX, FROM, changes_nothing, chosen, op_name, refuse_thread_groups
from mesh_tensor.tir.grids import without_grid_barriers
from mesh_tensor.tir.nodes import function_name, is_const, loads, nodes
from mesh_tensor.tir.reducers import parts_of
from mesh_tensor.tir.regions import Region
from mesh_tensor.tir.rewrite import sequence
from mesh_tensor.tir.tile_calls import parse_tile_op
from mesh_tensor.tir.tile_ops import TileOp
from mesh_tensor.tir.user_reports import assert_call, is_print, print_call, without_thread_tests

from .contract import contract_blocks, group_rows
from .exprs import Bounds, all_of, const, if_then, is_pure_index, map_children, report_statements
from .fuse import fuse_loops
from .interchange import rows_outermost
from .lanes import step_by_lanes
from .products import lean_products
from .tile_ops import TileOps, update_before_use
from .uncopied import without_copies

_IN_LOOP = {name: name for name in ("tirx.break_loop", "tirx.continue_loop")} | {"tl.loop_break": "tirx.break_loop"}


def retarget_for_cpu(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same kernel for TileLang's CPU back end, or a MeshTensorError that names what can't run on one."""
    return _Retarget(without_grid_barriers(func)).run()


class _Retarget:
    def __init__(self, func: tirx.PrimFunc) -> None:
        self._func = func
        self._kernel = function_name(func)
        self._params = frozenset(buffer.data for buffer in func.buffer_map.values())
        self._bounds = Bounds()
        self._safe_values: dict[tirx.Var, tirx.PrimExpr] = {}
        self._tile_ops = TileOps(self._bounds, self._safe_values, self._kernel)
        self._thread_vars: set[tirx.Var] = set()
        self._in_scope: set[tirx.Var] = set()
        self._inlined: dict[tirx.Var, tirx.PrimExpr] = {}
        self._table: dict[type, Callable[..., tirx.Stmt | None]] = {
            tirx.SBlockRealize: self._block,
            tirx.SeqStmt: self._sequence,
            tirx.For: self._for,
            tirx.While: self._while,
            tirx.IfThenElse: self._if,
            tirx.Bind: self._bind,
            tirx.BufferStore: self._store,
            tirx.Evaluate: self._evaluate,
            tirx.AttrStmt: self._attr,
            tirx.AllocBuffer: lambda alloc: self._alloc(alloc.buffer),
            tirx.DeclBuffer: lambda _: None,
        }

    def run(self) -> tirx.PrimFunc:
        refuse_thread_groups(self._func, "c")
        func = update_before_use(self._func)
        self._in_scope.update(func.params)
        for buffer in func.buffer_map.values():
            self._in_scope.add(buffer.data)
            for size in [*buffer.shape, *buffer.strides]:
                self._in_scope.update(tirx.analysis.undefined_vars(size))
                if isinstance(size, tirx.Var):
                    self._bounds.not_negative(size)
        body = self._stmt(func.body) or tirx.Evaluate(const(0, "int32"))
        params = self._params
        body = group_rows(lean_products(body, params), params)
        body = without_copies(contract_blocks(fuse_loops(body, params), params), params)
        body = step_by_lanes(rows_outermost(body, params), params)
        attrs = {"global_symbol": self._kernel}
        return tirx.PrimFunc(func.params, body, func.ret_type, func.buffer_map, None).with_attr(attrs)

    def _refuse(self, what: str, why: str, fix: str) -> NoReturn:
        refuse(what, where=f"kernel '{self._kernel}', target 'c'", why=why, fix=fix)

    def _stmt(self, stmt: tirx.Stmt) -> tirx.Stmt | None:
        visit = self._table.get(type(stmt))
        if visit is None:
            return self._refuse(
                f"the statement {type(stmt).__name__} can't run on a CPU",
                "the re-targeting pass doesn't know it",
                'write it with loops, T.copy and stores, or use target="cuda"',
            )
        return visit(stmt)

    def _block(self, realize: tirx.SBlockRealize) -> tirx.Stmt | None:
        block = realize.block
        if "safe_value_map" in block.annotations:
            for data, value in block.annotations["safe_value_map"].items():
                is_number = isinstance(value, int | float)
                self._safe_values[data] = const(value, "float32") if is_number else self._expr(value)
        allocations = [self._alloc(buffer) for buffer in block.alloc_buffers]
        body = self._stmt(block.body)
        if body is None:
            return None
        body = sequence([*allocations, body])
        return if_then(None if is_const(realize.predicate, 1) else self._expr(realize.predicate), body)

    def _attr(self, attr: tirx.AttrStmt) -> tirx.Stmt | None:
        return self._stmt(without_thread_tests(attr.body, self._thread_vars) if is_print(attr) else attr.body)

    def _alloc(self, buffer: tirx.Buffer) -> tirx.Stmt:
        self._in_scope.add(buffer.data)
        return tirx.AllocBuffer(buffer)

    def _sequence(self, stmts: tirx.SeqStmt) -> tirx.Stmt | None:
        kept = [stmt for stmt in map(self._stmt, stmts.seq) if stmt is not None]
        return sequence(kept) if kept else None

    def _for(self, loop: tirx.For) -> tirx.Stmt | None:
        if _is_grid(loop):
            return self._grid(loop)
        if loop.thread_binding is not None:
            self._thread_vars.add(loop.loop_var)
        return self._serial([loop], loop.body)

    def _grid(self, loop: tirx.For) -> tirx.Stmt | None:
        """The loops over the grid, x running fastest, as on a GPU: neighbours in memory are then handled together."""
        loops, body = [], loop
        while _is_grid(body):
            loops.append(body)
            body = body.body
        return self._serial(sorted(loops, key=lambda found: found.thread_binding.thread_tag, reverse=True), body)

    def _serial(self, loops: list[tirx.For], stmt: tirx.Stmt) -> tirx.Stmt | None:
        """Serial loops around `stmt`, the first outermost."""
        ranges = [(self._expr(loop.min), self._simplified(loop.extent)) for loop in loops]
        for loop, (begin, extent) in zip(loops, ranges, strict=True):
            self._bounds.loop(loop.loop_var, begin, extent)
            self._in_scope.add(loop.loop_var)
        body = self._stmt(stmt)
        for loop, (begin, extent) in reversed(list(zip(loops, ranges, strict=True))):
            self._in_scope.discard(loop.loop_var)
            if body is not None:
                step = None if loop.step is None else self._expr(loop.step)
                body = self._with_bounds(loop.loop_var, begin, extent, step, body)
        return body

    def _with_bounds(self, var: tirx.Var, *bounds_and_body: Any) -> tirx.Stmt:
        """The loop, with bounds that its body may change taken before it: C asks for them in every iteration."""
        *bounds, body = bounds_and_body
        before = [tirx.Bind(tirx.Var("bound", b.dtype), b) for b in bounds if b is not None and self._changes(body, b)]
        kept = {bind.value: bind.var for bind in before}
        begin, extent, step = (kept.get(bound, bound) for bound in bounds)
        return sequence([*before, tirx.For(var, begin, extent, tirx.ForKind.SERIAL, body, step=step)])

    def _changes(self, body: tirx.Stmt, bound: tirx.PrimExpr) -> bool:
        read = {load.buffer.data for load in loads(bound)}
        if not read:
            return False
        changed = {store.buffer.data for store in nodes(body, tirx.BufferStore)}
        changed |= {call.args[0].buffer.data for call in nodes(body, tirx.Call) if op_name(call) == "tirx.address_of"}
        return bool(read & changed or (read & self._params and changed & self._params))

    def _simplified(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        expr = self._expr(expr)
        return self._bounds.simplify(expr) if is_pure_index(expr) else expr

    def _while(self, loop: tirx.While) -> tirx.Stmt:
        condition = self._expr(loop.condition)
        with self._bounds.assume(condition):
            body = self._stmt(loop.body)
        return tirx.While(condition, body or tirx.Evaluate(const(0, "int32")))

    def _if(self, branch: tirx.IfThenElse) -> tirx.Stmt | None:
        condition = self._bounds.open_part(self._bounds.divided(self._expr(branch.condition)))
        if condition is None:
            return self._stmt(branch.then_case)
        with self._bounds.assume(condition):
            then_case = self._stmt(branch.then_case)
        with self._bounds.assume(condition, holds=False):
            else_case = None if branch.else_case is None else self._stmt(branch.else_case)
        if then_case is None:
            return None if else_case is None else tirx.IfThenElse(tirx.Not(condition), else_case, None)
        return tirx.IfThenElse(condition, then_case, else_case)

    def _bind(self, bind: tirx.Bind) -> tirx.Stmt | None:
        if op_name(bind.value) == "tl.launch_thread_idx":
            self._thread_vars.add(bind.var)
            return None
        if not self._in_scope.issuperset(tirx.analysis.undefined_vars(bind.value)):
            # T.Persistent names its tile's coordinates before the loop that they depend on.
            self._inlined[bind.var] = bind.value
            return None
        value = self._expr(bind.value)
        self._bounds.let(bind.var, value)
        self._in_scope.add(bind.var)
        return tirx.Bind(bind.var, value)

    def _store(self, store: tirx.BufferStore) -> tirx.Stmt:
        indices = [self._bounds.divided(self._expr(index)) for index in store.indices]
        guard = all_of(self._bounds.guard(store.buffer, indices))
        value = store.value
        if guard is not None:
            with self._bounds.assume(guard):
                return if_then(guard, tirx.BufferStore(store.buffer, self._expr(value), indices))
        return tirx.BufferStore(store.buffer, self._expr(value), indices)

    def _evaluate(self, stmt: tirx.Evaluate) -> tirx.Stmt | None:
        name = op_name(stmt.value)
        if isinstance(stmt.value, tirx.IntImm) or changes_nothing(stmt):
            return None
        if print_call(stmt) is not None:
            return sequence(report_statements(stmt.value, self._expr))
        if assert_call(stmt) is not None:
            failed = tirx.Not(self._expr(stmt.value.args[0]))
            return tirx.IfThenElse(failed, sequence(report_statements(stmt.value, self._expr)), None)
        if name in _IN_LOOP:
            return tirx.Evaluate(tirx.Call("void", _IN_LOOP[name], []))
        op = parse_tile_op(stmt)
        if op is not None:
            return self._expanded(_with_expressions(op, self._expr))
        parts = parts_of(stmt)
        if parts is not None:
            return self._stmt(parts)
        return self._refuse(
            f"{('T.' + name.rpartition('.')[2] if name else '') or type(stmt.value).__name__} can't run on a CPU",
            "it is no tile operation that the re-targeting pass knows",
            'write it with loops, T.copy and stores, or use target="cuda"',
        )

    def _expanded(self, op: TileOp) -> tirx.Stmt:
        """The operation as loops, with numbers that it itself would change taken before it."""
        before: list[tirx.Stmt] = []

        def kept(expr: tirx.PrimExpr) -> tirx.PrimExpr:
            if not any(load.buffer.data.same_as(op.dst.buffer.data) for load in loads(expr)):
                return expr
            before.append(tirx.Bind(tirx.Var("kept", expr.dtype), expr))
            return before[-1].var

        loops = self._tile_ops.expand(_with_expressions(op, kept))
        return sequence([*before, loops])

    def _expr(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        """`expr` with every load inside its buffer."""
        if isinstance(expr, tirx.Var):
            if expr in self._thread_vars:
                self._refuse(
                    f"the thread index '{expr.name}', {FROM}, can't be used on a CPU",
                    "a program of the grid runs as one thread there",
                    FIX,
                )
            return self._expr(self._inlined[expr]) if expr in self._inlined else expr
        if (choice := chosen(expr)) is not None:
            return self._choice(*choice)
        if isinstance(expr, tirx.And):
            left = self._expr(expr.a)
            with self._bounds.assume(left):
                return tirx.And(left, self._expr(expr.b))
        if isinstance(expr, tirx.Or):
            left = self._expr(expr.a)
            with self._bounds.assume(left, holds=False):
                return tirx.Or(left, self._expr(expr.b))
        if isinstance(expr, tirx.BufferLoad):
            return self._load(expr)
        try:
            return map_children(expr, self._expr)
        except TypeError:
            return self._refuse(
                f"the expression {type(expr).__name__} can't run on a CPU",
                "the re-targeting pass doesn't know it",
                "write it as element-wise code in a T.Parallel or T.serial loop",
            )

    def _choice(self, condition: tirx.PrimExpr, true_value: tirx.PrimExpr, false_value: tirx.PrimExpr) -> tirx.PrimExpr:
        """One side is evaluated, never both: the C code generator writes a Select as `?:`."""
        test = self._bounds.open_part(self._bounds.divided(self._expr(condition)))
        if test is None:
            return self._expr(true_value)
        with self._bounds.assume(test):
            chosen = self._expr(true_value)
        with self._bounds.assume(test, holds=False):
            return tirx.Select(test, chosen, self._expr(false_value))

    def _load(self, load: tirx.BufferLoad) -> tirx.PrimExpr:
        indices = [self._bounds.divided(self._expr(index)) for index in load.indices]
        safe = tirx.BufferLoad(load.buffer, indices)
        guard = all_of(self._bounds.guard(load.buffer, indices))
        return safe if guard is None else tirx.Select(guard, safe, const(0, load.dtype))


def _with_expressions(op: Any, rewrite: Callable[[tirx.PrimExpr], tirx.PrimExpr]) -> TileOp:
    """The tile operation with `rewrite` applied to every expression in it."""
    changes: dict[str, Any] = {}
    for name, value in vars(op).items():
        if isinstance(value, Region):
            mins, extents = tuple(map(rewrite, value.mins)), tuple(map(rewrite, value.extents))
            changes[name] = Region(value.buffer, mins, extents)
        elif isinstance(value, tirx.PrimExpr):
            changes[name] = rewrite(value)
    return dataclasses.replace(op, **changes)


def _is_grid(stmt: tirx.Stmt) -> bool:
    if not isinstance(stmt, tirx.For) or stmt.thread_binding is None:
        return False
    return stmt.thread_binding.thread_tag.startswith("blockIdx")
