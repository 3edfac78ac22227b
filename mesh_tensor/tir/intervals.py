"""Loops that do something every n iterations: `for k: {...; if (k + 1) % n == 0: promote}`, as products do that add
what they have summed up to a second accumulator now and then.

For analysis and rewriting such a loop becomes two, `for outer: {for inner: ...; promote}`, so that nothing depends on a
remainder of k; `join` makes one of them again, over whatever intervals there are by then.
"""

from __future__ import annotations

from collections.abc import Iterable

from tvm import arith, tirx

from .effects import leaves_kernel, leaves_loop
from .linear import holds_always
from .nodes import is_const, nodes
from .rewrite import sequence, statements

#: Marks the two loops that `with_intervals` made.
MARK = "mesh_tensor.interval"
_DIVISIONS = [f"tirx.{name}" for name in ("FloorDiv", "FloorMod")]


def with_intervals(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same kernel, with two loops for each one that does something at the start or the end of intervals which
    divide its extent."""
    if not nodes(func.body, tirx.FloorMod):
        return func
    body = tirx.stmt_functor.ir_transform(func.body, None, _apart, ["tirx.For"])
    return func if body.same_as(func.body) else func.with_body(body)


def join(body: tirx.Stmt) -> tirx.Stmt:
    """Undo `with_intervals`."""
    if not any(MARK in loop.annotations for loop in nodes(body, tirx.For)):
        return body
    body = tirx.stmt_functor.ir_transform(body, None, _joined, ["tirx.For"])
    return tirx.stmt_functor.ir_transform(body, None, _unmarked, ["tirx.For"])


def _apart(loop: tirx.For) -> tirx.Stmt | None:
    is_plain = loop.kind == tirx.ForKind.SERIAL and loop.thread_binding is None and loop.step is None
    if not is_plain or MARK in loop.annotations or not isinstance(loop.body, tirx.SeqStmt):
        return None
    if not isinstance(loop.extent, tirx.IntImm) or not is_const(loop.min, 0):
        return None
    stmts = list(loop.body.seq)
    for length in _lengths(loop, (stmts[0], stmts[-1])):
        first, last = _at(stmts[0], loop, length, 0), _at(stmts[-1], loop, length, length - 1)
        if (first or last) and not leaves_loop(loop) and not leaves_kernel(loop):
            inside = stmts[1 if first else 0 : -1 if last else None]
            return _two_loops(loop, length, [first] if first else [], inside, [last] if last else [])
    return None


def _lengths(loop: tirx.For, guards: Iterable[tirx.Stmt]) -> list[int]:
    """The constants by which the conditions divide, those that divide the loop's extent."""
    conditions = [guard.condition for guard in guards if isinstance(guard, tirx.IfThenElse)]
    divisors = [mod.b for condition in conditions for mod in nodes(condition, tirx.FloorMod)]
    lengths = {int(by) for by in divisors if isinstance(by, tirx.IntImm)}
    return sorted(n for n in lengths if n > 1 and int(loop.extent) % n == 0)


def _at(stmt: tirx.Stmt, loop: tirx.For, length: int, place: int) -> tirx.Stmt | None:
    """What runs in those iterations, and in no others, that are at a place of their interval."""
    if not isinstance(stmt, tirx.IfThenElse) or not _is_nothing(stmt.else_case):
        return None
    here = tirx.EQ(tirx.floormod(loop.loop_var, length), tirx.IntImm(loop.loop_var.dtype, place))
    agree = tirx.Or(tirx.And(stmt.condition, here), tirx.And(tirx.Not(stmt.condition), tirx.Not(here)))
    return stmt.then_case if holds_always(agree, [(loop.loop_var, loop.min, loop.extent)], []) else None


def _is_nothing(stmt: tirx.Stmt | None) -> bool:
    return stmt is None or (isinstance(stmt, tirx.Evaluate) and isinstance(stmt.value, tirx.IntImm))


def _two_loops(
    loop: tirx.For, length: int, first: list[tirx.Stmt], inside: list[tirx.Stmt], last: list[tirx.Stmt]
) -> tirx.Stmt | None:
    var = loop.loop_var
    outer, inner = tirx.Var(f"{var.name}_div", var.dtype), tirx.Var(f"{var.name}_mod", var.dtype)
    known = {var, *tirx.analysis.undefined_vars(loop)}
    parts = [sequence(part) for part in (first, inside, last)]
    if not inside or any(used not in known for part in parts for used in tirx.analysis.undefined_vars(part)):
        return None  # a value that is bound in one of them is used in another
    analyzer = arith.Analyzer()
    for of, extent in ((outer, int(loop.extent) // length), (inner, length)):
        analyzer.update(of, arith.ConstIntBound(0, extent - 1), True)

    def placed(stmts: list[tirx.Stmt], at: tirx.PrimExpr) -> list[tirx.Stmt]:
        at = outer * length + at
        made = [tirx.stmt_functor.substitute(stmt, {var: at}) for stmt in stmts]
        return [tirx.stmt_functor.ir_transform(stmt, None, analyzer.simplify, _DIVISIONS) for stmt in made]

    annotations = {**dict(loop.annotations), MARK: "inner"}
    each = tirx.For(inner, 0, length, loop.kind, sequence(placed(inside, inner)), None, annotations)
    body = sequence(
        [*placed(first, tirx.IntImm(var.dtype, 0)), each, *placed(last, tirx.IntImm(var.dtype, length - 1))]
    )
    return tirx.For(outer, 0, int(loop.extent) // length, loop.kind, body, None, {MARK: "outer"})


def _joined(loop: tirx.For) -> tirx.Stmt | None:
    """One loop for two that are still what they were made, seen from the outer one."""
    if loop.annotations.get(MARK) != "outer":
        return None
    stmts = statements(loop.body)
    at = next((i for i, stmt in enumerate(stmts) if isinstance(stmt, tirx.For) and MARK in stmt.annotations), None)
    if at is None or any(isinstance(stmt, tirx.Bind) for stmt in stmts) or not _is_whole(loop, stmts[at]):
        return None
    inner = stmts[at]
    var = tirx.Var(loop.loop_var.name.removesuffix("_div"), loop.loop_var.dtype)
    div, mod = tirx.floordiv(var, inner.extent), tirx.floormod(var, inner.extent)
    first = [tirx.IfThenElse(tirx.EQ(mod, 0), sequence(stmts[:at]), None)] if at else []
    end = stmts[at + 1 :]
    last = [tirx.IfThenElse(tirx.EQ(mod, inner.extent - 1), sequence(end), None)] if end else []
    parts = {loop.loop_var: div, inner.loop_var: mod}
    body = tirx.stmt_functor.substitute(sequence([*first, inner.body, *last]), parts)
    extent = loop.extent * inner.extent
    return tirx.For(var, 0, extent, loop.kind, _with_whole_places(body, var), None, inner.annotations)


def _with_whole_places(body: tirx.Stmt, var: tirx.Var) -> tirx.Stmt:
    """`v // 2 * 16 + v % 2 * 8` is `v * 8`."""
    analyzer = arith.Analyzer()

    def whole(expr: tirx.Add) -> tirx.PrimExpr | None:
        divided = any(var.same_as(node.a) for node in nodes(expr, tirx.FloorMod))
        return analyzer.simplify(expr) if divided and not nodes(expr, tirx.BufferLoad, tirx.Call) else None

    return tirx.stmt_functor.ir_transform(body, None, whole, ["tirx.Add"])


def _is_whole(outer: tirx.For, inner: tirx.For) -> bool:
    """Whether both start at 0, and every interval is as long as the others."""
    return is_const(outer.min, 0) and is_const(inner.min, 0) and isinstance(inner.extent, tirx.IntImm)


def _unmarked(loop: tirx.For) -> tirx.Stmt | None:
    if MARK not in loop.annotations:
        return None
    annotations = {key: value for key, value in loop.annotations.items() if key != MARK}
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, None, annotations)
