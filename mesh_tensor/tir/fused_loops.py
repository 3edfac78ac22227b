"""Loops that walk two dims at once: a grid's `bz` with `b = bz // heads` and `h = bz % heads`.

For analysis and rewriting such a loop becomes the two loops that it stands for, so that each dim has a loop of its own;
`fuse` puts those of a grid together again, over whatever extents they have by then.
"""

from __future__ import annotations

from tvm import tirx

from .effects import op_name
from .linear import loop_ranges, loops_in
from .nodes import is_const, nodes
from .rewrite import call_like

#: Marks the outer one of two loops that `unfuse` made; the value is the fused loop's thread binding.
MARK = "mesh_tensor.fused"
_ARITHMETIC = [
    f"tirx.{name}" for name in ("FloorDiv", "FloorMod", "Add", "Sub", "Mul", "LT", "LE", "GT", "GE", "EQ", "NE", "And")
]


def unfuse(func: tirx.PrimFunc, *, alone: bool = False, within: bool = False) -> tirx.PrimFunc:
    """Split every grid loop of `func` that is only used as `v // c` and `v % c`, with a constant c that divides its
    extent, or in indices that come to that: `(v * 16 + i) // 64` is `v // 4` where i is below 16. With `alone`, also
    those that are used on their own besides; with `within`, also loops within the grid."""
    body = func.body
    if not nodes(body, tirx.FloorDiv, tirx.FloorMod):
        return func
    for loop in _loops(body, within):
        split = _split_loop(body, loop.loop_var, alone, within)
        if split is None and _divides(loop):
            split = _split_loop(_simplified(body), loop.loop_var, alone, within)
        body = body if split is None else split
    return func if body.same_as(func.body) else func.with_body(body)


def fuse(body: tirx.Stmt) -> tirx.Stmt:
    """Undo `unfuse`."""
    return tirx.stmt_functor.ir_transform(body, None, _join, ["tirx.For"])


def _loops(body: tirx.Stmt, within: bool) -> list[tirx.For]:
    """The loops of the grid and, if asked for, those `within` that only count."""
    return [
        loop for loop in nodes(body, tirx.For) if loop.thread_binding is not None or (within and _only_counts(loop))
    ]


def _only_counts(loop: tirx.For) -> bool:
    return is_const(loop.min, 0) and not loop.annotations and loop.step is None


def _split_loop(body: tirx.Stmt, var: tirx.Var, alone: bool, within: bool) -> tirx.Stmt | None:
    """The body with two loops in place of that of `var`, or None if its variable is used otherwise."""
    part = next(_part(loop) for loop in _loops(body, within) if loop.loop_var.same_as(var))
    if part is None:
        return None
    split = _replace_loop(body, var, part, alone)
    return None if any(loop.loop_var.same_as(var) for loop in _loops(split, within)) else split


def _divides(loop: tirx.For) -> bool:
    """Whether a quotient or remainder of something with the loop's variable in it is used."""
    return any(loop.loop_var in _variables(node) for node in nodes(loop.body, tirx.FloorDiv, tirx.FloorMod))


def _simplified(body: tirx.Stmt) -> tirx.Stmt:
    """The body with indices and conditions of loop variables in a simpler form, as the loops' ranges allow."""
    analyzer, variables = loop_ranges(body), {loop.loop_var for loop in loops_in(body)}

    def simplify(node: tirx.PrimExpr) -> tirx.PrimExpr | None:
        is_index = node.dtype in ("int32", "int64", "bool") and not nodes(node, tirx.BufferLoad, tirx.Call)
        return analyzer.simplify(node) if is_index and variables.issuperset(_variables(node)) else None

    return tirx.stmt_functor.ir_transform(body, simplify, None, _ARITHMETIC)


def _variables(node: tirx.PrimExpr) -> list[tirx.Var]:
    return list(tirx.analysis.undefined_vars(node))


def _part(loop: tirx.For) -> int | None:
    """The one constant by which the loop's variable is divided, if it divides the extent."""
    used = [node.b for node in nodes(loop.body, tirx.FloorDiv, tirx.FloorMod) if loop.loop_var.same_as(node.a)]
    parts = {int(by) if isinstance(by, tirx.IntImm) else 0 for by in used}
    part = parts.pop() if len(parts) == 1 else 0
    return part if part > 0 and isinstance(loop.extent, tirx.IntImm) and int(loop.extent) % part == 0 else None


