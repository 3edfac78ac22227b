"""TIR statements, compiled into closures over a frame. One small function per kind of node and one table.

Grid loops and loops that carry something run as Python loops. A nest whose iterations are independent of each other
(see `independence`) runs over lanes: each statement once, for all iterations together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import tirx

from mesh_tensor.base.dtypes import numpy_dtype
from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.targets.reports import tell
from mesh_tensor.tir.effects import changes_nothing, op_name
from mesh_tensor.tir.nodes import loads
from mesh_tensor.tir.reducers import parts_of
from mesh_tensor.tir.tile_calls import parse_previous, parse_tile_op
from mesh_tensor.tir.tile_ops import Atomic
from mesh_tensor.tir.user_reports import assert_call, is_print, print_call, report_of, without_thread_tests

from .access import BufferAccess
from .expressions import compile_expr, under_mask
from .independence import lanes_of
from .intrinsics import UFUNCS, convert, poisoned
from .nest import is_element_update
from .scope import (
    MASK,
    Action,
    Break,
    Code,
    Continue,
    Frame,
    FunctionScope,
    Lane,
    Return,
    constant,
    in_turn,
    jump,
    nothing,
    until,
)
from .tiles import compile_tile_op

_JUMPS = {
    "tl.loop_break": Break,
    "tirx.break_loop": Break,
    "tirx.continue_loop": Continue,
    "tirx.thread_return": Return,
}


def compile_stmt(stmt: tirx.Stmt, scope: FunctionScope) -> Action:
    """`stmt` as a closure."""
    build = _BUILDERS.get(type(stmt))
    if build is None:
        raise MeshTensorError(f"the interpreter does not know the statement {type(stmt).__name__}:\n{stmt}")
    return build(stmt, scope)


def _seq(stmt: tirx.SeqStmt, scope: FunctionScope) -> Action:
    return in_turn([a for a in [compile_stmt(s, scope) for s in stmt.seq] if a is not nothing])


def _for(stmt: tirx.For, scope: FunctionScope) -> Action:
    if not scope.axes:
        axes = lanes_of(stmt)
        if hash(stmt.loop_var) in axes:
            scope.axis_of = axes
            action = _lane_loop(stmt, scope)
            scope.axis_of = {}
            return action
    if hash(stmt.loop_var) in scope.axis_of:
        return _lane_loop(stmt, scope)
    return _python_loop(stmt, scope)


def _python_loop(stmt: tirx.For, scope: FunctionScope) -> Action:
    low, extent = compile_expr(stmt.min, scope), compile_expr(stmt.extent, scope)
    if low.varies or extent.varies:
        return _ragged_loop(stmt, low, extent, scope)
    slot = scope.define(stmt.loop_var)
    body = compile_stmt(stmt.body, scope)
    body = until(Continue, body) if scope.jumps else body

    def run(frame: Frame) -> None:
        start = int(low.run(frame))
        for step in range(start, start + int(extent.run(frame))):
            frame[slot] = step
            body(frame)

    return until(Break, run) if scope.jumps else run


def _ragged_loop(stmt: tirx.For, low: Code, extent: Code, scope: FunctionScope) -> Action:
    """A loop over lanes that don't all run as many iterations: those that are done are masked off."""
    slot = scope.define(stmt.loop_var, low.varies)
    body = compile_stmt(stmt.body, scope)

    def run(frame: Frame) -> None:
        start, count, mask = low.run(frame), np.asarray(extent.run(frame)), frame[MASK]
        most = int(np.max(count if mask is None else np.where(mask, count, 0), initial=0))
        for step in range(most):
            frame[slot] = start + step
            under_mask(frame, step < count, body)

    return run


