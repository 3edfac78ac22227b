"""Loops that walk dims from their ends: `for i in range(n): t = n - 1 - i`, as gradients of recurrences do.

For analysis and rewriting such a loop becomes one over t, with a mark that its iterations run from the last to the
first; `backward` makes that of it again, over whatever range it has by then. Who asks what comes before an iteration
has to ask `is_backward`.
"""

from __future__ import annotations

from tvm import arith, tirx

from .effects import leaves_kernel, leaves_loop
from .linear import loop_ranges, loops_in
from .nodes import nodes
from .user_reports import prints

#: Marks a loop whose iterations run from the last to the first.
MARK = "mesh_tensor.backward"


def forward(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Every serial loop that walks dims of parameters from their ends, and none from its start, goes from 0 over the
    dims' own positions, with a mark."""
    params = set(func.buffer_map.values())
    found = {loop.loop_var for loop in loops_in(func.body) if _is_plain(loop) and _walks_back(loop, params)}
    if not found or prints(func.body):
        return func
    analyzer = loop_ranges(func.body)

    def turn(loop: tirx.For) -> tirx.Stmt | None:
        if loop.loop_var not in found:
            return None
        last = analyzer.simplify(loop.min + loop.extent - 1)
        marks = {**dict(loop.annotations), MARK: True}
        return tirx.For(loop.loop_var, 0, loop.extent, loop.kind, _from_end(loop, last), None, marks)

    return func.with_body(tirx.stmt_functor.ir_transform(func.body, None, turn, ["tirx.For"]))


def backward(body: tirx.Stmt) -> tirx.Stmt:
    """Undo `forward`."""
    if not any(map(is_backward, nodes(body, tirx.For))):
        return body

    def turn(loop: tirx.For) -> tirx.Stmt | None:
        if not is_backward(loop):
            return None
        marks = {key: value for key, value in loop.annotations.items() if key != MARK}
        inner = _from_end(loop, loop.min * 2 + loop.extent - 1)
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, inner, None, marks)

    return tirx.stmt_functor.ir_transform(body, None, turn, ["tirx.For"])


def is_backward(loop: tirx.For | None) -> bool:
    """Whether the iterations of a loop run from the last to the first."""
    return loop is not None and MARK in loop.annotations


def _from_end(loop: tirx.For, last: tirx.PrimExpr) -> tirx.Stmt:
    """A loop's body with `last - v` for its variable, in places that are as plain as they can be."""
    analyzer = arith.Analyzer()
    body = tirx.stmt_functor.substitute(loop.body, {loop.loop_var: last - loop.loop_var})

    def plain(expr: tirx.PrimExpr) -> tirx.PrimExpr | None:
        is_place = expr.dtype in ("int32", "int64") and not nodes(expr, tirx.BufferLoad, tirx.Call)
        return analyzer.simplify(expr) if is_place else None

    return tirx.stmt_functor.ir_transform(body, plain, None, [f"tirx.{kind}" for kind in ("Add", "Sub", "Mul")])


def _is_plain(loop: tirx.For) -> bool:
    is_serial = loop.kind == tirx.ForKind.SERIAL and loop.thread_binding is None and loop.step is None
    marked = any(str(key).startswith("mesh_tensor.") for key in loop.annotations)
    return is_serial and not marked and not leaves_loop(loop) and not leaves_kernel(loop)


def _walks_back(loop: tirx.For, params: set[tirx.Buffer]) -> bool:
    """Whether positions in parameters fall by a constant as the loop goes on, and none rise by one."""
    var, analyzer = loop.loop_var, arith.Analyzer()
    indices = [
        index
        for access in nodes(loop.body, tirx.BufferLoad, tirx.BufferStore)
        for index in (access.indices if access.buffer in params else ())
        if not nodes(index, tirx.BufferLoad) and any(var.same_as(used) for used in tirx.analysis.undefined_vars(index))
    ]
    steps = [analyzer.simplify(tirx.stmt_functor.substitute(index, {var: var + 1}) - index) for index in indices]
    known = [int(step) for step in steps if isinstance(step, tirx.IntImm) and int(step)]
    return bool(known) and max(known) < 0
