"""Kernels as they are read: parameters in contiguous rows, blocks that only hold memory, nothing that leaves early, and
statements that say all that they compute."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from tilelang.transform import LegalizeNegativeIndex
from tvm import ir, tirx
from tvm.error import InternalError

from mesh_tensor.base.dtypes import dtype_bits
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.recent import made_once

from .effects import LEAVES_ITERATION, LEAVES_KERNEL, op_name, pointers, side_effect, written
from .linear import loop_ranges, loops_in
from .memory import is_compact, row_strides
from .nodes import conjuncts, function_name, is_const, loads, nodes, same_expression
from .prover import Prover
from .rewrite import cast, exchange_buffers, rewritten, sequence, statements, with_indices, with_inner

_CHEAP = ("tirx.if_then_else",)
_COUNTERS = ("int32", "int64")
_RECENT = 64  # kernels of which it is kept what their parameters are like


def with_values_in_place(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same kernel, in which values of loads are where they are used."""
    if not nodes(func.body, tirx.Bind):
        return func
    return rewritten(func, _placed, tirx.SeqStmt)


def _placed(node: tirx.SeqStmt) -> tirx.Stmt | None:
    stmts = list(node.seq)
    at = 0
    while at < len(stmts):
        user = _only_user(stmts, at) if isinstance(stmts[at], tirx.Bind) else None
        if user is None:
            at += 1
            continue
        bind = stmts[at]
        stmts[user] = tirx.stmt_functor.substitute(stmts[user], {bind.var: bind.value})
        del stmts[at]
    return None if len(stmts) == len(node.seq) else sequence(stmts)


def _only_user(stmts: list[tirx.Stmt], at: int) -> int | None:
    """Where the one statement is that uses what is bound at a place, if the value can go there."""
    bind = stmts[at]
    if bind.var.dtype == "handle" or side_effect(bind) is not None or not loads(bind.value):
        return None
    uses = [(n, count) for n in range(at + 1, len(stmts)) if (count := _uses(stmts[n], bind.var))]
    if len(uses) != 1 or not isinstance(stmts[uses[0][0]], (tirx.Bind, tirx.BufferStore)):
        return None
    ((user, count),) = uses
    if (count > 1 and not _is_cheap(bind.value)) or side_effect(stmts[user]) is not None:
        return None
    if _meets_other_threads(bind.value, stmts[at + 1 : user], stmts[user]):
        return None
    read = {load.buffer.data for load in loads(bind.value)}
    changed = {var for stmt in stmts[at + 1 : user] for var in (*(b.data for b in written(stmt)), *pointers(stmt))}
    return None if read & changed else user


def _meets_other_threads(value: tirx.PrimExpr, between: list[tirx.Stmt], user: tirx.Stmt) -> bool:
    """Whether other threads may write what a value loads before the user does, if it is loaded there."""
    shared = [load for load in loads(value) if not load.buffer.scope().startswith("local")]
    waits = any(nodes(stmt, tirx.Evaluate) for stmt in between)
    return any(waits or (isinstance(user, tirx.BufferStore) and _is_elsewhere(load, user)) for load in shared)


def _is_elsewhere(load: tirx.BufferLoad, store: tirx.BufferStore) -> bool:
    """Whether another element may be loaded than is stored, of the same memory."""
    if not load.buffer.data.same_as(store.buffer.data):
        return False
    return not (load.buffer.same_as(store.buffer) and all(map(same_expression, load.indices, store.indices)))


def _uses(stmt: tirx.Stmt, var: tirx.Var) -> int:
    seen: list[tirx.Var] = []
    if any(var.same_as(used) for used in nodes(stmt, tirx.Var)):  # `nodes` has each once
        tirx.stmt_functor.ir_transform(stmt, None, lambda v: seen.append(v) if var.same_as(v) else None, ["tirx.Var"])
    return len(seen)


def _is_cheap(value: tirx.PrimExpr) -> bool:
    return not nodes(value, tirx.Div) and all(op_name(call) in _CHEAP for call in nodes(value, tirx.Call))


_NONE = frozenset[str]()


