"""Proofs that begin with an example: to find no proof that expressions are equal takes a hundred times as long as to
see that they are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

from tvm import arith, ir, tirx

from mesh_tensor.tir.nodes import is_const, nodes

_VALUES = (17, 13, 11, 19)  # no multiples of each other, and so small that what sizes are made of is no overflow
_NUMBERS = (int, tirx.IntImm)


class Prover(arith.Analyzer):
    """An analyzer that looks for no proof that expressions are equal where values of their variables show that they are
    not; as long as it knows nothing of variables, so that they may have these values."""

    def __init__(self) -> None:
        super().__init__()
        self._facts = 0

    def can_prove_equal(self, lhs: Any, rhs: Any) -> bool:
        """Whether it can be proved that they are equal."""
        if isinstance(lhs, _NUMBERS) and isinstance(rhs, _NUMBERS):
            return int(lhs) == int(rhs)
        return not (self._facts == 0 and self._differ(lhs, rhs)) and bool(super().can_prove_equal(lhs, rhs))

    @contextmanager
    def constraint_scope(self, constraint: tirx.PrimExpr) -> Iterator[None]:
        """Inside, the constraint holds."""
        self._facts += 1
        try:
            with super().constraint_scope(constraint):
                yield
        finally:
            self._facts -= 1

    def bind(self, *args: Any) -> None:
        """What a variable is, or its range."""
        self._facts += 1
        super().bind(*args)

    def update(self, *args: Any) -> None:
        """A fact of a variable."""
        self._facts += 1
        super().update(*args)

    def _differ(self, one: Any, other: Any) -> bool:
        """Whether they differ where variables have other values each; conditions have no difference."""
        if "bool" in {getattr(one, "dtype", None), getattr(other, "dtype", None)}:
            return False
        difference = one - other
        variables = dict.fromkeys([difference] if isinstance(difference, tirx.Var) else nodes(difference, tirx.Var))
        if not all(var.dtype.startswith("int") for var in variables):
            return False
        example = {var: tirx.IntImm(var.dtype, value) for var, value in zip(variables, cycle(_VALUES), strict=False)}
        value = self.simplify(tirx.stmt_functor.substitute(difference, example))
        return isinstance(value, tirx.IntImm) and int(value) != 0


class RangeProver(arith.Analyzer):
    """An analyzer of variables in ranges that looks for no proof of what does not hold where they are all at the starts
    of their ranges, or all at the ends."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: dict[tirx.Var, tuple[int, int]] = {}

    def bind(self, var: tirx.Var, value: Any, *args: Any) -> None:
        """What a variable is, or its range."""
        super().bind(var, value, *args)
        bounds = (value.min, value.extent) if isinstance(value, ir.Range) else ()
        if bounds and all(isinstance(bound, tirx.IntImm) for bound in bounds) and int(bounds[1]) > 0:
            self._ends[var] = int(bounds[0]), int(bounds[0]) + int(bounds[1]) - 1

    def can_prove(self, expr: Any, *args: Any) -> bool:
        """Whether it can be proved that a condition holds for all values in the ranges."""
        return not self._is_refuted(expr) and bool(super().can_prove(expr, *args))

    def can_prove_equal(self, lhs: Any, rhs: Any) -> bool:
        """Whether it can be proved that they are equal for all values in the ranges."""
        return not self._is_refuted(tirx.EQ(lhs, rhs)) and bool(super().can_prove_equal(lhs, rhs))

    def _is_refuted(self, condition: Any) -> bool:
        variables = dict.fromkeys(nodes(condition, tirx.Var))
        if not variables or not self._ends.keys() >= variables.keys():
            return False
        for end in (0, 1):
            example = {var: tirx.IntImm(var.dtype, self._ends[var][end]) for var in variables}
            if is_const(self.simplify(tirx.stmt_functor.substitute(condition, example)), 0):
                return True
        return False
