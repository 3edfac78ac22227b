"""Atomics that give the old value, as a load and an update before the statement that uses it.

A program runs as one thread on a CPU, and programs one after the other, so nothing comes between the two.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from mesh_tensor.tir.effects import op_name
from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.tile_ops import Atomic, parse_previous

from .combine import combine
from .exprs import cast, map_children, seq


def update_before_use(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel with the old values of atomics in variables. Those that are not always computed, such as one in an arm
    of `T.if_then_else`, stay."""
    kinds = [f"tirx.{kind}" for kind in ("BufferStore", "Bind", "Evaluate", "IfThenElse")]
    return func.with_body(tirx.stmt_functor.ir_transform(func.body, None, _hoisted, kinds))


def _hoisted(stmt: tirx.Stmt) -> tirx.Stmt | None:
    before: list[tirx.Stmt] = []

    def taken(expr: tirx.PrimExpr) -> tirx.PrimExpr:
        return _taken(expr, before)

    new = _REBUILD[type(stmt)](stmt, taken)
    alone = isinstance(new, tirx.Evaluate) and isinstance(new.value, tirx.Var)
    return seq(before if alone else [*before, new]) if before else None


_REBUILD: dict[type, Callable[..., tirx.Stmt]] = {
    tirx.BufferStore: lambda s, f: tirx.BufferStore(s.buffer, f(s.value), [f(index) for index in s.indices]),
    tirx.Bind: lambda s, f: tirx.Bind(s.var, f(s.value)),
    tirx.Evaluate: lambda s, f: tirx.Evaluate(f(s.value)) if parse_previous(s.value) else s,
    tirx.IfThenElse: lambda s, f: tirx.IfThenElse(f(s.condition), s.then_case, s.else_case),
}


def _taken(expr: tirx.PrimExpr, before: list[tirx.Stmt]) -> tirx.PrimExpr:
    """The expression with the atomics in it replaced by variables, which `before` sets."""
    atomic = parse_previous(expr)
    if atomic is not None:
        return _previous(atomic, before)
    if isinstance(expr, (tirx.And, tirx.Or, tirx.Select, tirx.Let)) or op_name(expr) == "tirx.if_then_else":
        return expr
    if not any(parse_previous(call) for call in nodes(expr, tirx.Call)):
        return expr
    return map_children(expr, lambda child: _taken(child, before))


def _previous(atomic: Atomic, before: list[tirx.Stmt]) -> tirx.PrimExpr:
    assert isinstance(atomic.value, tirx.PrimExpr)
    place = tirx.BufferLoad(atomic.dst.buffer, [_taken(index, before) for index in atomic.dst.mins])
    value = cast(_taken(atomic.value, before), place.dtype)
    previous = tirx.Var("previous", place.dtype)
    before.append(tirx.Bind(previous, place))
    before.append(tirx.BufferStore(place.buffer, combine(atomic.reduction, previous, value), place.indices))
    return previous