def _replace_loop(body: tirx.Stmt, var: tirx.Var, part: int, alone: bool) -> tirx.Stmt:
    def split(node: tirx.For) -> tirx.Stmt | None:
        return _split(node, part, alone) if node.loop_var.same_as(var) else None

    return tirx.stmt_functor.ir_transform(body, None, split, ["tirx.For"])


def _split(loop: tirx.For, part: int, alone: bool) -> tirx.Stmt | None:
    """The two loops, or None where the variable is used on its own, too, and may not be."""
    var = loop.loop_var
    high, low = tirx.Var(f"{var.name}_div", var.dtype), tirx.Var(f"{var.name}_mod", var.dtype)

    def replace(expr: tirx.FloorDiv | tirx.FloorMod) -> tirx.PrimExpr | None:
        if not var.same_as(expr.a):
            return None
        return high if isinstance(expr, tirx.FloorDiv) else low

    body = tirx.stmt_functor.ir_transform(loop.body, None, replace, ["tirx.FloorDiv", "tirx.FloorMod"])
    if not alone and any(var.same_as(used) for used in nodes(body, tirx.Var)):
        return None
    body = tirx.stmt_functor.substitute(body, {var: high * part + low})
    if loop.thread_binding is None:
        inner = tirx.For(low, 0, part, loop.kind, _by_cases(body, low, part))
        return tirx.For(high, 0, int(loop.extent) // part, loop.kind, inner)
    inner = tirx.For(low, 0, part, tirx.ForKind.SERIAL, body)
    marks = {**dict(loop.annotations), MARK: loop.thread_binding}
    return tirx.For(high, 0, int(loop.extent) // part, tirx.ForKind.SERIAL, inner, None, marks)


def _by_cases(body: tirx.Stmt, low: tirx.Var, part: int) -> tirx.Stmt:
    """The body, in which `low` is the number that it is where a condition leaves it one: of pairs, the first of two
    is at 2 * j, and where it is not the first, at 2 * j + 1."""

    def known(condition: tirx.PrimExpr) -> tuple[int | None, int | None]:
        """What the variable is where the condition holds, and where it does not."""
        if isinstance(condition, tirx.NE):
            return known(tirx.EQ(condition.a, condition.b))[::-1]
        compared = isinstance(condition, tirx.EQ) and low.same_as(condition.a) and isinstance(condition.b, tirx.IntImm)
        if not compared or not 0 <= int(condition.b) < part:
            return None, None
        return int(condition.b), 1 - int(condition.b) if part == 2 else None

    def at(value: int | None, node: tirx.PrimExpr | tirx.Stmt | None) -> tirx.PrimExpr | tirx.Stmt | None:
        return node if value is None or node is None else tirx.stmt_functor.substitute(node, {low: value})

    def told_apart(node: tirx.Call | tirx.IfThenElse) -> tirx.Call | tirx.IfThenElse | None:
        if isinstance(node, tirx.Call) and op_name(node) != "tirx.if_then_else":
            return None
        condition, *cases = (
            node.args if isinstance(node, tirx.Call) else (node.condition, node.then_case, node.else_case)
        )
        values = known(condition)
        if values == (None, None):
            return None
        then, otherwise = map(at, values, cases)
        if isinstance(node, tirx.Call):
            return call_like(node, [condition, then, otherwise])
        return tirx.IfThenElse(condition, then, otherwise)

    return tirx.stmt_functor.ir_transform(body, None, told_apart, ["tirx.Call", "tirx.IfThenElse"])


def _join(node: tirx.For) -> tirx.Stmt | None:
    if MARK not in node.annotations:
        return None
    inner = node.body
    var = tirx.Var(node.loop_var.name.removesuffix("_div"), node.loop_var.dtype)
    parts = {node.loop_var: tirx.floordiv(var, inner.extent), inner.loop_var: tirx.floormod(var, inner.extent)}
    body = tirx.stmt_functor.substitute(inner.body, parts)
    marks = {key: value for key, value in node.annotations.items() if key != MARK}
    kind = tirx.ForKind.THREAD_BINDING
    return tirx.For(var, 0, node.extent * inner.extent, kind, body, node.annotations[MARK], marks)
