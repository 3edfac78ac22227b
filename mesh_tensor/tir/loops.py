"""Loops in the form in which they are analysed: over all positions of what they walk, from the first to the last.

Some iterations of a loop may do nothing: the loop ends, or starts, where the block that it belongs to says so
(`for ko in range(bx + 1)` of a causal mask); or `for v in range(n): if v == place: body`. The first become loops over
all that any block needs, with a condition around the body; `shorten` makes bounds of the conditions again, over
whatever extent the loop has by then. Where `place` is proved to be always one of them, the second around `body` changes
nothing, and gives an index that is computed in a way that nobody understands a loop variable of its own. `shorten`
undoes that, too: over whatever part of the iterations is left by then, the body runs if `place` is among them.

Loops that walk dims from their ends (`for i in range(n): t = n - 1 - i`, as gradients of recurrences do) become loops
over t with a mark that their iterations run from the last to the first; `backward` makes that of them again. Who asks
what comes before an iteration has to ask `is_backward`.
"""

from __future__ import annotations

from functools import reduce

from tvm import tirx

from .effects import leaves_kernel, leaves_loop
from .linear import loop_ranges, loops_in
from .nodes import conjuncts, is_const, nodes
from .prover import Prover
from .rewrite import loop_like, rewritten, without_mark
from .user_reports import prints

#: Marks a loop that `lengthen` made.
SHORT = "mesh_tensor.short"
_LONGEST = 2**30


def lengthen(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Every serial loop whose bounds depend on loops around it goes from 0 to the largest end that it can have."""
    if not any(_is_short(loop) for loop in loops_in(func.body)):
        return func
    analyzer = loop_ranges(func.body)
    around = {loop.loop_var for loop in loops_in(func.body)}

    def visit(loop: tirx.For) -> tirx.Stmt | None:
        return _long(loop, analyzer, around) if _is_short(loop) else None

    return rewritten(func, visit, tirx.For)


def shorten(body: tirx.Stmt) -> tirx.Stmt:
    """Undo `lengthen` and `one_iteration`, as far as loops are still what these made: only iterations that do something
    are left."""
    return _collapsed(tirx.stmt_functor.ir_transform(body, None, _short, ["tirx.For"]))


def _is_short(loop: tirx.For) -> bool:
    is_plain = loop.kind == tirx.ForKind.SERIAL and loop.thread_binding is None and SHORT not in loop.annotations
    return is_plain and loop.step is None and not isinstance(loop.extent, tirx.IntImm) and not leaves_loop(loop)


def _long(loop: tirx.For, analyzer: Prover, around: set[tirx.Var]) -> tirx.Stmt | None:
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
    annotations = {**dict(loop.annotations), SHORT: True}
    return tirx.For(loop.loop_var, 0, int(longest), loop.kind, body, None, annotations)


def _computes(expr: tirx.PrimExpr) -> bool:
    """Whether the expression reads memory or calls anything."""
    return bool(nodes(expr, tirx.BufferLoad, tirx.Call))


def _short(loop: tirx.For) -> tirx.Stmt | None:
    if SHORT not in loop.annotations:
        return None
    found, plain = running(loop), without_mark(loop, SHORT)
    if found is None:
        return plain
    start, end = found
    analyzer = Prover()
    start, extent = analyzer.simplify(start), analyzer.simplify(tirx.max(end - start, 0))
    return loop_like(plain, extent, loop.body.then_case, start=start)


def running(loop: tirx.For) -> tuple[tirx.PrimExpr, tirx.PrimExpr] | None:
    """From where on, and up to where, a loop that `lengthen` made does something; None for other loops."""
    guard = loop.body if SHORT in loop.annotations else None
    limits = _limits(guard.condition, loop.loop_var) if isinstance(guard, tirx.IfThenElse) else None
    if limits is None:
        return None
    lows, highs = limits
    return reduce(tirx.max, lows, loop.min), reduce(tirx.min, highs, loop.min + loop.extent)


def _limits(condition: tirx.PrimExpr, var: tirx.Var) -> tuple[list[tirx.PrimExpr], list[tirx.PrimExpr]] | None:
    """From where on and up to where a condition lets the variable go, whichever of its parts other passes left and
    however they wrote them; None if it says anything else."""
    lows, highs = list[tirx.PrimExpr](), list[tirx.PrimExpr]()
    for part in conjuncts(condition):
        if type(part) not in _COMPARISONS:
            return None
        is_below, or_equal = _COMPARISONS[type(part)]
        difference = part.a - part.b if is_below else part.b - part.a  # < 0, or <= 0
        at_0, at_1 = (tirx.stmt_functor.substitute(difference, {var: tirx.IntImm(var.dtype, n)}) for n in (0, 1))
        analyzer = Prover()
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


ONE_ITERATION = "mesh_tensor.one_iteration"


def one_iteration(var: tirx.Var, extent: int, place: tirx.PrimExpr, body: tirx.Stmt) -> tirx.For:
    """`body`, in the iteration of a loop of `var` at which it equals `place`."""
    only = tirx.IfThenElse(tirx.EQ(var, place), body, None)
    return tirx.For(var, 0, extent, tirx.ForKind.SERIAL, only, None, {ONE_ITERATION: 1})


def is_one_iteration(loop: tirx.For) -> bool:
    """Whether `one_iteration` made the loop."""
    return ONE_ITERATION in loop.annotations


def _collapsed(body: tirx.Stmt) -> tirx.Stmt:
    """Without loops of which one iteration does something."""
    if not any(map(is_one_iteration, nodes(body, tirx.For))):
        return body
    analyzer = loop_ranges(body)

    def direct(loop: tirx.For) -> tirx.Stmt | None:
        only = loop.body
        if not is_one_iteration(loop) or not isinstance(only, tirx.IfThenElse):
            return None
        place = _solved(loop.loop_var, only.condition, analyzer)
        if place is None:
            return None
        inside = [place >= 0, place < loop.extent]
        body = tirx.stmt_functor.substitute(only.then_case, {loop.loop_var: place})
        left = [condition for condition in inside if not analyzer.can_prove(condition)]
        return tirx.IfThenElse(left[0] if len(left) == 1 else tirx.And(*left), body, None) if left else body

    return tirx.stmt_functor.ir_transform(body, None, direct, ["tirx.For"])


def _solved(var: tirx.Var, condition: tirx.PrimExpr, analyzer: Prover) -> tirx.PrimExpr | None:
    """The one value of the variable for which the condition holds: it is `var + offset == place`."""
    if not isinstance(condition, tirx.EQ):
        return None
    side, place = condition.a, condition.b
    step = analyzer.simplify(tirx.stmt_functor.substitute(side, {var: var + 1}) - side)
    if not is_const(step, 1) or var in tirx.analysis.undefined_vars(place):
        return None
    return analyzer.simplify(place - tirx.stmt_functor.substitute(side, {var: tirx.IntImm(var.dtype, 0)}))


#: Marks a loop whose iterations run from the last to the first.
BACKWARD = "mesh_tensor.backward"


def forward(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Every serial loop that walks dims of parameters from their ends, and none from its start, goes from 0 over the
    dims' own positions, with a mark."""
    params = set(func.buffer_map.values())
    found = {loop.loop_var for loop in loops_in(func.body) if _walks_plainly(loop) and _walks_back(loop, params)}
    if not found or prints(func.body):
        return func
    analyzer = loop_ranges(func.body)

    def turn(loop: tirx.For) -> tirx.Stmt | None:
        if loop.loop_var not in found:
            return None
        last = analyzer.simplify(loop.min + loop.extent - 1)
        marks = {**dict(loop.annotations), BACKWARD: True}
        return tirx.For(loop.loop_var, 0, loop.extent, loop.kind, _from_end(loop, last), None, marks)

    return rewritten(func, turn, tirx.For)


def backward(body: tirx.Stmt) -> tirx.Stmt:
    """Undo `forward`."""
    if not any(map(is_backward, nodes(body, tirx.For))):
        return body

    def turn(loop: tirx.For) -> tirx.Stmt | None:
        if not is_backward(loop):
            return None
        marks = {key: value for key, value in loop.annotations.items() if key != BACKWARD}
        inner = _from_end(loop, loop.min * 2 + loop.extent - 1)
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, inner, None, marks)

    return tirx.stmt_functor.ir_transform(body, None, turn, ["tirx.For"])


