"""Loops of which some iterations do something. Those that end, or start, where the block that they belong to says so:
`for ko in range(bx + 1)` of a causal mask. And `for v in range(n): if v == place: body`.

For analysis and rewriting the first become loops over all that any block needs, with a condition around the body, so
that they walk a dim from end to end; `shorten` makes bounds of the conditions again, over whatever extent the loop
has by then. Where `place` is proved to be always one of them, the second around `body` changes nothing, and gives an
index that is computed in a way that nobody understands a loop variable of its own. `collapse` undoes it: over
whatever part of the iterations is left by then, the body runs if `place` is among them.
"""

from __future__ import annotations

from functools import reduce

from tvm import arith, tirx

from .effects import leaves_loop
from .linear import loop_ranges, loops_in
from .nodes import nodes

#: Marks a loop that `lengthen` made.
MARK = "mesh_tensor.short"
_LONGEST = 2**30


def lengthen(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Every serial loop whose bounds depend on loops around it goes from 0 to the largest end that it can have."""
    if not any(_is_short(loop) for loop in loops_in(func.body)):
        return func
    analyzer = loop_ranges(func.body)
    around = {loop.loop_var for loop in loops_in(func.body)}

    def visit(loop: tirx.For) -> tirx.Stmt | None:
        return _long(loop, analyzer, around) if _is_short(loop) else None

    body = tirx.stmt_functor.ir_transform(func.body, None, visit, ["tirx.For"])
    return func if body.same_as(func.body) else func.with_body(body)


def shorten(body: tirx.Stmt) -> tirx.Stmt:
    """Undo `lengthen`."""
    return tirx.stmt_functor.ir_transform(body, None, _short, ["tirx.For"])


def _is_short(loop: tirx.For) -> bool:
    is_plain = loop.kind == tirx.ForKind.SERIAL and loop.thread_binding is None and MARK not in loop.annotations
    return is_plain and loop.step is None and not isinstance(loop.extent, tirx.IntImm) and not leaves_loop(loop)


def _long(loop: tirx.For, analyzer: arith.Analyzer, around: set[tirx.Var]) -> tirx.Stmt | None:
    """The long loop; None where nothing is known of the bounds, or they don't depend on loops."""
    used = {*tirx.analysis.undefined_vars(loop.extent), *tirx.analysis.undefined_vars(loop.min)}
    if not used or not used <= around or any(_computes(e) for e in (loop.min, loop.extent)):
        return None
    end = analyzer.simplify(loop.min + loop.extent)
    longest = analyzer.const_int_bound(end).max_value
    if not 0 < longest < _LONGEST or not analyzer.can_prove(loop.min >= 0):
        return None
    condition: tirx.PrimExpr = loop.loop_var < end
    if not analyzer.can_prove_equal(loop.min, 0):
        condition = tirx.And(loop.loop_var >= loop.min, condition)
    body = tirx.IfThenElse(condition, loop.body, None)
    annotations = {**dict(loop.annotations), MARK: True}
    return tirx.For(loop.loop_var, 0, int(longest), loop.kind, body, None, annotations)


def _computes(expr: tirx.PrimExpr) -> bool:
    """Whether the expression reads memory or calls anything."""
    return bool(nodes(expr, tirx.BufferLoad, tirx.Call))


def _short(loop: tirx.For) -> tirx.Stmt | None:
    if MARK not in loop.annotations:
        return None
    annotations = {key: value for key, value in loop.annotations.items() if key != MARK}
    found = running(loop)
    if found is None:
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, None, annotations)
    start, end = found
    analyzer = arith.Analyzer()
    start, extent = analyzer.simplify(start), analyzer.simplify(tirx.max(end - start, 0))
    return tirx.For(loop.loop_var, start, extent, loop.kind, loop.body.then_case, None, annotations)


def running(loop: tirx.For) -> tuple[tirx.PrimExpr, tirx.PrimExpr] | None:
    """From where on, and up to where, a loop that `lengthen` made does something; None for other loops."""
    guard = loop.body if MARK in loop.annotations else None
    limits = _limits(guard.condition, loop.loop_var) if isinstance(guard, tirx.IfThenElse) else None
    if limits is None:
        return None
    lows, highs = limits
    return reduce(tirx.max, lows, loop.min), reduce(tirx.min, highs, loop.min + loop.extent)


def _limits(condition: tirx.PrimExpr, var: tirx.Var) -> tuple[list[tirx.PrimExpr], list[tirx.PrimExpr]] | None:
    """From where on and up to where a condition lets the variable go, whichever of its parts other passes left and
    however they wrote them; None if it says anything else."""
    lows, highs, todo = list[tirx.PrimExpr](), list[tirx.PrimExpr](), [condition]
    while todo:
        part = todo.pop()
        if isinstance(part, tirx.And):
            todo += [part.b, part.a]
            continue
        if type(part) not in _COMPARISONS:
            return None
        is_below, or_equal = _COMPARISONS[type(part)]
        difference = part.a - part.b if is_below else part.b - part.a  # < 0, or <= 0
        at_0, at_1 = (tirx.stmt_functor.substitute(difference, {var: tirx.IntImm(var.dtype, n)}) for n in (0, 1))
        analyzer = arith.Analyzer()
        if not analyzer.can_prove_equal(difference, at_0 + (at_1 - at_0) * var):
            return None
        if analyzer.can_prove_equal(at_1 - at_0, 1):
            highs.append(or_equal - at_0)
        elif analyzer.can_prove_equal(at_1 - at_0, -1):
            lows.append(at_0 + 1 - or_equal)
        else:
            return None
    return lows, highs


