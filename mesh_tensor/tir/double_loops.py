"""Loops that are two: over two dims at once, and those that do something every n iterations.

A grid's `bz` with `b = bz // heads` and `h = bz % heads` becomes the two loops that it stands for, so that each dim has
a loop of its own, and three for `b = bz // (heads * chunks)`, `h = bz // chunks % heads` and `c = bz % chunks`; `fuse`
puts those of a grid together again, over whatever extents they have by then.

`for k: {...; if (k + 1) % n == 0: promote}`, as in products that add what they have summed up to a second accumulator
now and then, becomes `for outer: {for inner: ...; promote}`, so that nothing depends on a remainder of k; `join` makes
one loop of them again, over whatever intervals there are by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tvm import arith, ir, tirx

from .effects import leaves_kernel, leaves_loop, op_name
from .linear import holds_always, loop_ranges, loops_in
from .nodes import is_const, nodes
from .prover import Prover
from .rewrite import call_like, rewritten, sequence, statements, without_mark

#: Marks the outer one of two loops that `unfuse` made; the value is the fused loop's thread binding, 0 if it has none.
_FUSED = "mesh_tensor.fused"
_DIVISIONS = ["tirx.FloorDiv", "tirx.FloorMod"]
_PIPELINED = {"num_stages"}  # of loops within the grid, what the inner one of two keeps
_ARITHMETIC = [
    f"tirx.{name}" for name in ("FloorDiv", "FloorMod", "Add", "Sub", "Mul", "LT", "LE", "GT", "GE", "EQ", "NE", "And")
]


def unfuse(func: tirx.PrimFunc, *, alone: bool = False, within: bool = False) -> tirx.PrimFunc:
    """Split every grid loop of `func` that is only used as `v // c` and `v % c`, with a constant c that divides its
    extent, or several that divide each other, or in indices that come to that: `(v * 16 + i) // 64` is `v // 4` where i
    is below 16. With `alone`, also those that are used on their own besides; with `within`, also loops within the
    grid."""
    body = func.body
    if not nodes(body, tirx.FloorDiv, tirx.FloorMod):
        return func
    first, tried = _loops(body, within), list[tirx.Var]()
    while loop := next((x for x in (*first, *_grid(body)) if not any(map(x.loop_var.same_as, tried))), None):
        tried.append(loop.loop_var)
        split = _split_loop(body, loop.loop_var, alone, within)
        if split is None and any(
            loop.loop_var in _variables(node) for node in nodes(loop.body, tirx.FloorDiv, tirx.FloorMod)
        ):
            split = _split_loop(simplified(body), loop.loop_var, alone, within)
        body = body if split is None else split
    return func if body.same_as(func.body) else func.with_body(body)


def fuse(body: tirx.Stmt) -> tirx.Stmt:
    """Undo `unfuse`."""
    return tirx.stmt_functor.ir_transform(body, None, _join, ["tirx.For"])


def _grid(body: tirx.Stmt) -> list[tirx.For]:
    """The loops of the grid, also the inner ones of what was split."""
    every = nodes(body, tirx.For)
    inner = [loop.body for loop in every if _FUSED in loop.annotations]
    return [loop for loop in every if loop.thread_binding is not None or any(map(loop.same_as, inner))]


def _loops(body: tirx.Stmt, within: bool) -> list[tirx.For]:
    """The loops of the grid and, if asked for, those `within` that only count."""
    grid = _grid(body)
    return [
        loop
        for loop in nodes(body, tirx.For)
        if any(map(loop.same_as, grid))
        or (within and is_const(loop.min, 0) and loop.annotations.keys() <= _PIPELINED and loop.step is None)
    ]


def _split_loop(body: tirx.Stmt, var: tirx.Var, alone: bool, within: bool) -> tirx.Stmt | None:
    """The body with two loops in place of that of `var`, or None if its variable is used otherwise."""
    in_grid = any(loop.loop_var.same_as(var) for loop in _grid(body))
    parts = next(_parts(loop, in_grid) for loop in _loops(body, within) if loop.loop_var.same_as(var))
    if not parts:
        return None

    def apart(node: tirx.For) -> tirx.Stmt | None:
        return _split(node, parts, alone, in_grid) if node.loop_var.same_as(var) else None

    split = tirx.stmt_functor.ir_transform(body, None, apart, ["tirx.For"])
    return None if any(loop.loop_var.same_as(var) for loop in _loops(split, within)) else split


def simplified(body: tirx.Stmt) -> tirx.Stmt:
    """The body with indices and conditions of loop variables in a simpler form, as the loops' ranges allow."""
    analyzer, variables = loop_ranges(body), {loop.loop_var for loop in loops_in(body)}

    def simplify(node: tirx.PrimExpr) -> tirx.PrimExpr | None:
        is_index = node.dtype in ("int32", "int64", "bool") and not nodes(node, tirx.BufferLoad, tirx.Call)
        return analyzer.simplify(node) if is_index and variables.issuperset(_variables(node)) else None

    return tirx.stmt_functor.ir_transform(body, simplify, None, _ARITHMETIC)


