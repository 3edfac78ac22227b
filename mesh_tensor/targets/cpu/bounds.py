"""What is known about the values of variables, and which accesses need a guard because of what isn't."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tvm import arith, ir, tirx

from mesh_tensor.tir.nodes import nodes

from .exprs import is_pure_index

_FAR = arith.ConstIntBound.POS_INF
# The second one finds bounds of variables in each other, such as those of a loop over a symbolic number of blocks.
_STRENGTHS = (arith.ProofStrength.DEFAULT, arith.ProofStrength.SYMBOLIC_BOUND)


class Bounds:
    """Ranges of the variables in scope, and the proofs that rest on them."""

    def __init__(self) -> None:
        self._analyzer = arith.Analyzer()

    def not_negative(self, var: tirx.Var) -> None:
        """`var` is a size: never negative."""
        self._analyzer.update(var, arith.ConstIntBound(0, _FAR), True)

    def loop(self, var: tirx.Var, begin: tirx.PrimExpr, extent: tirx.PrimExpr) -> None:
        """`var` runs over `begin ... begin + extent - 1`."""
        if is_pure_index(begin) and is_pure_index(extent):
            self._analyzer.bind(var, ir.Range.from_min_extent(begin, self.simplify(extent)), True)

    def let(self, var: tirx.Var, value: tirx.PrimExpr) -> None:
        """`var` is `value`."""
        if is_pure_index(value) and "int" in value.dtype:
            self._analyzer.bind(var, value, True)

    @contextmanager
    def assume(self, condition: tirx.PrimExpr, holds: bool = True) -> Iterator[None]:
        """Within the scope, `condition` holds (or doesn't)."""
        if not is_pure_index(condition):
            yield
            return
        with self._analyzer.constraint_scope(condition if holds else tirx.Not(condition)):
            yield

    def simplify(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        """`expr` in a simpler form."""
        return self._analyzer.simplify(expr)

    def divided(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        """An index or a condition on indices in which something is divided, in a simpler form: what is the same all
        along a block then leaves its loop. Others stay as they are."""
        is_index = is_pure_index(expr) and nodes(expr, tirx.FloorDiv, tirx.FloorMod) and not _has_floats(expr)
        return self.simplify(expr) if is_index else expr

    def proves(self, condition: tirx.PrimExpr) -> bool:
        """Whether `condition` always holds."""
        return any(self._analyzer.can_prove(condition, strength) for strength in _STRENGTHS)

    def outside(self, index: tirx.PrimExpr, size: tirx.PrimExpr) -> list[tirx.PrimExpr]:
        """Those of `0 <= index` and `index < size` that can't be proved."""
        zero = tirx.IntImm(index.dtype, 0)
        return [c for c in (tirx.GE(index, zero), tirx.LT(index, _as(size, index.dtype))) if not self.proves(c)]

    def guard(self, buffer: tirx.Buffer, indices: Sequence[tirx.PrimExpr]) -> list[tirx.PrimExpr]:
        """The conditions under which `buffer[indices]` is inside the buffer, without those that always hold."""
        return [c for index, size in zip(indices, buffer.shape, strict=True) for c in self.outside(index, size)]

    def clip(
        self, start: tirx.PrimExpr, extent: tirx.PrimExpr, size: tirx.PrimExpr
    ) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
        """The `i` in `begin <= i < end` are those of `0 ... extent - 1` for which `start + i` is inside `size`."""
        start = self.simplify(start)
        zero, size, extent = tirx.IntImm(start.dtype, 0), _as(size, start.dtype), _as(extent, start.dtype)
        begin = zero if self.proves(start >= 0) else tirx.Max(zero, self.simplify(0 - start))
        inside = self.proves(start + extent <= size)
        end = extent if inside else tirx.Min(extent, self.simplify(size - start))
        return _as(begin, "int32"), _as(end, "int32")


def _has_floats(expr: tirx.PrimExpr) -> bool:
    """Whether a part of an expression is no integer: what simplifies integers need not hold of NaN."""
    return not all(part.dtype.startswith(("int", "uint", "bool")) for part in nodes(expr, tirx.PrimExpr))


def _as(expr: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
    if expr.dtype == dtype:
        return expr
    return tirx.IntImm(dtype, expr.value) if isinstance(expr, tirx.IntImm) else tirx.Cast(dtype, expr)
