"""What a factor is: one iteration dimension of a kernel, and why it may not be split; and whether a nest of loops
walks a dim from end to end.

Proofs begin with an example: to find no proof that expressions are equal takes a hundred times as long as to see that
they are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

from tvm import arith, ir, tirx

from mesh_tensor.tir.linear import Linear
from mesh_tensor.tir.nodes import is_const, nodes
from mesh_tensor.tir.tile_position import as_helper

if TYPE_CHECKING:
    from .statements import Loop, Statement


@dataclass(frozen=True, eq=False)
class Factor:
    """One iteration dimension. `dims` are the parameters' dims it indexes, `roles` its loop variables with their
    coefficients, `blocked` why it can't be split at all, `aligned` why tiles have to be whole blocks. `lanes` is the
    reason where a buffer keeps one value per position in a block, `first` why the first tile has to hold a whole
    block."""

    name: str
    size: tirx.PrimExpr
    dims: tuple[tuple[str, int], ...]
    roles: Mapping[tirx.Var, int]
    blocked: str | None = None
    aligned: str | None = None
    lanes: str | None = None
    first: str | None = None

    @property
    def block(self) -> int:
        """What one iteration of the outermost loops handles: the least common multiple, where they differ."""
        return math.lcm(*self.roles.values())


class Blocked(Exception):
    """The factor (of a split, if it is known which) can't be split; the message is the reason."""

    def __init__(self, reason: str, factor: Factor | None = None):
        super().__init__(reason)
        self.factor = factor


def tile_extent(size: Any, parts: list[int]) -> Any:
    """ceildiv of `size` by each of `parts`: the part of a dim that one device holds."""
    for n in parts:
        if n != 1:
            size = -(-int(size) // n) if isinstance(size, (int, tirx.IntImm)) else tirx.floordiv(size + (n - 1), n)
    return size


def why_not_covered(
    form: Linear | None, size: tirx.PrimExpr, statement: Statement, analyzer: arith.Analyzer
) -> str | None:
    """Why `form`, over the statement's loops, is not each of 0 .. size-1 exactly once; None if it is.

    The last block may reach past the end."""
    if form is None:
        return "it is no sum of loop variables and constants"
    if not form.terms:
        return "it is the same in every iteration"
    loops = {loop.var: loop for loop in statement.loops}
    if any(var not in loops for var in form.terms):
        return "it uses a variable that is no loop's"
    if any(coefficient < 0 for coefficient in form.terms.values()):
        return "it is reversed"
    if form.const != 0:
        return "it is shifted"
    below = 1
    *inner, outer = form.ordered[::-1]
    for var, coefficient in (*inner, outer):
        loop = loops[var]
        if not analyzer.can_prove_equal(loop.min, 0):
            return f"loop {var} does not start at 0"
        if coefficient != below:
            return f"loop {var} steps by {coefficient} where blocks are {below} long"
        if var is not outer[0]:
            if not isinstance(loop.extent, tirx.IntImm):
                return f"loop {var} has no constant extent"
            below = coefficient * int(loop.extent)
    return _outer_covers(*outer, loops[outer[0]], size, analyzer)


def _outer_covers(
    var: tirx.Var, coefficient: int, loop: Loop, size: tirx.PrimExpr, analyzer: arith.Analyzer
) -> str | None:
    extent = with_whole_tiles(loop.extent)
    pairs = (extent * coefficient, size), (extent, tirx.floordiv(size + (coefficient - 1), coefficient))
    if any(tirx.analysis.expr_deep_equal(a, b) for a, b in pairs):  # next to nothing, where proofs take long
        return None
    if any(analyzer.can_prove_equal(a, b) for a, b in pairs):
        return None
    if coefficient == 1 and loop.kind == "tile" and analyzer.can_prove(extent >= size):
        return None
    return f"loop {var} of {extent} blocks of {coefficient} does not walk a dim of {size}"


def with_whole_tiles(extent: tirx.PrimExpr) -> tirx.PrimExpr:
    """How far a loop goes on a device whose tiles are full: it need not go further than what is valid."""

    def widen(node: tirx.Call) -> tirx.PrimExpr | None:
        helper = as_helper(node)
        return None if helper is None or not helper.is_extent else helper.tile

    if isinstance(extent, tirx.IntImm):
        return extent
    return tirx.stmt_functor.ir_transform(tirx.Evaluate(extent), None, widen, ["tirx.Call"]).value


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
