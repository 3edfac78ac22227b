"""Which loops of a nest may run all their iterations at once, without a difference from running them in order.

A loop may, if any two accesses of one element (at least one of them a write) in the nest happen in the same iteration
of that loop: then everything that depends on each other keeps its order. This is decided from the index expressions,
as linear forms of the loop variables; what can't be decided runs in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations_with_replacement

from tvm import tirx

from mesh_tensor.tir.linear import Linear, sum_of
from mesh_tensor.tir.nodes import same_expression
from mesh_tensor.tir.rewrite import inner

from .nest import NestLoop, Touch, read_nest


def lanes_of(root: tirx.For) -> dict[int, int]:
    """The axis of each loop (by the id of its variable) of the nest at `root` that may run all at once: its depth among
    those."""
    nest = read_nest(root)
    if nest is None:
        return {}
    lanes = {var for var, bounds in nest.bounds.items() if not nest.changes(bounds)}
    written = nest.written
    touches = [t for t in nest.touches if t.data in written]
    reader = AffineReader(nest.binds, nest.is_atom)
    forms = {id(t): {place: reader.read(i) for place, i in joined_div_mod(t.indices).items()} for t in touches}
    for a, b in combinations_with_replacement(touches, 2):
        common = [x for x, y in zip(a.loops, b.loops, strict=False) if x is y]
        if a.data != b.data or not (a.writes or b.writes) or lanes.isdisjoint(loop.var for loop in common):
            continue
        same = _same_iteration(a, b, forms[id(a)], forms[id(b)], common) if a.buffer.same_as(b.buffer) else set()
        lanes -= {loop.var for loop in common} - same
    axes: dict[int, int] = {}
    _number(root, lanes, 0, axes)
    return axes


def _number(stmt: tirx.Stmt, lanes: set[int], depth: int, axes: dict[int, int]) -> None:
    if isinstance(stmt, tirx.For) and hash(stmt.loop_var) in lanes:
        axes[hash(stmt.loop_var)] = depth
        depth += 1
    for child in inner(stmt):
        _number(child, lanes, depth, axes)


@dataclass(frozen=True)
class _Unknown:
    """A quantity in `low..high` that is multiplied by `scale`; `var` if it is the difference of a common loop's two
    iterations."""

    scale: int
    low: float
    high: float
    var: int | None = None


def _same_iteration(
    a: Touch, b: Touch, at_a: dict[Place, Linear | None], at_b: dict[Place, Linear | None], common: list[NestLoop]
) -> set[int]:
    """The common loops that are in the same iteration whenever `a` and `b` touch the same element; all of them if they
    never do."""
    everything = {loop.var for loop in common}
    equal = {loop.var for loop in common if loop.extent is not None and loop.extent <= 1}
    equations = [_equation(at_a[place], at_b[place], a, b, common) for place in at_a if place in at_b]
    progress = True
    while progress:
        progress = False
        for equation in equations:
            if equation is None:
                continue
            unknowns, offset = equation
            open_ones = [u for u in unknowns if u.var not in equal]
            if _never_zero(open_ones, offset):
                return everything
            found = _forced(open_ones, offset)
            progress |= not found <= equal
            equal |= found
    return equal


def _equation(
    x: Linear | None, y: Linear | None, a: Touch, b: Touch, common: list[NestLoop]
) -> tuple[list[_Unknown], int] | None:
    """`x == y` at two iterations, as `sum of unknowns + offset == 0`; None if nothing is known."""
    if x is None or y is None:
        return None
    shared = {loop.var: loop for loop in common}
    unknowns: list[_Unknown] = []
    for form, touch, sign in ((x, a, 1), (y, b, -1)):
        own = {loop.var: loop for loop in touch.loops}
        for atom, scale in form.terms.items():
            if atom in shared and x.terms.get(atom) == y.terms.get(atom):
                if sign > 0:
                    reach = _span(shared[atom])
                    unknowns.append(_Unknown(scale, -reach, reach, atom))
            elif atom in own:
                loop = own[atom]
                low = -math.inf if loop.low is None else loop.low
                high = math.inf if loop.low is None else loop.low + _span(loop)
                unknowns.append(_Unknown(sign * scale, low, high))
            elif x.terms.get(atom) != y.terms.get(atom):
                return None
    return unknowns, x.const - y.const


def _span(loop: NestLoop) -> float:
    return math.inf if loop.extent is None else max(loop.extent - 1, 0)


def _range(unknowns: Iterable[_Unknown], offset: int) -> tuple[float, float]:
    low = high = float(offset)
    for u in unknowns:
        ends = (u.scale * u.low, u.scale * u.high)
        low, high = low + min(ends), high + max(ends)
    return low, high


def _never_zero(unknowns: list[_Unknown], offset: int) -> bool:
    low, high = _range(unknowns, offset)
    divisor = math.gcd(*(u.scale for u in unknowns))
    return low > 0 or high < 0 or (offset % divisor != 0 if divisor else offset != 0)


def _forced(unknowns: list[_Unknown], offset: int) -> set[int]:
    """The differences that must be 0: those whose one step is more than all the rest can make up for."""
    forced: set[int] = set()
    rest = sorted(unknowns, key=lambda u: -abs(u.scale))
    while rest:
        first, rest = rest[0], rest[1:]
        low, high = _range(rest, offset)
        if first.var is None or abs(first.scale) <= max(abs(low), abs(high)):
            break
        forced.add(first.var)
    return forced


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
