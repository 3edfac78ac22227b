"""Loops of which one iteration does something: `for v in range(n): if v == place: body`.

Where `place` is proved to be always one of them, such a loop around `body` changes nothing, and gives an index that is
computed in a way that nobody understands a loop variable of its own. `collapse` undoes it: over whatever part of the
iterations is left by then, the body runs if `place` is among them.
"""

from __future__ import annotations

from tvm import arith, tirx

from .nodes import nodes
from .ranges import loop_ranges

MARK = "mesh_tensor.one_iteration"


def one_iteration(var: tirx.Var, extent: int, place: tirx.PrimExpr, body: tirx.Stmt) -> tirx.For:
    """`body`, in the iteration of a loop of `var` at which it equals `place`."""
    only = tirx.IfThenElse(tirx.EQ(var, place), body, None)
    return tirx.For(var, 0, extent, tirx.ForKind.SERIAL, only, None, {MARK: 1})


def collapse(body: tirx.Stmt) -> tirx.Stmt:
    """Without such loops, as far as they are still what they were made."""
    if not any(MARK in loop.annotations for loop in nodes(body, tirx.For)):
        return body
    analyzer = loop_ranges(body)

    def direct(loop: tirx.For) -> tirx.Stmt | None:
        only = loop.body
        if MARK not in loop.annotations or not isinstance(only, tirx.IfThenElse):
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
