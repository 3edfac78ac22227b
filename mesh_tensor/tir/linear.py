"""Integer linear forms of loop variables: `4*by + i`, the shape in which index expressions are compared; and what is
known of loop variables and sizes, wherever they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tvm import arith, ir, tirx

from .nodes import nodes


@dataclass(frozen=True)
class Linear:
    """`sum(coefficient * variable) + const`; no coefficient is zero. Variables compare by identity; whoever has other
    names for them, or for what stands in a variable's place, may use those."""

    terms: Mapping[Any, int]
    const: int = 0

    def __add__(self, other: Linear) -> Linear:
        return self._combine(other, 1)

    def __sub__(self, other: Linear) -> Linear:
        return self._combine(other, -1)

    def _combine(self, other: Linear, sign: int) -> Linear:
        terms = dict(self.terms)
        for var, coefficient in other.terms.items():
            terms[var] = terms.get(var, 0) + sign * coefficient
        return Linear({v: c for v, c in terms.items() if c}, self.const + sign * other.const)

    def scaled(self, factor: int) -> Linear:
        return Linear({v: c * factor for v, c in self.terms.items() if factor}, self.const * factor)

    def same_as(self, other: Linear) -> bool:
        return self.const == other.const and self.terms == other.terms

    @property
    def key(self) -> tuple:
        """Equal for equal forms, and hashable."""
        return frozenset(self.terms.items()), self.const

    def shares_vars(self, other: Linear) -> bool:
        return any(var in other.terms for var in self.terms)

    @property
    def ordered(self) -> list[tuple[tirx.Var, int]]:
        """The terms, largest coefficient first."""
        return sorted(self.terms.items(), key=lambda term: -term[1])


def sum_of(expr: tirx.PrimExpr | int, term: Callable[[tirx.PrimExpr], Linear | None]) -> Linear | None:
    """`expr` as sums, differences and multiples of what `term` makes of its other parts; None where one has no form."""
    if isinstance(expr, (int, tirx.IntImm)):
        return Linear({}, int(expr))
    if isinstance(expr, (tirx.Add, tirx.Sub)):
        a, b = sum_of(expr.a, term), sum_of(expr.b, term)
        return None if a is None or b is None else a + b if isinstance(expr, tirx.Add) else a - b
    if isinstance(expr, tirx.Mul):
        a, b = sum_of(expr.a, term), sum_of(expr.b, term)
        if a is not None and b is not None and not (a.terms and b.terms):
            return a.scaled(b.const) if a.terms else b.scaled(a.const)
    return term(expr)


def linear_form(expr: tirx.PrimExpr | int, binds: Mapping[tirx.Var, tirx.PrimExpr]) -> Linear | None:
    """`expr` as a Linear over the variables that `binds` does not define, or None if it is none (symbolic sizes,
    products of variables, divisions with a remainder, loads)."""

    def term(part: tirx.PrimExpr) -> Linear | None:
        if isinstance(part, tirx.Var):
            return sum_of(binds[part], term) if part in binds else Linear({part: 1})
        if isinstance(part, tirx.Cast) and part.dtype.startswith(("int", "uint")):
            return sum_of(part.value, term)
        if isinstance(part, (tirx.FloorDiv, tirx.FloorMod)) and isinstance(part.b, tirx.IntImm) and int(part.b) > 0:
            form, by = sum_of(part.a, term), int(part.b)
            if form is not None and all(number % by == 0 for number in (form.const, *form.terms.values())):
                exact = Linear({var: step // by for var, step in form.terms.items()}, form.const // by)
                return exact if isinstance(part, tirx.FloorDiv) else Linear({})
        return None

    return sum_of(expr, term)


def vars_of(exprs: Iterable[tirx.PrimExpr], binds: Mapping[tirx.Var, tirx.PrimExpr]) -> set[tirx.Var]:
    """All variables in the expressions; a variable that `binds` defines counts as what it is bound to."""
    found: set[tirx.Var] = set()
    for expr in exprs:
        for var in [expr] if isinstance(expr, tirx.Var) else nodes(expr, tirx.Var):
            found |= vars_of([binds[var]], binds) if var in binds else {var}
    return found


def as_expr(form: Linear) -> tirx.PrimExpr:
    """The linear form as a TIR expression."""
    total: tirx.PrimExpr | None = None if form.const == 0 else tirx.IntImm("int32", form.const)
    for var, coefficient in form.ordered:
        term = var if coefficient == 1 else var * coefficient
        total = term if total is None else total + term
    return tirx.IntImm("int32", 0) if total is None else total


def loops_in(body: tirx.Stmt) -> list[tirx.For]:
    """The loops of a body, outer ones before those in them."""
    return nodes(body, tirx.For)[::-1]


def loop_ranges(body: tirx.Stmt, buffers: Iterable[tirx.Buffer] = ()) -> arith.Analyzer:
    """An analyzer that knows the range of every loop's and every block's variables, and that the sizes of `buffers` are
    not negative."""
    analyzer = arith.Analyzer()
    for buffer in buffers:
        for size in buffer.shape:
            if isinstance(size, tirx.Var):
                analyzer.update(size, arith.ConstIntBound(0, arith.ConstIntBound.POS_INF), True)
    for var, ranges in _ranges(body).items():
        if all(ir.structural_equal(ranges[0], other) for other in ranges):
            analyzer.bind(var, ranges[0], True)
    return analyzer


def _ranges(body: tirx.Stmt) -> dict[tirx.Var, list[ir.Range]]:
    """The ranges of the loops' and the blocks' variables: several, where loops share one."""
    found: dict[tirx.Var, list[ir.Range]] = {}
    for loop in loops_in(body):
        found.setdefault(loop.loop_var, []).append(ir.Range.from_min_extent(loop.min, loop.extent))
    for iter_var in (iter_var for block in nodes(body, tirx.SBlock) for iter_var in block.iter_vars):
        found.setdefault(iter_var.var, []).append(iter_var.dom)
    return found
