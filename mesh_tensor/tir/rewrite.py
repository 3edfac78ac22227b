"""Rebuilding pieces of TileLang kernels: tile operations, copies, loop nests, the frame around a kernel; and
constants, made of Python's numbers and understood as such."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tvm import ir, tirx

from mesh_tensor.base import reductions
from mesh_tensor.base.dtypes import extreme, is_float

from .effects import op_name
from .memory import row_strides
from .nodes import nodes

#: From a buffer, where a region of it starts, and how long it is per dim, to these two in other dims; None if it has no
#: form there.
Place = Callable[[tirx.Buffer, Sequence, Sequence], tuple[list, list] | None]
_POINTERS = ("tl.access_ptr", "tirx.tvm_access_ptr")


def region_call(buffer: tirx.Buffer, mins: Sequence, extents: Sequence, mode: int) -> tirx.Call:
    """`T.region(buffer[mins], mode, extents...)`; mode 1 reads, 2 writes, 3 does both."""
    load = tirx.BufferLoad(buffer, list(mins))
    return tirx.call_intrin("handle", ir.Op.get("tl.region"), load, mode, *extents)


def tile_op(name: str, *args: object) -> tirx.Stmt:
    """`T.evaluate(tl.tileop.<name>(...))`."""
    return tirx.Evaluate(tirx.call_intrin("handle", ir.Op.get(f"tl.tileop.{name}"), *args))


def with_args(stmt: tirx.Evaluate, args: Sequence) -> tirx.Stmt:
    """The same call with other arguments (its annotations stay)."""
    return tirx.Evaluate(call_like(stmt.value, args))


def call_like(call: tirx.Call, args: Sequence) -> tirx.Call:
    """The same call with other arguments."""
    return tirx.Call(call.dtype, call.op, list(args), annotations=call.annotations, span=call.span)


def parallel_nest(
    loop_vars: Sequence[tirx.Var], extents: Sequence, body: tirx.Stmt, kind: Any = tirx.ForKind.PARALLEL
) -> tirx.Stmt:
    """`for ... in T.Parallel(extents): body`, or loops of another kind."""
    for var, extent in reversed(list(zip(loop_vars, extents, strict=True))):
        body = tirx.For(var, 0, extent, kind, body)
    return body


def row_by_row(indices: Iterable[tirx.PrimExpr], sizes: Iterable[Any]) -> tirx.PrimExpr:
    """Where the indices are in a tensor of these sizes, counted row by row."""
    position: tirx.PrimExpr = tirx.IntImm("int32", 0)
    for index, size in zip(indices, sizes, strict=True):
        position = position * size + index
    return position


def over_elements(buffer: tirx.Buffer, body: Callable[[list[tirx.PrimExpr]], tirx.Stmt]) -> tirx.Stmt:
    """`body` for the indices of every element of a buffer on chip: in parallel loops; of a variable, once."""
    if buffer.scope() == "local.var":
        return body([tirx.IntImm("int32", 0)] * len(buffer.shape))
    loops = [tirx.Var(f"i{dim}", "int32") for dim in range(len(buffer.shape))]
    return parallel_nest(loops, buffer.shape, body(list(loops)))


def fill(buffer: tirx.Buffer, value: tirx.PrimExpr) -> tirx.Stmt:
    """`T.fill` of a buffer on chip, or a store to a variable."""
    zeros = [tirx.IntImm("int32", 0)] * len(buffer.shape)
    if buffer.scope() == "local.var":
        return tirx.BufferStore(buffer, value, zeros)
    return tile_op("fill", region_call(buffer, zeros, buffer.shape, 2), value)


def sequence(stmts: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """The statements one after the other."""
    if not stmts:
        return tirx.Evaluate(0)
    return stmts[0] if len(stmts) == 1 else tirx.SeqStmt(list(stmts))


def statements(stmt: tirx.Stmt) -> list[tirx.Stmt]:
    """The statements of a sequence, nested sequences flattened."""
    if not isinstance(stmt, tirx.SeqStmt):
        return [stmt]
    return [part for child in stmt.seq for part in statements(child)]


def inner(stmt: tirx.Stmt) -> list[tirx.Stmt]:
    """The statements that a statement holds, in their order."""
    if isinstance(stmt, tirx.SeqStmt):
        return list(stmt.seq)
    if isinstance(stmt, tirx.IfThenElse):
        return [stmt.then_case] if stmt.else_case is None else [stmt.then_case, stmt.else_case]
    if isinstance(stmt, tirx.SBlockRealize):
        return [stmt.block.body]
    return [stmt.body] if isinstance(stmt, (tirx.For, tirx.While, tirx.AttrStmt)) else []


def with_inner(stmt: tirx.Stmt, change: Callable[[tirx.Stmt], tirx.Stmt]) -> tirx.Stmt:
    """The statement with what `change` makes of each statement that it holds."""
    new = [change(part) for part in (statements(stmt) if isinstance(stmt, tirx.SeqStmt) else inner(stmt))]
    if isinstance(stmt, tirx.SeqStmt):
        return sequence(new)
    if isinstance(stmt, tirx.IfThenElse):
        return tirx.IfThenElse(stmt.condition, new[0], new[1] if len(new) > 1 else None)
    if isinstance(stmt, tirx.For):
        return loop_like(stmt, stmt.extent, new[0])
    if isinstance(stmt, tirx.While):
        return tirx.While(stmt.condition, new[0])
    if isinstance(stmt, tirx.AttrStmt):
        return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, new[0])
    if isinstance(stmt, tirx.SBlockRealize):
        return tirx.SBlockRealize(stmt.iter_values, stmt.predicate, with_body(stmt.block, new[0]))
    return stmt


def rewritten(func: tirx.PrimFunc, change: Callable[[Any], Any], *kinds: type) -> tirx.PrimFunc:
    """The function with what `change` makes of its nodes of these kinds, inner ones first (of None: what they were);
    itself, where that is all."""
    body = tirx.stmt_functor.ir_transform(func.body, None, change, [f"tirx.{kind.__name__}" for kind in kinds])
    return func if body.same_as(func.body) else func.with_body(body)


def guarded(stmt: tirx.Stmt, conditions: Sequence[tirx.PrimExpr], otherwise: tirx.Stmt | None = None) -> tirx.Stmt:
    """The statement where all conditions hold, the last one asked first."""
    for condition in conditions:
        stmt = tirx.IfThenElse(condition, stmt, otherwise)
    return stmt


def replace_block(func_body: tirx.Stmt, block: tirx.SBlock, extents: Mapping[tirx.Var, tirx.PrimExpr]) -> tirx.Stmt:
    """The function's body with the kernel's block exchanged and the grid's extents replaced."""
    if isinstance(func_body, tirx.SBlockRealize):
        old = func_body.block
        inner = block if old.name_hint != "root" else with_body(old, replace_block(old.body, block, extents))
        return tirx.SBlockRealize(func_body.iter_values, func_body.predicate, inner)
    if isinstance(func_body, tirx.For):
        body = replace_block(func_body.body, block, extents)
        return loop_like(func_body, extents.get(func_body.loop_var, func_body.extent), body)
    *binds, last = func_body.seq
    return tirx.SeqStmt([*binds, replace_block(last, block, extents)])


