"""Iterations and programs that are given up early: `if skip: continue` before the rest is the rest `if not skip`.

What stands behind the exit becomes the other branch of its condition, so that nothing leaves anything. Exits that are
not the end of what a condition guards, or that leave a loop for good, stay.
"""

from __future__ import annotations

from tvm import tirx

from .effects import LEAVES_ITERATION, LEAVES_KERNEL, op_name
from .nodes import nodes
from .rewrite import loop_like, sequence, statements, with_body

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
    if isinstance(stmt, tirx.For):
        in_grid = stmt.thread_binding is not None
        return loop_like(stmt, stmt.extent, _visit(stmt.body, exits if in_grid else LEAVES_ITERATION), start=stmt.min)
    if isinstance(stmt, tirx.While):
        return tirx.While(stmt.condition, _visit(stmt.body, LEAVES_ITERATION))
    if isinstance(stmt, tirx.IfThenElse):
        otherwise = None if stmt.else_case is None else _visit(stmt.else_case, exits)
        return tirx.IfThenElse(stmt.condition, _visit(stmt.then_case, exits), otherwise)
    if isinstance(stmt, tirx.AttrStmt):
        return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, _visit(stmt.body, exits))
    if isinstance(stmt, tirx.SBlockRealize):
        block = with_body(stmt.block, _visit(stmt.block.body, exits))
        return tirx.SBlockRealize(stmt.iter_values, stmt.predicate, block)
    return stmt


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
