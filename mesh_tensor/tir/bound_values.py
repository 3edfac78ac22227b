"""Values that are bound to a variable and used in one statement of the same nest: `gain = x[j] * 2; s[j] += gain`.

They go where they are used, so that a statement says all that it computes. That changes nothing if what they load is
not written in between, by this thread or another one: where threads may wait for each other, values of what they share
stay where they are, and so do those of other places of what the statement writes.
"""

from __future__ import annotations

from tvm import tirx

from .effects import op_name, pointers, side_effect, written
from .nodes import loads, nodes, same_expression
from .rewrite import sequence

_CHEAP = ("tirx.if_then_else",)


def with_values_in_place(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same kernel, in which values of loads are where they are used."""
    if not nodes(func.body, tirx.Bind):
        return func
    body = tirx.stmt_functor.ir_transform(func.body, None, _placed, ["tirx.SeqStmt"])
    return func if body.same_as(func.body) else func.with_body(body)


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
    """How often a statement uses a variable."""
    seen: list[tirx.Var] = []
    if any(var.same_as(used) for used in nodes(stmt, tirx.Var)):  # `nodes` has each once
        tirx.stmt_functor.ir_transform(stmt, None, lambda v: seen.append(v) if var.same_as(v) else None, ["tirx.Var"])
    return len(seen)


def _is_cheap(value: tirx.PrimExpr) -> bool:
    return not nodes(value, tirx.Div) and all(op_name(call) in _CHEAP for call in nodes(value, tirx.Call))
