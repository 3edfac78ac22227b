"""Which accesses of a kernel may leave their buffer: indices against shapes, under the loops and conditions around."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from itertools import product

from tvm import arith, ir, tirx

from .effects import op_name, thread_indices
from .nodes import is_const, loads
from .prover import Prover

_CASES = 64
_STRENGTHS = (arith.ProofStrength.DEFAULT, arith.ProofStrength.SYMBOLIC_BOUND)


def accesses_outside(
    func: tirx.PrimFunc, unchecked: Collection[tuple[str, int]] = (), below: Mapping[tirx.Var, int] | None = None
) -> list[str]:
    """The direct accesses to `func`'s parameters that are not provably inside, one line each. `below`: parameters that
    are from 0 to below a number, as coordinates are.

    Tile operations are left out, as TileLang guards their regions; so are the (parameter, dim) in `unchecked`, and
    places that data name. What isn't proved for all coordinates at once is tried for each."""
    below = below or {}
    problems = _outside(func, func.body, frozenset(unchecked), below)
    if not problems or not 1 < math.prod(below.values()) <= _CASES:
        return problems
    for values in product(*(range(count) for count in below.values())):
        at = {var: tirx.IntImm(var.dtype, value) for var, value in zip(below, values, strict=True)}
        if _outside(func, tirx.stmt_functor.substitute(func.body, at), frozenset(unchecked), {}):
            return problems
    return []


def _outside(
    func: tirx.PrimFunc, body: tirx.Stmt, unchecked: frozenset[tuple[str, int]], below: Mapping[tirx.Var, int]
) -> list[str]:
    walk = _Walk(func, unchecked, {**thread_indices(func), **below})
    walk.stmt(body)
    return list(dict.fromkeys(walk.problems))


class _Walk:
    def __init__(self, func: tirx.PrimFunc, unchecked: frozenset[tuple[str, int]], below: Mapping[tirx.Var, int]):
        self.params = set(func.buffer_map.values())
        self.unchecked = unchecked
        self.analyzer = Prover()
        for var, count in below.items():
            self.analyzer.bind(var, ir.Range(0, count))
        self.problems: list[str] = []
        self.data: set[tirx.Var] = set()  # bound to what is loaded

    def stmt(self, stmt: tirx.Stmt) -> None:
        if isinstance(stmt, tirx.SeqStmt):
            for child in stmt.seq:
                self.stmt(child)
        elif isinstance(stmt, tirx.For):
            self.loop(stmt)
        elif isinstance(stmt, tirx.IfThenElse):
            self.exprs(stmt.condition)
            with self.analyzer.constraint_scope(stmt.condition):
                self.stmt(stmt.then_case)
            if stmt.else_case is not None:
                with self.analyzer.constraint_scope(tirx.Not(stmt.condition)):
                    self.stmt(stmt.else_case)
        elif isinstance(stmt, tirx.SBlockRealize):
            self.stmt(stmt.block.body)
        elif isinstance(stmt, tirx.BufferStore):
            self.access(stmt.buffer, stmt.indices)
            self.exprs(stmt.value, *stmt.indices)
        elif isinstance(stmt, (tirx.Evaluate, tirx.Bind)):
            self.exprs(stmt.value)
            if isinstance(stmt, tirx.Bind) and self.is_data(stmt.value):
                self.data.add(stmt.var)
        elif isinstance(stmt, (tirx.AttrStmt, tirx.While)):
            self.exprs(stmt.value if isinstance(stmt, tirx.AttrStmt) else stmt.condition)
            self.stmt(stmt.body)

    def loop(self, loop: tirx.For) -> None:
        self.exprs(loop.min, loop.extent)
        before, extent = len(self.problems), self.analyzer.simplify(loop.extent)
        if isinstance(extent, tirx.IntImm) and int(extent) <= 0:
            return
        self.analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, extent))
        with self.analyzer.constraint_scope(loop.loop_var < self.analyzer.simplify(loop.min + _if_any(extent))):
            self.stmt(loop.body)
        if len(self.problems) > before and self.analyzer.can_prove(extent <= 0):
            del self.problems[before:]  # no iteration has them

    def exprs(self, *exprs: tirx.PrimExpr) -> None:
        for expr in exprs:
            self.expr(expr)

    def expr(self, expr: tirx.PrimExpr) -> None:
        name = op_name(expr)
        if name == "tirx.if_then_else":
            condition, then, otherwise = expr.args
            self.expr(condition)
            with self.analyzer.constraint_scope(condition):
                self.expr(then)
            with self.analyzer.constraint_scope(tirx.Not(condition)):
                self.expr(otherwise)
        elif name == "tl.region":
            self.exprs(*expr.args[0].indices)
        else:
            if isinstance(expr, tirx.BufferLoad):
                self.access(expr.buffer, expr.indices)
            self.exprs(*_operands(expr))

    def is_data(self, expr: tirx.PrimExpr) -> bool:
        """Whether an expression is made of what is loaded."""
        return bool(loads(expr)) or not self.data.isdisjoint(tirx.analysis.undefined_vars(expr))

    def proves(self, condition: tirx.PrimExpr) -> bool:
        return any(self.analyzer.can_prove(condition, strength) for strength in _STRENGTHS)

    def access(self, buffer: tirx.Buffer, indices: Collection[tirx.PrimExpr]) -> None:
        if buffer not in self.params:
            return
        for dim, (index, size) in enumerate(zip(indices, buffer.shape, strict=True)):
            if (buffer.name, dim) in self.unchecked or self.is_data(index):
                continue
            if not (self.proves(index >= 0) and self.proves(index < size)):
                self.problems.append(f"{buffer.name} dim {dim} is accessed at {index}, which may lie outside 0..{size}")


def _if_any(extent: tirx.PrimExpr) -> tirx.PrimExpr:
    """How often a loop runs that runs at all: of `max(n, 0)`, n."""
    if isinstance(extent, tirx.Max):
        for some, zero in ((extent.a, extent.b), (extent.b, extent.a)):
            if is_const(zero, 0):
                return some
    return extent


def _operands(expr: tirx.PrimExpr) -> Iterator[tirx.PrimExpr]:
    if isinstance(expr, tirx.BufferLoad):
        yield from expr.indices
    elif isinstance(expr, tirx.Call):
        yield from (arg for arg in expr.args if isinstance(arg, tirx.PrimExpr))
    elif isinstance(expr, tirx.Select):
        yield from (expr.condition, expr.true_value, expr.false_value)
    elif isinstance(expr, (tirx.Cast, tirx.Broadcast)):
        yield expr.value
    elif isinstance(expr, tirx.Let):
        yield from (expr.value, expr.body)
    else:
        yield from (getattr(expr, name) for name in ("a", "b") if hasattr(expr, name))
