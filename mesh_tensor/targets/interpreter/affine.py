"""Index expressions as linear forms `c0 * v0 + c1 * v1 + ... + const` over variables and opaque sub-expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tvm import tirx

from mesh_tensor.tir.linear import Linear, sum_of
from mesh_tensor.tir.nodes import same_expression


@dataclass
class AffineReader:
    """Reads linear forms. `binds` are variables that stand for their definitions; `opaque` says which sub-expressions
    that are not linear may be atoms (equal ones are the same atom). `atoms` has the expression behind every id."""

    binds: Mapping[int, tirx.PrimExpr]
    opaque: Callable[[tirx.PrimExpr], bool]
    atoms: dict[int, tirx.PrimExpr] = field(default_factory=dict)

    def read(self, expr: tirx.PrimExpr) -> Linear | None:
        """The linear form of `expr`, or None if it has none."""
        return sum_of(expr, self._term)

    def _term(self, expr: tirx.PrimExpr) -> Linear | None:
        if isinstance(expr, tirx.Var) and (bound := self.binds.get(hash(expr))) is not None:
            return self.read(bound)
        if isinstance(expr, tirx.Cast) and str(expr.dtype) in ("int32", "int64"):
            return self.read(expr.value)
        return self._atom(expr)

    def _atom(self, expr: tirx.PrimExpr) -> Linear | None:
        if not self.opaque(expr):
            return None
        key = hash(expr)
        if not isinstance(expr, tirx.Var):
            same = (k for k, known in self.atoms.items() if same_expression(known, expr))
            key = next(same, key)
        self.atoms.setdefault(key, expr)
        return Linear({key: 1})


#: Where an index stands: its dim, or the dims of a quotient and a remainder with their divisor.
Place = tuple[int, ...]


def joined_div_mod(indices: Iterable[tirx.PrimExpr]) -> dict[Place, tirx.PrimExpr]:
    """The indices by where they stand. `[e // c, e % c]` says as much as `[e]`: such pairs are one."""
    result: dict[Place, tirx.PrimExpr] = {(dim,): index for dim, index in enumerate(indices)}
    for first, quotient in list(result.items()):
        for second, remainder in list(result.items()):
            if _is_div_mod(quotient, remainder) and first in result and second in result:
                del result[first], result[second]
                result[first[0], second[0], int(quotient.b)] = quotient.a
    return result


def _is_div_mod(quotient: tirx.PrimExpr, remainder: tirx.PrimExpr) -> bool:
    if not isinstance(quotient, tirx.FloorDiv) or not isinstance(remainder, tirx.FloorMod):
        return False
    divided_alike = isinstance(quotient.b, tirx.IntImm) and same_expression(quotient.b, remainder.b)
    return divided_alike and same_expression(quotient.a, remainder.a)