def _lane_loop(stmt: tirx.For, scope: FunctionScope) -> Action:
    low, extent = compile_expr(stmt.min, scope), compile_expr(stmt.extent, scope)
    known = None
    if low.const is not None and extent.const is not None:
        known = range(low.const, low.const + extent.const)
    slot = scope.define(stmt.loop_var, varies=True)
    axis = scope.axis_of[hash(stmt.loop_var)]
    lane = scope.lanes[hash(stmt.loop_var)] = Lane(axis, scope.new_slot(), scope.new_slot(), known)
    dtype = numpy_dtype(stmt.loop_var.dtype)
    shape = tuple(-1 if a == axis else 1 for a in range(scope.axes))
    body = compile_stmt(stmt.body, scope)

    def lanes(steps: range) -> np.ndarray:
        return np.arange(steps.start, steps.stop, dtype=dtype).reshape(shape)

    once = None if known is None else lanes(known)

    def run(frame: Frame) -> None:
        steps = range(start := int(low.run(frame)), start + int(extent.run(frame))) if known is None else known
        if steps:
            frame[lane.start], frame[lane.size] = steps.start, len(steps)
            frame[slot] = lanes(steps) if once is None else once
            body(frame)

    return run


def _while(stmt: tirx.While, scope: FunctionScope) -> Action:
    condition, body = compile_expr(stmt.condition, scope), compile_stmt(stmt.body, scope)
    body = until(Continue, body) if scope.jumps else body

    def run(frame: Frame) -> None:
        while condition.run(frame):
            body(frame)

    return until(Break, run) if scope.jumps else run


def _if(stmt: tirx.IfThenElse, scope: FunctionScope) -> Action:
    condition, then = compile_expr(stmt.condition, scope), compile_stmt(stmt.then_case, scope)
    otherwise = nothing if stmt.else_case is None else compile_stmt(stmt.else_case, scope)

    def scalar(frame: Frame) -> None:
        if condition.run(frame):
            then(frame)
        else:
            otherwise(frame)

    def lanes(frame: Frame) -> None:
        where = condition.run(frame)
        under_mask(frame, where, then)
        if otherwise is not nothing:
            under_mask(frame, ~where, otherwise)

    return lanes if condition.varies else scalar


def _bind(stmt: tirx.Bind, scope: FunctionScope) -> Action:
    value = stmt.value
    if op_name(value) == "tl.launch_thread_idx":
        scope.threads.add(stmt.var)
        return nothing
    code = compile_expr(value, scope)
    if not loads(value):
        scope.binds[hash(stmt.var)] = value
    slot = scope.define(stmt.var, code.varies)

    def scalar(frame: Frame) -> None:
        frame[slot] = code.run(frame)

    def lanes(frame: Frame) -> None:
        new = code.run(frame)
        frame[slot] = new if new.base is None else new.copy()

    return lanes if code.varies else scalar


def _store(stmt: tirx.BufferStore, scope: FunctionScope) -> Action:
    return BufferAccess(stmt.buffer, stmt.indices, scope, compile_expr).store(compile_expr(stmt.value, scope))


def _update(op: Atomic, scope: FunctionScope) -> Action:
    """An atomic update of one element per lane."""
    access = BufferAccess(op.dst.buffer, op.dst.mins, scope, compile_expr)
    old, new = access.load(), compile_expr(op.value, scope)
    combine, dtype = UFUNCS[op.reduction], numpy_dtype(op.dst.buffer.dtype)
    return access.store(
        Code(lambda frame: combine(old.run(frame), convert(new.run(frame), dtype)), old.varies or new.varies)
    )