def is_backward(loop: tirx.For | None) -> bool:
    """Whether the iterations of a loop run from the last to the first."""
    return loop is not None and BACKWARD in loop.annotations


def _from_end(loop: tirx.For, last: tirx.PrimExpr) -> tirx.Stmt:
    """A loop's body with `last - v` for its variable, in places that are as plain as they can be."""
    analyzer = Prover()
    body = tirx.stmt_functor.substitute(loop.body, {loop.loop_var: last - loop.loop_var})

    def plain(expr: tirx.PrimExpr) -> tirx.PrimExpr | None:
        is_place = expr.dtype in ("int32", "int64") and not nodes(expr, tirx.BufferLoad, tirx.Call)
        return analyzer.simplify(expr) if is_place else None

    return tirx.stmt_functor.ir_transform(body, plain, None, [f"tirx.{kind}" for kind in ("Add", "Sub", "Mul")])


def _walks_plainly(loop: tirx.For) -> bool:
    is_serial = loop.kind == tirx.ForKind.SERIAL and loop.thread_binding is None and loop.step is None
    marked = any(str(key).startswith("mesh_tensor.") for key in loop.annotations)
    return is_serial and not marked and not leaves_loop(loop) and not leaves_kernel(loop)


def _walks_back(loop: tirx.For, params: set[tirx.Buffer]) -> bool:
    """Whether positions in parameters fall by a constant as the loop goes on, and none rise by one."""
    var, analyzer = loop.loop_var, Prover()
    indices = [
        index
        for access in nodes(loop.body, tirx.BufferLoad, tirx.BufferStore)
        for index in (access.indices if access.buffer in params else ())
        if not nodes(index, tirx.BufferLoad) and any(var.same_as(used) for used in tirx.analysis.undefined_vars(index))
    ]
    steps = [analyzer.simplify(tirx.stmt_functor.substitute(index, {var: var + 1}) - index) for index in indices]
    known = [int(step) for step in steps if isinstance(step, tirx.IntImm) and int(step)]
    return bool(known) and max(known) < 0