def loop_like(
    loop: tirx.For, extent: tirx.PrimExpr, body: tirx.Stmt, *, start: tirx.PrimExpr | None = None
) -> tirx.For:
    """The same loop over another range."""
    thread = loop.thread_binding
    if thread is not None and not ir.structural_equal(extent, loop.extent):
        thread = tirx.IterVar(thread.dom, thread.var, thread.iter_type, thread.thread_tag)
    low = loop.min if start is None else start
    return tirx.For(loop.loop_var, low, extent, loop.kind, body, thread, loop.annotations, loop.step)


def without_mark(loop: tirx.For, mark: str) -> tirx.For:
    """The loop without an annotation of that name."""
    if mark not in loop.annotations:
        return loop
    marks = {key: value for key, value in loop.annotations.items() if key != mark}
    thread = loop.thread_binding
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, thread, marks, loop.step)


def block_like(
    block: tirx.SBlock,
    body: tirx.Stmt,
    alloc_buffers: Sequence[tirx.Buffer],
    *,
    annotations: Mapping[str, object] | None = None,
) -> tirx.SBlock:
    """The same block with another body and other on-chip buffers."""
    return tirx.SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        body,
        block.init,
        list(alloc_buffers),
        block.match_buffers,
        block.annotations if annotations is None else annotations,
    )


def with_body(block: tirx.SBlock, body: tirx.Stmt) -> tirx.SBlock:
    """The same block with another body."""
    return block_like(block, body, block.alloc_buffers)


def with_indices(
    node: tirx.BufferLoad | tirx.BufferStore, indices: Sequence, buffer: tirx.Buffer | None = None
) -> tirx.BufferLoad | tirx.BufferStore:
    """The same access at other indices, perhaps of another buffer."""
    buffer = node.buffer if buffer is None else buffer
    if isinstance(node, tirx.BufferLoad):
        return tirx.BufferLoad(buffer, list(indices))
    return tirx.BufferStore(buffer, node.value, list(indices))


