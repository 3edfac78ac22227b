"""TIR functions as TE makes them, as kernels: a nest of loops becomes a function that reads like a TileLang kernel.

A reduction's start gets a nest of its own before the nest that adds to it, sizes and loop variables become int32, and
the outer spatial loops become the grid: the rules of kernels then hold for it, and whatever compiles kernels runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.tirx.stmt_functor import ir_transform, substitute

from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.kernel.statements import body_statements
from mesh_tensor.tir.effects import written
from mesh_tensor.tir.nodes import is_const, loads
from mesh_tensor.tir.rewrite import exchange_buffers, sequence, with_indices

_SPATIAL = 0  # the kind of a block's variable whose values may come in any order
_COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max)
_MOST_GRID_DIMS = 3


def kernel_of(stmts: Sequence[tirx.Stmt], buffers: Mapping[tirx.Buffer, tirx.Buffer], name: str) -> tirx.PrimFunc:
    """The kernel that runs statements of a TIR function on other buffers: from those that the statements use to the
    kernel's parameters, in order. Refused where the statements are scheduled for threads."""
    grid, body = (_nest(stmts[0]) if len(stmts) == 1 else None) or ([], _flattened(stmts, name))
    body, threads = _framed(grid, _narrow_loops(exchange_buffers(body, buffers)))
    params = {tirx.Var(f"{buffer.name}_handle", "handle"): buffer for buffer in buffers.values()}
    func = tirx.PrimFunc(list(params), threads(_narrow_indices(body)), None, params)
    return func.with_attr("global_symbol", name)


def compact(buffer: tirx.Buffer, name: str) -> tirx.Buffer:
    """A kernel's parameter for a buffer of known size."""
    return tirx.decl_buffer([tirx.IntImm("int32", int(size)) for size in buffer.shape], buffer.dtype, name)


def loaded(places: Iterable[tirx.PrimExpr | tirx.Stmt]) -> list[tirx.Buffer]:
    """The buffers that are read somewhere in these, each once."""
    return list(dict.fromkeys(load.buffer for place in places for load in loads(place)))


def is_count(low: tirx.PrimExpr, extent: tirx.PrimExpr) -> bool:
    """Whether a loop takes a known number of values from 0 on."""
    return is_const(low, 0) and isinstance(extent, tirx.IntImm)


@dataclass(frozen=True)
class _Iter:
    """A loop, by the block's variable that it walks."""

    var: tirx.Var
    extent: int
    spatial: bool


def _nest(stmt: tirx.Stmt) -> tuple[list[_Iter], tirx.Stmt] | None:
    """One block in loops that walk its dims one by one, as (the grid, what it runs); None for anything else."""
    loops: dict[tirx.Var, int] = {}
    while isinstance(stmt, tirx.For):
        if stmt.kind == tirx.ForKind.THREAD_BINDING or not is_count(stmt.min, stmt.extent):
            return None
        loops[stmt.loop_var] = int(stmt.extent)
        stmt = stmt.body
    if not isinstance(stmt, tirx.SBlockRealize) or not _is_simple(stmt, loops):
        return None
    block = stmt.block
    walked = {value: iter_var for iter_var, value in zip(block.iter_vars, stmt.iter_values, strict=True)}
    fixed = {iter_var.var: value for value, iter_var in walked.items() if value not in loops}
    body = substitute(_without_lets(block.body), fixed)
    iters = [_Iter(walked[v].var, n, walked[v].iter_type == _SPATIAL) for v, n in loops.items() if v in walked]
    spatial, reduce = [i for i in iters if i.spatial], [i for i in iters if not i.spatial]
    if len(iters) != len(loops) or not _writes_apart(body, spatial) or (reduce and block.init is None):
        return None
    # What is written apart may be written in any order: the last dim goes innermost.
    grid, inner, last = spatial[:-1][:_MOST_GRID_DIMS], spatial[:-1][_MOST_GRID_DIMS:], spatial[-1:]
    update = _loops([*inner, *reduce, *last], body)
    if block.init is None:
        return grid, update
    return grid, sequence([_loops([*inner, *last], substitute(block.init, fixed)), update])


