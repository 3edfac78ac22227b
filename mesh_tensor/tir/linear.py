"""Integer linear forms of loop variables: `4*by + i`, the shape in which index expressions are compared; what is
known of loop variables and sizes; and facts that are proved by trying all of their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tvm import arith, ir, tirx

from .effects import chosen, op_name
from .nodes import DIVISIONS, nodes
from .prover import Prover, keeps_numbers

_WIDE = frozenset({"int32", "int64"})  # what leaves these is not defined
_SUMS = (tirx.Add, tirx.Sub, tirx.Mul)


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
        if not other.terms:
            return Linear(self.terms, self.const + sign * other.const) if other.const else self
        terms = dict(self.terms)
        for var, coefficient in other.terms.items():
            terms[var] = terms.get(var, 0) + sign * coefficient
        return Linear({v: c for v, c in terms.items() if c}, self.const + sign * other.const)

    def scaled(self, factor: int) -> Linear:
        return Linear({v: c * factor for v, c in self.terms.items() if factor}, self.const * factor)

    def same_as(self, other: Linear) -> bool:
        return self.const == other.const and self.terms == other.terms

    @property
    def variable(self) -> Any:
        """The variable that it is; None if it is anything else."""
        return next(iter(self.terms)) if not self.const and list(self.terms.values()) == [1] else None

    @cached_property
    def key(self) -> tuple:
        """Equal for equal forms, and hashable."""
        return frozenset(self.terms.items()), self.const

    @cached_property
    def ordered(self) -> tuple[tuple[tirx.Var, int], ...]:
        """The terms, largest coefficient first."""
        return tuple(sorted(self.terms.items(), key=lambda term: -term[1]))


def sum_of(expr: tirx.PrimExpr | int, term: Callable[[tirx.PrimExpr], Linear | None]) -> Linear | None:
    """`expr` as sums, differences and multiples of what `term` makes of its other parts; None where one has no form.
    What is computed in a narrow type, or one without a sign, may begin anew, and is no sum."""
    if isinstance(expr, (int, tirx.IntImm)):
        return Linear({}, int(expr))
    if isinstance(expr, _SUMS) and expr.dtype not in _WIDE:
        return term(expr)
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
        if isinstance(part, tirx.Cast) and (keeps_numbers(part) or {part.dtype, part.value.dtype} <= _WIDE):
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


def loop_ranges(body: tirx.Stmt, buffers: Iterable[tirx.Buffer] = ()) -> Prover:
    """A prover that knows the range of every loop's and every block's variables, and that the sizes of `buffers` are
    not negative."""
    analyzer = Prover()
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


_MOST_POINTS = 1 << 20

Values = Mapping[tirx.Var, np.ndarray]


def _truncated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


_BINARY: dict[type, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    tirx.Add: np.add,
    tirx.Sub: np.subtract,
    tirx.Mul: np.multiply,
    tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod,
    tirx.Div: _truncated,
    tirx.Mod: np.fmod,
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
    tirx.LT: np.less,
    tirx.LE: np.less_equal,
    tirx.GT: np.greater,
    tirx.GE: np.greater_equal,
    tirx.EQ: np.equal,
    tirx.NE: np.not_equal,
    tirx.And: np.logical_and,
    tirx.Or: np.logical_or,
}


class Unknown(Exception):
    """An expression that is not evaluated: it reads memory, or has symbols."""


def holds_always(
    fact: tirx.PrimExpr, loops: Sequence[tuple[tirx.Var, tirx.PrimExpr, tirx.PrimExpr]], given: Sequence[tirx.PrimExpr]
) -> bool:
    """Whether the fact holds for all values of the loops' variables (variable, start, extent; outer ones first, whose
    variables may be in the bounds of inner ones) for which all that is `given` does. False if that is not known; what
    is given and can't be evaluated is left out."""
    values: dict[tirx.Var, np.ndarray] = {}
    count = 1
    try:
        for var, start, extent in loops:
            low = np.broadcast_to(_evaluated(start, values), (count,))
            lengths = np.maximum(np.broadcast_to(_evaluated(extent, values), (count,)), 0)
            if int(lengths.sum()) > _MOST_POINTS:
                return False
            at = np.repeat(np.arange(count), lengths)
            values = {other: array[at] for other, array in values.items()}
            values[var] = low[at] + np.arange(len(at)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            count = len(at)
        true = np.broadcast_to(_evaluated(fact, values), (count,))
    except Unknown:
        return False
    for condition in given:
        try:
            true = true | ~np.broadcast_to(_evaluated(condition, values), (count,)).astype(bool)
        except Unknown:
            continue
    return bool(np.all(true))


def _evaluated(expr: tirx.PrimExpr, values: Values) -> np.ndarray:
    if isinstance(expr, (int, tirx.IntImm)):
        return np.asarray(int(expr), np.int64)
    if isinstance(expr, tirx.Var) and expr in values:
        return values[expr]
    if isinstance(expr, tirx.Cast) and expr.dtype in _WIDE:
        return _evaluated(expr.value, values)
    if isinstance(expr, tirx.Not):
        return np.logical_not(_evaluated(expr.a, values))
    if type(expr) in _BINARY and (expr.dtype == "bool" or expr.dtype in _WIDE):
        a, b = _evaluated(expr.a, values), _evaluated(expr.b, values)
        if isinstance(expr, DIVISIONS) and not np.all(b):
            raise Unknown
        return _BINARY[type(expr)](a, b)
    if op_name(expr) == "tirx.likely":
        return _evaluated(expr.args[0], values)
    if (choice := chosen(expr)) is not None:
        condition, *both = (_evaluated(part, values) for part in choice)
        return np.where(condition.astype(bool), *both)
    raise Unknown
