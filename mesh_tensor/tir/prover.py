"""Proofs that begin with examples: to find no proof takes a hundred times as long as to see that something does not
hold. And proofs of numbers as machines have them: what leaves a narrow type, or one without a sign, begins anew there,
which TVM's analyzer does not look at; and bits of theirs, which its solver takes for those of other numbers. So whoever
proves, simplifies or bounds anything asks a `Prover`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import cycle
from typing import Any

from tvm import DataType, arith, ir, tirx
from tvm.error import InternalError

from mesh_tensor.base.dtypes import extreme

from .nodes import DIVISIONS, is_const, nodes, same_expression

_VALUES = (17, 13, 11, 19)  # no multiples of each other, and so small that what sizes are made of is no overflow
_NUMBERS = (int, tirx.IntImm)
_WIDE = ("int32", "int64")
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.FloorDiv, tirx.Call)
_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE)
_MISREAD = (tirx.Call, tirx.Div, tirx.Mod, tirx.LT, tirx.GT)
_PARTIAL = (*DIVISIONS, tirx.Call, tirx.Cast)  # what TVM can't simplify for all numbers
_Example = dict[tirx.Var, tirx.PrimExpr]


class Prover(arith.Analyzer):
    """An analyzer that looks for no proof where values of the variables show that there is none: starts and ends of
    their ranges, or any values as long as it knows nothing of variables. Under a condition it takes no examples. Of
    numbers that may begin anew it knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: dict[tirx.Var, tuple[int, int]] = {}
        self._facts = self._conditions = 0

    def simplify(self, expr: Any, steps: int = 2) -> Any:
        """An expression in a simpler form; as it is, where numbers in it may begin anew."""
        if begins_anew(expr, self):
            return expr
        try:
            return super().simplify(expr, steps)
        except InternalError:  # of a difference of numbers without a sign, as comparisons of them are made of
            return expr

    def const_int_bound(self, expr: tirx.PrimExpr) -> arith.ConstIntBound:
        """Between which numbers an expression is."""
        return _anything(expr.dtype) if begins_anew(expr, self) else super().const_int_bound(expr)

    def can_prove(self, expr: Any, *args: Any) -> bool:
        """Whether it can be proved that a condition holds for all values in the ranges."""
        refuted = any(is_const(self._at(expr, example), 0) for example in self._examples(expr))
        if refuted or begins_anew(expr, self):
            return False
        compared = {comparison.a.dtype for comparison in nodes(expr, *_COMPARISONS)}
        if any(_is_integer(dtype) and dtype not in _WIDE for dtype in compared):
            args = ()  # what TVM proves in stronger ways is wrong there: it looks at differences, which begin anew
        if is_misread(expr, self):
            return is_const(self.simplify(expr), 1)
        try:
            return bool(super().can_prove(expr, *args))
        except InternalError:
            return False

    def can_prove_equal(self, lhs: Any, rhs: Any) -> bool:
        """Whether it can be proved that they are equal for all values in the ranges."""
        if isinstance(lhs, _NUMBERS) and isinstance(rhs, _NUMBERS):
            return int(lhs) == int(rhs)
        if not _are_whole(lhs, rhs):
            return self._are_alike(lhs, rhs) or self._proves_equal(lhs, rhs)
        difference = lhs - rhs
        refuted = any(self._is_other(difference, example) for example in self._examples(difference))
        return not refuted and self._proves_equal(lhs, rhs)

    def _proves_equal(self, lhs: Any, rhs: Any) -> bool:
        if any(begins_anew(side, self) or is_misread(side, self) for side in (lhs, rhs)):
            return isinstance(lhs, tirx.PrimExpr) and isinstance(rhs, tirx.PrimExpr) and same_expression(lhs, rhs)
        try:
            return bool(super().can_prove_equal(lhs, rhs))
        except InternalError:
            return False

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
        """Inside, the constraint holds; what of it may begin anew, or is misread, says nothing."""
        self._conditions += 1
        try:
            with ExitStack() as scopes:
                for part in _conjuncts(constraint):
                    if not begins_anew(part, self) and not is_misread(part, self):
                        scopes.enter_context(super().constraint_scope(part))
                yield
        finally:
            self._conditions -= 1

    def bind(self, var: tirx.Var, value: Any, *args: Any) -> None:
        """What a variable is, or its range; nothing, where that may begin anew; bounds at most, where it is misread."""
        parts = (value.min, value.extent) if isinstance(value, ir.Range) else (value,)
        if any(begins_anew(part, self) for part in parts):
            self.update(var, _anything(var.dtype), True)
            return
        if any(is_misread(part, self) for part in parts):
            self.update(var, _anything(var.dtype) if len(parts) > 1 else self.const_int_bound(value), True)
            return
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
    return all(isinstance(expr, int) or getattr(expr, "dtype", "") in _WIDE for expr in exprs)