def without_early_exits(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same kernel with conditions instead of `continue` and of returns."""
    exits = LEAVES_ITERATION | LEAVES_KERNEL
    if not any(op_name(call) in exits for call in nodes(func.body, tirx.Call)):
        return func
    return func.with_body(_visit(func.body, LEAVES_KERNEL))


def _visit(stmt: tirx.Stmt, exits: frozenset[str]) -> tirx.Stmt:
    """A statement behind which there is nothing in what the `exits` leave."""
    if isinstance(stmt, tirx.SeqStmt):
        return _sequence(list(stmt.seq), exits)
    iterates = isinstance(stmt, tirx.While) or (isinstance(stmt, tirx.For) and stmt.thread_binding is None)
    return with_inner(stmt, lambda part: _visit(part, LEAVES_ITERATION if iterates else exits))


def _sequence(stmts: list[tirx.Stmt], exits: frozenset[str]) -> tirx.Stmt:
    """Statements in order, of which the first that may leave has the others in its other branch."""
    made: list[tirx.Stmt] = []
    for at, stmt in enumerate(stmts[:-1]):
        before = _before_exit(stmt, exits)
        if before is not None:
            rest = _sequence(stmts[at + 1 :], exits)
            if before:
                return sequence([*made, tirx.IfThenElse(stmt.condition, sequence(before), rest)])
            return sequence([*made, tirx.IfThenElse(tirx.Not(stmt.condition), rest, None)])
        made.append(_visit(stmt, _NONE))
    return sequence([*made, _visit(stmts[-1], exits)])


def _before_exit(stmt: tirx.Stmt, exits: frozenset[str]) -> list[tirx.Stmt] | None:
    """What a condition's branch does before it leaves; None if the statement is no such condition."""
    if not isinstance(stmt, tirx.IfThenElse) or stmt.else_case is not None:
        return None
    branch = statements(stmt.then_case)
    last = branch[-1]
    leaves = isinstance(last, tirx.Evaluate) and op_name(last.value) in exits
    return [_visit(inner, _NONE) for inner in branch[:-1]] if leaves else None


def without_idle_guards(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same kernel without those bounds tests that always hold: of blocks that divide a dim."""
    if not nodes(func.body, tirx.IfThenElse):
        return func
    analyzer, variables = loop_ranges(func.body), {loop.loop_var for loop in loops_in(func.body)}

    def may_fail(condition: tirx.PrimExpr) -> bool:
        known = not loads(condition) and variables.issuperset(tirx.analysis.undefined_vars(condition))
        return not known or not analyzer.can_prove(condition)

    def plain(guard: tirx.IfThenElse) -> tirx.Stmt | None:
        tests = conjuncts(guard.condition)
        left = [test for test in tests if may_fail(test)]
        if len(left) == len(tests):
            return None
        return (
            tirx.IfThenElse(functools.reduce(tirx.And, left), guard.then_case, guard.else_case)
            if left
            else (guard.then_case)
        )

    return rewritten(func, plain, tirx.IfThenElse)


def with_plain_conditions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`(a < n) & (b >= 0)` of places, which TileLang takes for numbers of one bit, is `a < n and b >= 0`."""

    def plain(call: tirx.Call) -> tirx.PrimExpr | None:
        is_both = op_name(call) == "tirx.bitwise_and" and call.dtype == "bool" and not loads(call)
        return tirx.And(*call.args) if is_both else None

    return rewritten(func, plain, tirx.Call)


def with_plain_blocks(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with plain blocks; those with an init or parts of other buffers are left, which are refused."""
    if all(map(_is_plain, nodes(func.body, tirx.SBlockRealize))):
        return func
    return rewritten(func, _plain, tirx.SBlockRealize)


def _is_plain(realize: tirx.SBlockRealize) -> bool:
    block = realize.block
    declared = len(block.iter_vars) or len(block.reads) or len(block.writes)
    return is_const(realize.predicate, 1) and not declared


def _plain(realize: tirx.SBlockRealize) -> tirx.SBlockRealize | None:
    block = realize.block
    if _is_plain(realize) or block.init is not None or len(block.match_buffers):
        return None
    places = {iter_var.var: at for iter_var, at in zip(block.iter_vars, realize.iter_values, strict=True)}
    body = tirx.stmt_functor.substitute(block.body, places)
    if not is_const(realize.predicate, 1):
        body = tirx.IfThenElse(realize.predicate, body, None)
    plain = tirx.SBlock(
        [], [], [], block.name_hint, body, None, block.alloc_buffers, [], block.annotations
    )  # fmt: skip
    return tirx.SBlockRealize([], True, plain)


def with_wide_counters(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same kernel, in which loops that count in a narrow type, or in one without a sign, count in int32 or
    int64."""
    if all(loop.loop_var.dtype in _COUNTERS for loop in nodes(func.body, tirx.For)):
        return func
    return rewritten(func, _wide, tirx.For)


def _wide(loop: tirx.For) -> tirx.Stmt | None:
    narrow = loop.loop_var.dtype
    if narrow in _COUNTERS:
        return None
    dtype = "int32" if dtype_bits(narrow) < 32 else "int64"
    var = tirx.Var(loop.loop_var.name, dtype)

    def is_count(expr: tirx.PrimExpr) -> bool:
        return isinstance(expr, tirx.Cast) and expr.dtype == narrow and expr.value.same_as(var)

    def plain(node: tirx.Cast | tirx.BufferLoad | tirx.BufferStore) -> Any:
        """A count that is all that a place, or a cast, is made of needs no cast: it is inside the narrow type."""
        if isinstance(node, tirx.Cast):
            return cast(var, node.dtype) if node.dtype in _COUNTERS and is_count(node.value) else None
        counts = [*map(is_count, node.indices)]
        places = zip(node.indices, counts, strict=True)
        return with_indices(node, [var if is_it else index for index, is_it in places]) if any(counts) else None

    body = tirx.stmt_functor.substitute(loop.body, {loop.loop_var: tirx.Cast(narrow, var)})
    body = tirx.stmt_functor.ir_transform(body, None, plain, ["tirx.Cast", "tirx.BufferLoad", "tirx.BufferStore"])
    start, extent = (cast(bound, dtype) for bound in (loop.min, loop.extent))
    step = None if loop.step is None else cast(loop.step, dtype)
    return tirx.For(var, start, extent, loop.kind, body, loop.thread_binding, loop.annotations, step)


def with_places_from_the_end(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function, in which places that are negative wherever they are used count from the end of their dim, as they
    do in TileLang: `A[-1]` is the last row. Where TVM raises as it looks for bounds, TileLang knows no such places."""
    named = func if func.attrs and "global_symbol" in func.attrs else func.with_attr("global_symbol", "main")
    try:
        body = LegalizeNegativeIndex()(ir.IRModule({"main": named}))["main"].body
    except (ValueError, InternalError):  # of integers of 8 bits, bounds that no such integer has
        return func
    return func if ir.structural_equal(body, func.body) else func.with_body(body)


def with_contiguous_rows(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function, with parameters whose rows are contiguous, from their first element on; it stays as it is where
    other buffers are views of such memory, which are refused when they are read. Refused where a variable is the stride
    of several parameters that would need different ones."""
    others = _made_contiguous(func.buffer_map)
    if not others or _has_views(func, others):
        return func
    strides = _strides(func, others, Prover())
    buffers = {param: others.get(buffer, buffer) for param, buffer in func.buffer_map.items()}
    body = tirx.stmt_functor.substitute(exchange_buffers(func.body, others), strides)
    params = [param for param in func.params if param not in strides]
    return tirx.PrimFunc(params, body, func.ret_type, buffers, func.attrs)


@made_once(_RECENT)
def _made_contiguous(parameters: Mapping[tirx.Var, tirx.Buffer]) -> dict[tirx.Buffer, tirx.Buffer]:
    """By those parameters that are not in contiguous rows, the same in such rows. Annotating a kernel leaves it this
    map, and its layouts are many."""
    analyzer = Prover()
    return {buffer: _contiguous(buffer) for buffer in parameters.values() if not _is_contiguous(buffer, analyzer)}


def _is_contiguous(buffer: tirx.Buffer, analyzer: Prover) -> bool:
    starts = buffer.elem_offset is None or is_const(buffer.elem_offset, 0)
    return starts and (not len(buffer.strides) or is_compact(buffer, analyzer))


def _contiguous(buffer: tirx.Buffer) -> tirx.Buffer:
    strides = row_strides(buffer.shape)
    return tirx.decl_buffer(buffer.shape, buffer.dtype, buffer.name, buffer.data, strides, 0, buffer.scope())


def _has_views(func: tirx.PrimFunc, buffers: dict[tirx.Buffer, tirx.Buffer]) -> bool:
    memory = {buffer.data for buffer in buffers}
    accesses = nodes(func.body, tirx.BufferLoad, tirx.BufferStore, tirx.DeclBuffer)
    named = {access.buffer for access in accesses if access.buffer.data in memory}
    return not named <= buffers.keys()


def _strides(
    func: tirx.PrimFunc, others: dict[tirx.Buffer, tirx.Buffer], analyzer: Prover
) -> dict[tirx.Var, tirx.PrimExpr]:
    """What the variables are that a function has for strides and offsets."""
    sizes = {size for buffer in func.buffer_map.values() for size in buffer.shape}
    found: dict[tirx.Var, tirx.PrimExpr] = {}
    for old, new in others.items():
        for was, now in zip([*old.strides, old.elem_offset], [*new.strides, new.elem_offset], strict=False):
            if not isinstance(was, tirx.Var) or was in sizes:
                continue
            value = found.setdefault(was, tirx.Cast(was.dtype, now) if now.dtype != was.dtype else now)
            if not analyzer.can_prove_equal(value, now):
                refuse(
                    f"the stride {was.name} would be both {value} and {now}",
                    where=f"kernel {function_name(func)!r}",
                    why="devices hold tensors in contiguous rows",
                    fix="give every dim a stride of its own, or declare the parameters with T.Tensor",
                )
    return found
