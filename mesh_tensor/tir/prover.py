"""Proofs that begin with examples: to find no proof takes a hundred times as long as to see that something does not
hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from typing import Any

from tvm import DataType, arith, ir, tirx

from mesh_tensor.base.dtypes import extreme

from .nodes import DIVISIONS, is_const, nodes, same_expression

_VALUES = (17, 13, 11, 19)  # no multiples of each other, and so small that what sizes are made of is no overflow
_NUMBERS = (int, tirx.IntImm)
_WIDE = ("int32", "int64")
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Call)
_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE)
_PARTIAL = (*DIVISIONS, tirx.Call, tirx.Cast)  # what TVM can't simplify for all numbers
_Example = dict[tirx.Var, tirx.PrimExpr]


class Prover(arith.Analyzer):
    """An analyzer that looks for no proof where values of the variables show that there is none: starts and ends of
    their ranges, or any values as long as it knows nothing of variables. Under a condition it takes no examples."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: dict[tirx.Var, tuple[int, int]] = {}
        self._facts = self._conditions = 0

    def can_prove(self, expr: Any, *args: Any) -> bool:
        """Whether it can be proved that a condition holds for all values in the ranges."""
        refuted = any(is_const(self._at(expr, example), 0) for example in self._examples(expr))
        return not refuted and bool(super().can_prove(expr, *args)) and not begins_anew(expr, self)

    def can_prove_equal(self, lhs: Any, rhs: Any) -> bool:
        """Whether it can be proved that they are equal for all values in the ranges."""
        if isinstance(lhs, _NUMBERS) and isinstance(rhs, _NUMBERS):
            return int(lhs) == int(rhs)
        if not _are_whole(lhs, rhs):
            return self._are_alike(lhs, rhs) or bool(super().can_prove_equal(lhs, rhs))
        difference = lhs - rhs
        refuted = any(self._is_other(difference, example) for example in self._examples(difference))
        return not refuted and bool(super().can_prove_equal(lhs, rhs))

    def _are_alike(self, one: Any, other: Any) -> bool:
        """Whether conditions, and what is chosen by them, are made alike of what is equal: to prove that they are equal
        otherwise takes much longer."""
        if type(one) is not type(other) or not isinstance(one, tirx.PrimExpr) or one.dtype != other.dtype:
            return False
        if isinstance(one, _COMPARISONS) and _are_whole(one.a, one.b, other.a, other.b):
            return self.can_prove_equal(one.a - one.b, other.a - other.b)
        if isinstance(one, tirx.And):
            return self._are_alike(one.a, other.a) and self._are_alike(one.b, other.b)
        if isinstance(one, tirx.Call) and _are_same_calls(one, other):
            return all(
                self.can_prove_equal(*pair) if _are_whole(*pair) else self._are_alike(*pair)
                for pair in zip(one.args, other.args, strict=True)
            )
        return same_expression(one, other)

    @contextmanager
    def constraint_scope(self, constraint: tirx.PrimExpr) -> Iterator[None]:
        """Inside, the constraint holds."""
        self._conditions += 1
        try:
            with super().constraint_scope(constraint):
                yield
        finally:
            self._conditions -= 1

    def bind(self, var: tirx.Var, value: Any, *args: Any) -> None:
        """What a variable is, or its range."""
        super().bind(var, value, *args)
        self._ends.pop(var, None)
        self._facts += 1
        bounds = (value.min, value.extent) if isinstance(value, ir.Range) else ()
        if bounds and all(isinstance(bound, tirx.IntImm) for bound in bounds) and int(bounds[1]) > 0:
            self._ends[var] = int(bounds[0]), int(bounds[0]) + int(bounds[1]) - 1

    def update(self, var: tirx.Var, *args: Any) -> None:
        """A fact of a variable."""
        super().update(var, *args)
        self._ends.pop(var, None)
        self._facts += 1

    def _examples(self, expr: Any) -> Iterator[_Example]:
        """Values that the variables of an expression may have: all at the starts of their ranges, or at the ends, and
        one elsewhere than the others."""
        found = [expr] if isinstance(expr, tirx.Var) else nodes(expr, tirx.Var, *_PARTIAL)
        variables = dict.fromkeys(node for node in found if isinstance(node, tirx.Var))
        has_values = all(_has_values(node) for node in found if not isinstance(node, tirx.Var))
        if self._conditions or not has_values or not all(var.dtype in ("int32", "int64") for var in variables):
            return
        if not self._facts:
            yield dict(zip(variables, map(tirx.IntImm, (v.dtype for v in variables), cycle(_VALUES)), strict=False))
        elif variables and self._ends.keys() >= variables.keys():
            low, high = ({var: tirx.IntImm(var.dtype, self._ends[var][end]) for var in variables} for end in (0, 1))
            yield from (low, high)
            for var in variables if len(variables) > 1 else ():
                yield low | {var: high[var]}
                yield high | {var: low[var]}

    def _at(self, expr: Any, example: Mapping[tirx.Var, tirx.PrimExpr]) -> tirx.PrimExpr:
        return self.simplify(tirx.stmt_functor.substitute(expr, example))

    def _is_other(self, difference: tirx.PrimExpr, example: _Example) -> bool:
        value = self._at(difference, example)
        return isinstance(value, tirx.IntImm) and int(value) != 0


def _has_values(node: tirx.PrimExpr) -> bool:
    """Whether a node has a value whatever numbers stand in it: nothing is divided by 0, shifted too far, or cast into a
    type that is too small."""
    if isinstance(node, DIVISIONS):
        return isinstance(node.b, tirx.IntImm)
    if isinstance(node, tirx.Cast):
        return not node.dtype.startswith(("int8", "int16", "uint", "bool"))
    return getattr(node.op, "name", "") == "tirx.if_then_else"


def _are_same_calls(one: tirx.Call, other: tirx.Call) -> bool:
    """Whether two calls differ in their arguments at most."""
    is_plain = not one.annotations and not other.annotations
    return is_plain and bool(one.op.same_as(other.op)) and len(one.args) == len(other.args)


def _are_whole(*exprs: Any) -> bool:
    return all(isinstance(expr, int) or getattr(expr, "dtype", "").startswith("int") for expr in exprs)


def begins_anew(expr: Any, analyzer: arith.Analyzer) -> bool:
    """Whether numbers in an expression may leave a narrow type, or one without a sign, and begin anew there: bounds,
    and proofs that rest on them, don't look at that. (In int32 and int64 it is not defined.)"""
    casts = [cast for cast in nodes(expr, tirx.Cast) if cast.dtype.startswith(("int", "uint"))]
    narrow = [cast for cast in casts if cast.dtype not in (*_WIDE, cast.value.dtype)]
    if not all(map(is_wider, narrow)):
        return True
    return any(_may_wrap(node, analyzer) for node in nodes(expr, *_ARITHMETIC))


def is_wider(cast: tirx.Cast) -> bool:
    """Whether all that is cast has a place in the type that it is cast to."""
    given, made = DataType(cast.value.dtype), DataType(cast.dtype)
    return cast.dtype.startswith(("int", "uint")) and given.bits < made.bits


def _may_wrap(expr: tirx.PrimExpr, analyzer: arith.Analyzer) -> bool:
    if not expr.dtype.startswith(("int", "uint")) or expr.dtype in _WIDE:
        return False
    bound = analyzer.const_int_bound(expr)
    return bool(bound.min_value < extreme(expr.dtype, -1) or bound.max_value > extreme(expr.dtype, 1))