def _conjuncts(condition: Any) -> Iterator[Any]:
    if isinstance(condition, tirx.And):
        yield from (*_conjuncts(condition.a), *_conjuncts(condition.b))
    else:
        yield condition


def begins_anew(expr: Any, analyzer: arith.Analyzer) -> bool:
    """Whether numbers in an expression may leave a narrow type, or one without a sign, and begin anew there: bounds,
    and proofs that rest on them, don't look at that. (In int32 and int64 it is not defined.)"""
    return any(_may_begin_anew(node, analyzer) for node in nodes(expr, tirx.Cast, *_ARITHMETIC))


def is_misread(expr: Any, analyzer: arith.Analyzer) -> bool:
    """Whether TVM's solver takes what is in an expression for other numbers than it is: bits of narrow types, and of
    those without a sign, are those of numbers with one to it, and what is rounded towards 0 is rounded down. Of numbers
    without a sign below 0 it takes differences, and raises."""
    return any(_is_other_to_solvers(node, analyzer) for node in nodes(expr, *_MISREAD))


def _is_other_to_solvers(node: tirx.PrimExpr, analyzer: arith.Analyzer) -> bool:
    if isinstance(node, (tirx.LT, tirx.GT)):
        bound = node.b if isinstance(node, tirx.LT) else node.a
        return is_const(bound, 0) and bound.dtype.startswith("uint")
    if not _is_integer(node.dtype) or getattr(getattr(node, "op", None), "name", "") == "tirx.if_then_else":
        return False
    if isinstance(node, tirx.Call):
        return node.dtype not in _WIDE
    return any(arith.Analyzer.const_int_bound(analyzer, side).min_value < 0 for side in (node.a, node.b))


def _may_begin_anew(node: tirx.PrimExpr, analyzer: arith.Analyzer) -> bool:
    dtype = node.dtype
    if isinstance(node, tirx.Cast):
        is_whole = _is_integer(dtype) and _is_integer(node.value.dtype)
        return is_whole and not keeps_numbers(node) and _may_leave(node.value, dtype, analyzer)
    is_defined = dtype not in _WIDE or isinstance(node, tirx.Call)  # bits that are shifted out are, of any type
    return is_defined and _is_integer(dtype) and _may_leave(node, dtype, analyzer)


def _may_leave(expr: tirx.PrimExpr, dtype: str, analyzer: arith.Analyzer) -> bool:
    """Whether a number may be outside of what a type has. Of those in int64 of which nothing is known that is not
    looked at."""
    bound, has = arith.Analyzer.const_int_bound(analyzer, expr), _anything(dtype)
    low, high = bound.min_value < has.min_value, bound.max_value > has.max_value
    if dtype in _WIDE and expr.dtype == "int64":
        return (low and bound.min_value > bound.NEG_INF) or (high and bound.max_value < bound.POS_INF)
    return bool(low or high or (dtype == "uint64" and bound.max_value == bound.POS_INF))


def _anything(dtype: str) -> arith.ConstIntBound:
    """The bounds of a type."""
    low, high = (int(extreme(dtype, sign)) for sign in (-1, 1))
    return arith.ConstIntBound(max(low, arith.ConstIntBound.NEG_INF), min(high, arith.ConstIntBound.POS_INF))


def keeps_numbers(cast: tirx.Cast) -> bool:
    """Whether a type has all the whole numbers of the one that is cast into it."""
    given, made = cast.value.dtype, cast.dtype
    if given in (made, "bool"):
        return _is_integer(made)
    if not _is_integer(given) or not _is_integer(made):
        return False
    more = DataType(made).bits - DataType(given).bits
    return more > 0 and (given.startswith("uint") or made.startswith("int"))


def _is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))