def _is_simple(realize: tirx.SBlockRealize, loops: Mapping[tirx.Var, int]) -> bool:
    """A block that always runs, has nothing inside but stores, and walks each of its dims with a loop of its own, or
    not at all."""
    block = realize.block
    values = [value for value in realize.iter_values if not isinstance(value, tirx.IntImm)]
    if not _is_true(realize.predicate) or len(block.alloc_buffers) or len(block.match_buffers):
        return False
    if any(value not in loops for value in values) or len(set(values)) < len(values):
        return False
    doms = [v.dom for v, value in zip(block.iter_vars, realize.iter_values, strict=True) if value in loops]
    if any(not is_count(d.min, d.extent) or int(d.extent) != loops[v] for d, v in zip(doms, values, strict=True)):
        return False
    return all(isinstance(stmt, (tirx.BufferStore, tirx.Bind)) for stmt in body_statements(block.body))


def _writes_apart(body: tirx.Stmt, spatial: Sequence[_Iter]) -> bool:
    """Whether every store has the variable of each spatial loop among its indices: only a reduction's loops come to an
    element twice."""
    stores = [stmt for stmt in body_statements(body) if isinstance(stmt, tirx.BufferStore)]
    return all(any(index.same_as(i.var) for index in store.indices) for store in stores for i in spatial)


def _without_lets(body: tirx.Stmt) -> tirx.Stmt:
    """`v = e; w = f; a[i] = v; b[i] = w` as `a[i] = e; b[i] = f`, where f does not read a."""
    bound: dict[tirx.Var, tirx.PrimExpr] = {}
    stores: list[tirx.BufferStore] = []
    for stmt in body_statements(body):
        if isinstance(stmt, tirx.Bind):
            if stores:
                return body
            bound[stmt.var] = substitute(stmt.value, bound)
            continue
        value, indices = substitute(stmt.value, bound), [substitute(index, bound) for index in stmt.indices]
        if bound and any(store.buffer.same_as(b) for store in stores for b in loaded([value, *indices])):
            return body
        stores.append(tirx.BufferStore(stmt.buffer, value, indices))
    return sequence(stores)


def _flattened(stmts: Sequence[tirx.Stmt], name: str) -> tirx.Stmt:
    """The statements in their order without blocks: what starts a reduction is an if, as is a block's condition."""
    used = dict.fromkeys([*loaded(stmts), *(buffer for stmt in stmts for buffer in written(stmt))])
    params = {tirx.Var(f"{buffer.name}_handle", "handle"): buffer for buffer in used}
    root = tirx.SBlock([], [], [], "root", sequence(stmts))
    func = tirx.PrimFunc(list(params), tirx.SBlockRealize([], True, root), None, params)
    lower = tvm.transform.Sequential([s_tir.transform.LowerInitBlock(), s_tir.transform.ConvertBlocksToOpaque()])
    body = lower(tvm.IRModule({"main": func}))["main"].body.block.body

    def without_block(node: tirx.SBlockRealize) -> tirx.Stmt:
        inner = node.block.body
        return inner if _is_true(node.predicate) else tirx.IfThenElse(node.predicate, inner, None)

    def serial(node: tirx.For) -> tirx.Stmt:
        if node.kind == tirx.ForKind.THREAD_BINDING:
            refuse(
                f"the loops of TIR function {name!r} are bound to threads",
                why="it is scheduled for a device already",
                fix="distribute the module before its functions are scheduled",
            )
        return tirx.For(node.loop_var, node.min, node.extent, tirx.ForKind.SERIAL, node.body)

    body = ir_transform(body, None, without_block, ["tirx.SBlockRealize"])
    return ir_transform(body, None, serial, ["tirx.For"])