def exchange_buffers(stmt: tirx.Stmt, mapping: Mapping[tirx.Buffer, tirx.Buffer]) -> tirx.Stmt:
    """The statement with other buffers in place of some."""

    def exchange(node: tirx.BufferLoad | tirx.BufferStore) -> object:
        return with_indices(node, node.indices, mapping[node.buffer]) if node.buffer in mapping else None

    return tirx.stmt_functor.ir_transform(stmt, None, exchange, ["tirx.BufferLoad", "tirx.BufferStore"])


def with_other_dims(body: tirx.Stmt, buffers: Mapping[tirx.Buffer, tirx.Buffer], place: Place) -> tirx.Stmt | None:
    """The statement on other buffers over the same memory; None if some access has no form in their dims."""
    problems: list[object] = []  # an exception would not get through TVM's visitor as itself

    def placed(buffer: tirx.Buffer, mins: Sequence, extents: Sequence) -> tuple[list, list]:
        found = place(buffer, mins, extents)
        if found is None:
            problems.append(buffer)
            return [*mins], [*extents]
        return found

    def region(call: tirx.Call) -> tirx.Call | None:
        name = op_name(call)
        if name in _POINTERS:
            problems.extend(var for var in nodes(call, tirx.Var) if var in mentioned)
        if name != "tl.region" or call.args[0].buffer not in buffers:
            return None
        load, mode, *extents = call.args
        mins, lengths = placed(load.buffer, load.indices, extents)
        if problems:
            return None
        return tirx.call_intrin("handle", call.op, tirx.BufferLoad(buffers[load.buffer], mins), mode, *lengths)

    def access(node: tirx.BufferLoad | tirx.BufferStore) -> object:
        if node.buffer not in buffers:
            return None
        indices, _ = placed(node.buffer, node.indices, [1] * len(node.indices))
        return None if problems else with_indices(node, indices, buffers[node.buffer])

    mentioned = {buffer.data for buffer in buffers}
    body = tirx.stmt_functor.ir_transform(body, None, region, ["tirx.Call"])
    body = tirx.stmt_functor.ir_transform(body, None, access, ["tirx.BufferLoad", "tirx.BufferStore"])
    return None if problems else body


def buffer_like(buffer: tirx.Buffer, suffix: str) -> tirx.Buffer:
    """A buffer of its own, of the same shape, dtype and scope, with a longer name."""
    return tirx.decl_buffer(buffer.shape, buffer.dtype, f"{buffer.name}_{suffix}", scope=buffer.scope())


def reshaped(buffer: tirx.Buffer, shape: Sequence) -> tirx.Buffer:
    """The buffer with another shape; same data variable, name, dtype and scope; rows stay contiguous."""
    return tirx.decl_buffer(
        list(shape),
        buffer.dtype,
        buffer.name,
        data=buffer.data,
        strides=row_strides(shape) if len(buffer.strides) else None,
        scope=buffer.scope(),
        elem_offset=buffer.elem_offset,
    )


_INFINITE = ("float16", "float32", "float64")  # what code generators spell the infinities of


def constant(value: float, dtype: str) -> tirx.PrimExpr:
    """A number as a constant of `dtype`."""
    if math.isinf(value) and dtype not in _INFINITE:
        return tirx.Cast(dtype, tirx.const(value, "float32"))
    return tirx.const(value, dtype)


def cast(value: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
    """`value` in `dtype`; constants stay constants."""
    if value.dtype == dtype:
        return value
    return tirx.const(value.value, dtype) if isinstance(value, tirx.IntImm) else tirx.Cast(dtype, value)


def neutral_element(op: str, dtype: str) -> tirx.PrimExpr:
    """The constant that changes nothing under `op`: 0 for sum, 1 for prod, the smallest value for max, ..."""
    return constant(reductions.neutral(op, dtype), dtype)


def number(expr: object) -> float | None:
    """The value of a constant expression, None if it is none that is understood."""
    if isinstance(expr, (int, float)):
        return expr
    if isinstance(expr, (tirx.IntImm, tirx.FloatImm)):
        return expr.value
    if isinstance(expr, tirx.Cast):
        return _cast(number(expr.value), expr.dtype)
    if isinstance(expr, tirx.Call) and getattr(expr.op, "name", "") in ("tl.infinity", "tirx.infinity"):
        return math.inf
    if isinstance(expr, (tirx.Mul, tirx.Sub)):
        a, b = number(expr.a), number(expr.b)
        if a is not None and b is not None:
            return a * b if isinstance(expr, tirx.Mul) else a - b
    return None


def _cast(value: float | None, dtype: str) -> float | None:
    """What becomes of a number; integers keep those that they have, others are not understood."""
    if value is None or is_float(dtype):
        return value
    return value if extreme(dtype, -1) <= value <= extreme(dtype, 1) and value == int(value) else None