def _variables(node: tirx.PrimExpr) -> list[tirx.Var]:
    return list(tirx.analysis.undefined_vars(node))


def _parts(loop: tirx.For, in_grid: bool) -> list[int]:
    """The constants by which the loop's variable is divided, the largest first, if each divides the ones before it, and
    these the extent; else none. Of a loop within the grid that is only the smallest, of which the others are multiples:
    what it walks is then one dim of blocks."""
    used = [node.b for node in nodes(loop.body, tirx.FloorDiv, tirx.FloorMod) if loop.loop_var.same_as(node.a)]
    parts = sorted({int(by) if isinstance(by, tirx.IntImm) else 0 for by in used}, reverse=True)
    if not parts or parts[-1] <= 0 or not isinstance(loop.extent, tirx.IntImm):
        return []
    chain = [int(loop.extent), *parts]
    if in_grid:
        return parts if all(a % b == 0 for a, b in zip(chain, parts, strict=False)) else []
    return parts[-1:] if all(each % parts[-1] == 0 for each in chain) else []


def _split(loop: tirx.For, parts: Sequence[int], alone: bool, in_grid: bool) -> tirx.Stmt | None:
    """The two loops, or None where the variable is used on its own, too, and may not be."""
    var, part, dtype = loop.loop_var, parts[0], loop.loop_var.dtype
    high, low = tirx.Var(f"{var.name}_div", dtype), tirx.Var(f"{var.name}_mod", dtype)
    analyzer = Prover()
    analyzer.bind(low, ir.Range(tirx.IntImm(dtype, 0), tirx.IntImm(dtype, part)))

    def replace(expr: tirx.FloorDiv | tirx.FloorMod) -> tirx.PrimExpr | None:
        if not var.same_as(expr.a):
            # of a digit between two others, `v // 4 % 8`, there is `(high * 8 + low // 4) % 8` by now
            return analyzer.simplify(expr) if len(parts) > 1 and high in _variables(expr.a) else None
        by = int(expr.b)
        if by > part:
            return None
        if isinstance(expr, tirx.FloorMod):
            return low if by == part else tirx.floormod(low, by)
        return high if by == part else high * (part // by) + tirx.floordiv(low, by)

    body = tirx.stmt_functor.ir_transform(loop.body, None, replace, _DIVISIONS)
    if not alone and any(var.same_as(used) for used in nodes(body, tirx.Var)):
        return None
    body = tirx.stmt_functor.substitute(body, {var: high * part + low})
    if not in_grid:
        body = _with_plain_divisions(body, {high: int(loop.extent) // part, low: part})
        inner = tirx.For(low, 0, part, loop.kind, _by_cases(body, low, part), None, loop.annotations)
        return tirx.For(high, 0, int(loop.extent) // part, loop.kind, inner)
    inner = tirx.For(low, 0, part, tirx.ForKind.SERIAL, body)
    binding = tirx.IntImm("int32", 0) if loop.thread_binding is None else loop.thread_binding
    marks = {**dict(loop.annotations), _FUSED: binding}
    return tirx.For(high, 0, int(loop.extent) // part, tirx.ForKind.SERIAL, inner, None, marks)


def _with_plain_divisions(body: tirx.Stmt, extents: Mapping[tirx.Var, int]) -> tirx.Stmt:
    """The body of loops that go so far, in which divisions are simplified."""
    analyzer = loop_ranges(body)
    for var, extent in extents.items():
        analyzer.update(var, arith.ConstIntBound(0, extent - 1), True)
    return tirx.stmt_functor.ir_transform(body, None, analyzer.simplify, _DIVISIONS)


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
    if _FUSED not in node.annotations:
        return None
    inner = node.body
    var = tirx.Var(node.loop_var.name.removesuffix("_div"), node.loop_var.dtype)
    parts = {node.loop_var: tirx.floordiv(var, inner.extent), inner.loop_var: tirx.floormod(var, inner.extent)}
    body = tirx.stmt_functor.substitute(inner.body, parts)
    marks = {key: value for key, value in node.annotations.items() if key != _FUSED}
    extent, binding = node.extent * inner.extent, node.annotations[_FUSED]
    if isinstance(binding, tirx.IntImm):
        return tirx.For(var, 0, extent, tirx.ForKind.SERIAL, body, None, marks)
    return tirx.For(var, 0, extent, tirx.ForKind.THREAD_BINDING, body, binding, marks)


#: Marks the two loops that `with_intervals` made.
_INTERVAL = "mesh_tensor.interval"


def with_intervals(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same kernel, with two loops for each one that does something at the start or the end of intervals which
    divide its extent."""
    if not nodes(func.body, tirx.FloorMod):
        return func
    return rewritten(func, _apart, tirx.For)


def join(body: tirx.Stmt) -> tirx.Stmt:
    """Undo `with_intervals`."""
    if not any(_INTERVAL in loop.annotations for loop in nodes(body, tirx.For)):
        return body
    body = tirx.stmt_functor.ir_transform(body, None, _joined, ["tirx.For"])
    return tirx.stmt_functor.ir_transform(body, None, lambda loop: without_mark(loop, _INTERVAL), ["tirx.For"])


def _apart(loop: tirx.For) -> tirx.Stmt | None:
    is_plain = loop.kind == tirx.ForKind.SERIAL and loop.thread_binding is None and loop.step is None
    if not is_plain or _INTERVAL in loop.annotations or not isinstance(loop.body, tirx.SeqStmt):
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
    if not isinstance(stmt, tirx.IfThenElse) or not (
        stmt.else_case is None
        or (isinstance(stmt.else_case, tirx.Evaluate) and isinstance(stmt.else_case.value, tirx.IntImm))
    ):
        return None
    here = tirx.EQ(tirx.floormod(loop.loop_var, length), tirx.IntImm(loop.loop_var.dtype, place))
    agree = tirx.Or(tirx.And(stmt.condition, here), tirx.And(tirx.Not(stmt.condition), tirx.Not(here)))
    return stmt.then_case if holds_always(agree, [(loop.loop_var, loop.min, loop.extent)], []) else None


def _two_loops(
    loop: tirx.For, length: int, first: list[tirx.Stmt], inside: list[tirx.Stmt], last: list[tirx.Stmt]
) -> tirx.Stmt | None:
    var = loop.loop_var
    outer, inner = tirx.Var(f"{var.name}_div", var.dtype), tirx.Var(f"{var.name}_mod", var.dtype)
    known = {var, *tirx.analysis.undefined_vars(loop)}
    parts = [sequence(part) for part in (first, inside, last)]
    if not inside or any(used not in known for part in parts for used in tirx.analysis.undefined_vars(part)):
        return None  # a value that is bound in one of them is used in another
    extents = {outer: int(loop.extent) // length, inner: length}

    def placed(stmts: list[tirx.Stmt], at: tirx.PrimExpr) -> list[tirx.Stmt]:
        made = [tirx.stmt_functor.substitute(stmt, {var: outer * length + at}) for stmt in stmts]
        return [_with_plain_divisions(stmt, extents) for stmt in made]

    annotations = {**dict(loop.annotations), _INTERVAL: "inner"}
    each = tirx.For(inner, 0, length, loop.kind, sequence(placed(inside, inner)), None, annotations)
    body = sequence(
        [*placed(first, tirx.IntImm(var.dtype, 0)), each, *placed(last, tirx.IntImm(var.dtype, length - 1))]
    )
    return tirx.For(outer, 0, int(loop.extent) // length, loop.kind, body, None, {_INTERVAL: "outer"})


def _joined(loop: tirx.For) -> tirx.Stmt | None:
    """One loop for two that are still what they were made, seen from the outer one."""
    if loop.annotations.get(_INTERVAL) != "outer":
        return None
    stmts = statements(loop.body)
    at = next((i for i, stmt in enumerate(stmts) if isinstance(stmt, tirx.For) and _INTERVAL in stmt.annotations), None)
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
    analyzer = Prover()

    def whole(expr: tirx.Add) -> tirx.PrimExpr | None:
        divided = any(var.same_as(node.a) for node in nodes(expr, tirx.FloorMod))
        return analyzer.simplify(expr) if divided and not nodes(expr, tirx.BufferLoad, tirx.Call) else None

    return tirx.stmt_functor.ir_transform(body, None, whole, ["tirx.Add"])


def _is_whole(outer: tirx.For, inner: tirx.For) -> bool:
    """Whether both start at 0, and every interval is as long as the others."""
    return is_const(outer.min, 0) and is_const(inner.min, 0) and isinstance(inner.extent, tirx.IntImm)