def _loops(iters: Sequence[_Iter], body: tirx.Stmt) -> tirx.Stmt:
    """The body in serial loops, with variables of their own."""
    for loop in reversed(iters):
        var, body = _fresh(loop.var, body)
        body = tirx.For(var, 0, loop.extent, tirx.ForKind.SERIAL, body)
    return body


def _fresh(var: tirx.Var, body: tirx.Stmt) -> tuple[tirx.Var, tirx.Stmt]:
    """An int32 variable, and the body with it in place of `var`."""
    new = tirx.Var(var.name, "int32")
    return new, substitute(body, {var: new if var.dtype == "int32" else tirx.Cast(var.dtype, new)})


def _framed(grid: Sequence[_Iter], body: tirx.Stmt):
    """The body on the grid's variables; and what puts it into the frame of a T.Kernel with one thread."""
    dims: list[tuple[tirx.Var, int]] = []
    for loop in grid:
        var, body = _fresh(loop.var, body)
        dims.append((var, loop.extent))
    dims = dims or [(tirx.Var("bx", "int32"), 1)]

    def frame(inner: tirx.Stmt) -> tirx.Stmt:
        block = tirx.SBlock([], [], [], "tilelang_root", inner, annotations={"tl.launch_threads": [1, 1, 1]})
        stmt: tirx.Stmt = tirx.SBlockRealize([], True, block)
        # The last of the grid's dims is that of blockIdx.x.
        for dim, (var, extent) in zip("xyz", reversed(dims), strict=False):
            thread = tirx.IterVar(None, tirx.Var(f"blockIdx_{dim}", "int32"), 1, f"blockIdx.{dim}")
            stmt = tirx.For(var, 0, extent, tirx.ForKind.THREAD_BINDING, stmt, thread)
        root = tirx.SBlock([], [], [], "root", stmt)
        return tirx.SBlockRealize([], True, root)

    return body, frame


def _narrow_loops(body: tirx.Stmt) -> tirx.Stmt:
    def narrow(node: tirx.For) -> tirx.Stmt | None:
        if node.loop_var.dtype == "int32":
            return None
        var, inner = _fresh(node.loop_var, node.body)
        low, extent = _narrow(node.min), _narrow(node.extent)
        if low is None or extent is None:
            low, extent = tirx.Cast("int32", node.min), tirx.Cast("int32", node.extent)
        return tirx.For(var, low, extent, node.kind, inner)

    return ir_transform(body, None, narrow, ["tirx.For"])


def _narrow_indices(body: tirx.Stmt) -> tirx.Stmt:
    """Indices and comparisons of them in int32 arithmetic: sizes are."""

    def rebuilt(node: Any) -> Any:
        if isinstance(node, _COMPARISONS):
            a, b = _narrow(node.a), _narrow(node.b)
            return None if a is None or b is None else type(node)(a, b)
        indices = [index if (narrow := _narrow(index)) is None else narrow for index in node.indices]
        return with_indices(node, indices)

    kinds = [f"tirx.{kind.__name__}" for kind in (tirx.BufferLoad, tirx.BufferStore, *_COMPARISONS)]
    return ir_transform(body, None, rebuilt, kinds)


def _narrow(expr: tirx.PrimExpr) -> tirx.PrimExpr | None:
    """An int64 index in int32; None where it is no sum or product of loop variables and constants."""
    if expr.dtype == "int32":
        return expr
    if expr.dtype != "int64":
        return None
    if isinstance(expr, tirx.IntImm):
        return tirx.IntImm("int32", int(expr))
    if isinstance(expr, tirx.Cast):
        return expr.value if expr.value.dtype == "int32" else None
    if isinstance(expr, _ARITHMETIC):
        a, b = _narrow(expr.a), _narrow(expr.b)
        return None if a is None or b is None else type(expr)(a, b)
    return None


def _is_true(condition: tirx.PrimExpr) -> bool:
    return isinstance(condition, tirx.IntImm) and bool(condition.value)