def _evaluate(stmt: tirx.Evaluate, scope: FunctionScope) -> Action:
    op = parse_tile_op(stmt)
    if isinstance(op, Atomic) and is_element_update(op):
        return _update(op, scope)
    if op is not None:
        return compile_tile_op(op, scope)
    parts = parts_of(stmt)
    if parts is not None:
        return compile_stmt(parts, scope)
    if isinstance(stmt.value, (tirx.IntImm, tirx.Var)) or changes_nothing(stmt):
        return nothing
    if print_call(stmt) is not None:
        return _report(stmt.value, scope)
    if assert_call(stmt) is not None:
        holds, failure = compile_expr(stmt.value.args[0], scope), _report(stmt.value, scope)
        return lambda frame: None if holds.run(frame) else failure(frame)
    name = op_name(stmt.value)
    if parse_previous(stmt.value) is not None:
        code = compile_expr(stmt.value, scope)
        return lambda frame: code.run(frame)
    if name in _JUMPS:
        return jump(_JUMPS[name], scope)
    if name.startswith("mesh."):
        raise MeshTensorError(f"the interpreter runs one device's kernel; {name} is a collective and not part of one")
    raise MeshTensorError(f"the interpreter does not know the operation {name or stmt.value}:\n{stmt}")


def _report(call: tirx.Call, scope: FunctionScope) -> Action:
    report, numbers = report_of(call)
    codes = [compile_expr(number, scope) for number in numbers]
    return lambda frame: tell(report, [code.run(frame) for code in codes])


def _attr(stmt: tirx.AttrStmt, scope: FunctionScope) -> Action:
    return compile_stmt(without_thread_tests(stmt.body, scope.threads) if is_print(stmt) else stmt.body, scope)


def _block_realize(stmt: tirx.SBlockRealize, scope: FunctionScope) -> Action:
    block = stmt.block
    if block.init is not None or block.match_buffers:
        raise MeshTensorError(f"block {block.name_hint!r} has an init or match_buffer: not a TileLang kernel's")
    for data, value in block.annotations.get("safe_value_map", {}).items():
        is_number = isinstance(value, int | float)
        scope.safe_values[hash(data)] = constant(value) if is_number else compile_expr(value, scope)
    names = [
        (scope.define(iter_var.var), compile_expr(value, scope).run)
        for iter_var, value in zip(block.iter_vars, stmt.iter_values, strict=True)
    ]
    enter = in_turn([*[_allocation(b, scope) for b in block.alloc_buffers], compile_stmt(block.body, scope)])
    condition = compile_expr(stmt.predicate, scope)

    def run(frame: Frame) -> None:
        for slot, value in names:
            frame[slot] = value(frame)
        if condition.run(frame):
            enter(frame)

    return until(Return, run) if block.name_hint == "tilelang_root" else run


def _allocation(buffer: tirx.Buffer, scope: FunctionScope) -> Action:
    if buffer.scope() == "global":
        raise MeshTensorError(f"the interpreter has no global memory for {buffer.name!r}: make it a parameter")
    extents = [compile_expr(n, scope) for n in buffer.shape]
    dtype = numpy_dtype(buffer.dtype)
    slot = scope.define_buffer(buffer)
    make: Callable[..., Any] = poisoned if scope.poison else np.zeros

    def run(frame: Frame) -> None:
        frame[slot] = make([n.run(frame) for n in extents], dtype)

    return run


def _alloc_buffer(stmt: Any, scope: FunctionScope) -> Action:
    return _allocation(stmt.buffer, scope)


def _assert(stmt: tirx.AssertStmt, scope: FunctionScope) -> Action:
    condition = compile_expr(stmt.condition, scope)
    message = "".join(part.value for part in stmt.message_parts)

    def run(frame: Frame) -> None:
        if not condition.run(frame):
            raise MeshTensorError(f"the kernel's assertion {stmt.condition} failed: {message}")

    return run


_BUILDERS: dict[type, Callable[[Any, FunctionScope], Action]] = {
    tirx.SeqStmt: _seq,
    tirx.For: _for,
    tirx.While: _while,
    tirx.IfThenElse: _if,
    tirx.Bind: _bind,
    tirx.BufferStore: _store,
    tirx.Evaluate: _evaluate,
    tirx.SBlockRealize: _block_realize,
    tirx.AttrStmt: _attr,
    tirx.AllocBuffer: _alloc_buffer,
    tirx.DeclBuffer: lambda stmt, scope: nothing,
    tirx.AssertStmt: _assert,
}
