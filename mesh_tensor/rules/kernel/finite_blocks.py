"""Whether every row has something that counts in every block that a loop handles.

A running maximum then is no longer the lowest value after whichever block is the first, so that nothing but infinite
data is ever taken from the lowest value, and it does not matter which blocks a loop skips."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tvm import tirx

from mesh_tensor.base.dtypes import is_float
from mesh_tensor.tir.effects import op_name
from mesh_tensor.tir.linear import vars_of
from mesh_tensor.tir.nodes import is_const, loads, nodes, same_expression
from mesh_tensor.tir.rewrite import number
from mesh_tensor.tir.tile_ops import Fill, Gemm, Reduce

from .iterations import Iteration
from .live_ranges import LiveRange
from .statements import Access, Kernel, Statement, without_binds

_FINITE = (tirx.Var, tirx.BufferLoad, tirx.Cast, tirx.Add, tirx.Sub, tirx.Mul, tirx.Min, tirx.Max, tirx.Select)
_FINITE_OPS = frozenset(f"tirx.{name}" for name in ("if_then_else", "tanh", "sigmoid", "exp", "exp2", "fabs"))


def has_finite_blocks(iteration: Iteration, maximum: LiveRange) -> bool:
    """Whether what a loop's iterations take the maximum of has, in every row, an element that no mask makes the lowest
    value."""
    value = iteration.value(maximum)
    atom = None if value is None else value.atom
    if atom is None or atom.key[0] != "max":
        return False
    blocks = [key[1] for key in atom.key[1] if key[0] == "block"]
    return bool(blocks) and all(_is_finite(iteration, statement) for statement in blocks)


def _is_finite(iteration: Iteration, statement: Statement) -> bool:
    before = iteration.body[: iteration.body.index(statement) + 1]
    made = [s for s in before if isinstance(s.tile_op, Reduce) and s.target.buffer.same_as(statement.target.buffer)]
    if not made:
        return False
    record = made[-1].tile_op
    assert isinstance(record, Reduce)
    source = iteration.coordinates.ranges.of(made[-1].reads[0])
    before = before[: before.index(made[-1])]
    writes = [(s, write) for s, write in source.writes if s in before]
    return bool(writes) and all(_keeps_finite(iteration, s, write, record.dim) for s, write in writes)


def _keeps_finite(iteration: Iteration, statement: Statement, write: Access, dim: int) -> bool:
    """Whether the statement leaves the first element of every row finite, if what it reads is."""
    if isinstance(statement.tile_op, Gemm):
        return True
    if isinstance(statement.tile_op, Fill):
        return _finite(statement.values[:1])
    form = write.forms[dim]
    if (
        statement.tile_op is not None
        or statement.op not in (None, "sum")
        or not isinstance(statement.node, tirx.BufferStore)
    ):
        return False
    var = None if form is None else form.variable
    if var is None or not any(loop.var.same_as(var) and is_const(loop.min, 0) for loop in statement.loops):
        return False
    first = tirx.stmt_functor.substitute(statement.values[0], {var: tirx.IntImm(var.dtype, 0)})
    return all(_finite([part]) for part in _chosen(iteration, first, statement))


def _chosen(iteration: Iteration, expr: tirx.PrimExpr, statement: Statement) -> Iterator[tirx.PrimExpr]:
    """What a choice may come to where the statement runs."""
    if op_name(expr) != "tirx.if_then_else":
        yield expr
        return
    condition, then, otherwise = expr.args
    analyzer = iteration.kernel.analyzer
    known = [c for c in statement.conditions if not loads(c)]
    given, wanted = _without_loads([tirx.all(statement.ranges, *known), condition], iteration.kernel)
    with analyzer.constraint_scope(given):
        certain = analyzer.can_prove(wanted)
        never = not certain and analyzer.can_prove(tirx.Not(wanted))
    if not never:
        yield from _chosen(iteration, then, statement)
    if not certain:
        yield from _chosen(iteration, otherwise, statement)


def _without_loads(exprs: Sequence[tirx.PrimExpr], kernel: Kernel) -> list[tirx.PrimExpr]:
    """The expressions with a variable for each element that they load of parameters that nothing writes, by way of
    what their variables are bound to, too."""
    named = list[tuple[tirx.BufferLoad, tirx.Var]]()

    def name(load: tirx.BufferLoad) -> tirx.Var | None:
        if not kernel.keeps(load.buffer):
            return None
        known = next((var for other, var in named if same_expression(other, load)), None)
        if known is None:
            known = tirx.Var(load.buffer.name, load.dtype)
            named.append((load, known))
        return known

    values = {var: without_binds(var, kernel) for expr in exprs for var in vars_of([expr], {}) if var in kernel.binds}
    kept = {var: e for var, e in values.items() if all(kernel.keeps(load.buffer) for load in loads(e))}
    told = [tirx.Evaluate(tirx.stmt_functor.substitute(expr, kept)) for expr in exprs]
    plain = [tirx.stmt_functor.ir_transform(stmt, None, name, ["tirx.BufferLoad"]) for stmt in told]
    return [stmt.value for stmt in plain]


def _finite(values: Sequence[tirx.PrimExpr]) -> bool:
    """Whether the expressions are finite, if what they load is."""
    return bool(values) and all(
        _keeps(part) for value in values for part in (value, *nodes(tirx.Evaluate(value), tirx.PrimExpr))
    )


def _keeps(expr: tirx.PrimExpr) -> bool:
    """Whether an expression is finite if its operands are, as long as nothing overflows: a logarithm or a quotient is
    not."""
    value = number(expr)
    if value is not None:
        return math.isfinite(value)
    if not is_float(expr.dtype) or isinstance(expr, _FINITE):
        return True
    if isinstance(expr, tirx.Div):
        return bool(number(expr.b))
    return op_name(expr) in _FINITE_OPS