#: Whether a comparison says that its first side is below, and whether it may be equal.
_COMPARISONS = {tirx.LT: (True, 0), tirx.LE: (True, 1), tirx.GT: (False, 0), tirx.GE: (False, 1)}


ONE_ITERATION_MARK = "mesh_tensor.one_iteration"


def one_iteration(var: tirx.Var, extent: int, place: tirx.PrimExpr, body: tirx.Stmt) -> tirx.For:
    """`body`, in the iteration of a loop of `var` at which it equals `place`."""
    only = tirx.IfThenElse(tirx.EQ(var, place), body, None)
    return tirx.For(var, 0, extent, tirx.ForKind.SERIAL, only, None, {ONE_ITERATION_MARK: 1})


def collapse(body: tirx.Stmt) -> tirx.Stmt:
    """Without such loops, as far as they are still what they were made."""
    if not any(ONE_ITERATION_MARK in loop.annotations for loop in nodes(body, tirx.For)):
        return body
    analyzer = loop_ranges(body)

    def direct(loop: tirx.For) -> tirx.Stmt | None:
        only = loop.body
        if ONE_ITERATION_MARK not in loop.annotations or not isinstance(only, tirx.IfThenElse):
            return None
        place = _solved(loop.loop_var, only.condition, analyzer)
        if place is None:
            return None
        inside = [place >= 0, place < loop.extent]
        body = tirx.stmt_functor.substitute(only.then_case, {loop.loop_var: place})
        left = [condition for condition in inside if not analyzer.can_prove(condition)]
        return tirx.IfThenElse(left[0] if len(left) == 1 else tirx.And(*left), body, None) if left else body

    return tirx.stmt_functor.ir_transform(body, None, direct, ["tirx.For"])


def _solved(var: tirx.Var, condition: tirx.PrimExpr, analyzer: arith.Analyzer) -> tirx.PrimExpr | None:
    """The one value of the variable for which the condition holds: it is `var + offset == place`."""
    if not isinstance(condition, tirx.EQ):
        return None
    side, place = condition.a, condition.b
    step = analyzer.simplify(tirx.stmt_functor.substitute(side, {var: var + 1}) - side)
    if not (isinstance(step, tirx.IntImm) and int(step) == 1) or var in tirx.analysis.undefined_vars(place):
        return None
    return analyzer.simplify(place - tirx.stmt_functor.substitute(side, {var: tirx.IntImm(var.dtype, 0)}))


#: Marks the outer one of two loops that `unfuse` made; the value is the fused loop's thread binding.
_FUSED = "mesh_tensor.fused"
_ARITHMETIC = [
    f"tirx.{name}" for name in ("FloorDiv", "FloorMod", "Add", "Sub", "Mul", "LT", "LE", "GT", "GE", "EQ", "NE", "And")
]


def unfuse(func: tirx.PrimFunc, *, alone: bool = False) -> tirx.PrimFunc:
    """Split every grid loop of `func` that is only used as `v // c` and `v % c`, with a constant c that divides its
    extent, or in indices that come to that: `(v * 16 + i) // 64` is `v // 4` where i is below 16. With `alone`, also
    those that are used on their own besides."""
    body = func.body
    if not nodes(body, tirx.FloorDiv, tirx.FloorMod):
        return func
    for loop in _grid_loops(body):
        split = _split_loop(body, loop.loop_var, alone)
        if split is None and _divides(loop):
            split = _split_loop(_simplified(body), loop.loop_var, alone)
        body = body if split is None else split
    return func if body.same_as(func.body) else func.with_body(body)


def fuse(body: tirx.Stmt) -> tirx.Stmt:
    """Undo `unfuse`."""
    return tirx.stmt_functor.ir_transform(body, None, _join, ["tirx.For"])


def _grid_loops(body: tirx.Stmt) -> list[tirx.For]:
    return [loop for loop in nodes(body, tirx.For) if loop.thread_binding is not None]


def _split_loop(body: tirx.Stmt, var: tirx.Var, alone: bool) -> tirx.Stmt | None:
    """The body with two loops in place of that of `var`, or None if its variable is used otherwise."""
    part = next(_part(loop) for loop in _grid_loops(body) if loop.loop_var.same_as(var))
    if part is None:
        return None
    split = _replace_loop(body, var, part, alone)
    return None if any(loop.loop_var.same_as(var) for loop in _grid_loops(split)) else split


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
    inner = tirx.For(low, 0, part, tirx.ForKind.SERIAL, body)
    marks = {**dict(loop.annotations), _FUSED: loop.thread_binding}
    return tirx.For(high, 0, int(loop.extent) // part, tirx.ForKind.SERIAL, inner, None, marks)


def _join(node: tirx.For) -> tirx.Stmt | None:
    if _FUSED not in node.annotations:
        return None
    inner = node.body
    var = tirx.Var(node.loop_var.name.removesuffix("_div"), node.loop_var.dtype)
    parts = {node.loop_var: tirx.floordiv(var, inner.extent), inner.loop_var: tirx.floormod(var, inner.extent)}
    body = tirx.stmt_functor.substitute(inner.body, parts)
    marks = {key: value for key, value in node.annotations.items() if key != _FUSED}
    kind = tirx.ForKind.THREAD_BINDING
    return tirx.For(var, 0, node.extent * inner.extent, kind, body, node.annotations[_FUSED], marks)
