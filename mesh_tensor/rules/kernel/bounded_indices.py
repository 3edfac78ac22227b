"""How far an index is from a coordinate: `2 * x + t - 1`, with t one of 0, 1, 2, is 2 * x - 1 at least and 2 * x + 1 at
most. Loops whose bounds depend on x (a sliding window) are followed. And places that are indexed by data, of which a
device may have some and not others: `L[b, label[b]]`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice, product
from typing import NamedTuple

from tvm import tirx

from mesh_tensor.base.reductions import REDUCTIONS
from mesh_tensor.tir import tile_ops
from mesh_tensor.tir.effects import chosen, op_name
from mesh_tensor.tir.linear import Linear, sum_of, vars_of
from mesh_tensor.tir.nodes import DIVISIONS, loads, nodes, same_expression
from mesh_tensor.tir.prover import Prover

from .reader import known_uses
from .statements import Access, Kernel, Loop, Statement, without_binds


def is_loaded(kernel: Kernel, statement: Statement, access: Access, dim: int) -> bool:
    """Whether an index reads memory; what a variable is bound to was read before, and may have changed since."""
    index = access.indices[dim]
    loaded = bool(loads(index)) and not vars_of([index], {}) & kernel.binds.keys()
    return loaded and dim not in statement.element_dims(access)


def is_bound_to_loads(kernel: Kernel, statement: Statement, access: Access, dim: int) -> bool:
    """Whether an index is made of what variables are bound to, and that was read of other parameters that nothing
    writes: it is the same since, on all devices."""
    index = access.indices[dim]
    if not vars_of([index], {}) & kernel.binds.keys() or dim in statement.element_dims(access):
        return False
    read = [load.buffer for load in loads(without_binds(index, kernel))]
    return bool(read) and all(kernel.keeps(buffer) and not buffer.same_as(access.buffer) for buffer in read)


def beside_walks(kernel: Kernel, statement: Statement, access: Access, dim: int) -> bool:
    """Whether a dim that loops walk elsewhere is indexed by data here, in a statement that each device can run for what
    its tile has: what is looked up goes into one place; of what is written, nothing is read here."""
    place = kernel, statement, access, dim
    if access.buffer.dtype == "bool" or not (is_loaded(*place) or is_bound_to_loads(*place)):
        return False
    uses = known_uses(kernel, access.buffer)
    if not any(form.terms for _, other in uses if (form := other.forms[dim]) is not None):
        return False
    if any(s.writes(access.buffer) for s in kernel.statements):
        return only_writes(statement, access)
    return takes_one(statement, access, dim)


def only_writes(statement: Statement, access: Access) -> bool:
    """Whether the statement is a store, or an atomic update of one element, and nothing is made of what was there."""
    if access is not statement.write:
        return False
    if statement.tile_op is None:
        return isinstance(statement.node, tirx.BufferStore)
    return isinstance(statement.tile_op, tile_ops.Atomic) and not statement.tile_op.dst.long_dims


def puts_at_constant(statement: Statement, access: Access, dim: int) -> bool:
    """Whether the statement writes to one place of a dim that is the same for all that runs, and reads nothing of what
    was there: a store, or a tile operation that overwrites or combines a block."""
    form = access.forms[dim]
    if access is not statement.write or form is None or form.terms or dim in statement.element_dims(access):
        return False
    if statement.tile_op is None:
        return isinstance(statement.node, tirx.BufferStore)
    return isinstance(statement.tile_op, (tile_ops.Copy, tile_ops.Fill, tile_ops.Atomic))


def takes_one(statement: Statement, access: Access, dim: int) -> bool:
    """Whether what the statement stores is made of one row of the dim, and nothing else in it depends on the table."""
    if statement.write is None or statement.target.buffer.dtype == "bool":
        return False
    if isinstance(statement.tile_op, tile_ops.Copy):
        return access in statement.reads[:1]
    if not isinstance(statement.node, tirx.BufferStore) or statement.op not in (None, *REDUCTIONS):
        return False
    loops = [e for loop in statement.loops for e in (loop.min, loop.extent) if isinstance(e, tirx.PrimExpr)]
    elsewhere = [*statement.conditions, *loops, *statement.target.indices]
    if any(load.buffer.same_as(access.buffer) for expr in elsewhere for load in loads(expr)):
        return False
    mine = [load for load in loads(statement.values[0]) if load.buffer.same_as(access.buffer)]
    nested = [inner for load in loads(statement.values[0]) for index in load.indices for inner in loads(index)]
    if not mine or any(inner.buffer.same_as(access.buffer) for inner in nested):
        return False
    return all(same_expression(load.indices[dim], mine[0].indices[dim]) for load in mine)


def deciding(statement: Statement) -> list[tirx.PrimExpr]:
    """What says where something of a statement is, and what integers are divided by in it."""
    divisions = [d for v in statement.values for d in nodes(v, *DIVISIONS)]
    divisors = [division.b for division in divisions if division.dtype.startswith(("int", "uint"))]
    return [*(index for access in statement.accesses for index in access.indices), *divisors]


_MOST_SLOPES = 8
_MOST_CHOICES = 4  # that cases are told apart of


class Interval(NamedTuple):
    """From `low` to `high`, both included."""

    low: Fraction
    high: Fraction

    def __add__(self, other: Interval) -> Interval:  # type: ignore[override]
        return Interval(self.low + other.low, self.high + other.high)

    def scaled(self, factor: Fraction) -> Interval:
        ends = sorted((self.low * factor, self.high * factor))
        return Interval(*ends)

    def hull(self, other: Interval) -> Interval:
        return Interval(min(self.low, other.low), max(self.high, other.high))


class Distance:
    """Bounds of expressions relative to a coordinate `form` of loop variables, which is 0 .. `most`."""

    def __init__(self, form: Linear, most: int, loops: Mapping[tirx.Var, Loop], analyzer: Prover) -> None:
        self._outer, self._step = form.ordered[0]
        self._rest = dict(form.ordered[1:])
        self._along, self._loops, self._analyzer = Interval(Fraction(0), Fraction(most)), loops, analyzer

    def best(self, expr: tirx.PrimExpr) -> tuple[Fraction, Interval] | None:
        """A slope, and the bounds of `expr - slope * coordinate`: the closest ones; None if there are none."""
        expr = self._analyzer.simplify(expr)
        found = [(slope, bounds) for slope in self._slopes(expr) if slope > 0 and (bounds := self.bounds(expr, slope))]
        return min(found, key=lambda pair: pair[1].high - pair[1].low, default=None)

    def bounds(self, expr: tirx.PrimExpr, slope: Fraction) -> Interval | None:
        """Bounds of `expr - slope * coordinate`."""
        const, terms = _terms(expr)
        ends = self._ends(expr, terms)
        if ends is not None:
            first, last = (self._by_cases(end, slope) for end in ends)
            return None if first is None or last is None else first.hull(last)
        total, left = Interval(Fraction(const), Fraction(const)), slope
        opaque: list[tuple[tirx.PrimExpr, Fraction]] = []
        shares: dict[tirx.Var, Fraction] = {}
        for term, count in terms:
            if isinstance(term, tirx.Var) and term == self._outer:
                share = Fraction(count, self._step)  # outer = (coordinate - the rest) / step
                left -= share
                for var, step in self._rest.items():
                    shares[var] = shares.get(var, Fraction(0)) - share * step
            elif isinstance(term, tirx.Var) and self._is_simple(term):
                shares[term] = shares.get(term, Fraction(0)) + count
            else:
                opaque.append((term, Fraction(count)))
        for var, share in shares.items():
            bounds = Interval(Fraction(0), Fraction(0)) if not share else self._loop(var, Fraction(0))
            if bounds is None:
                return None
            total += bounds.scaled(share)
        return self._with_opaque(total, opaque, left)

    def _by_cases(self, expr: tirx.PrimExpr, slope: Fraction, most: int = _MOST_CHOICES) -> Interval | None:
        """Bounds of an expression with choices of the larger or smaller: of what it is in every case, where what is
        chosen may cancel out."""
        bounds = self.bounds(expr, slope)
        choice = next(iter(nodes(tirx.Evaluate(expr), tirx.Max, tirx.Min)), None) if most else None
        if choice is None or bounds is None:
            return bounds
        smaller = isinstance(choice, tirx.Min)
        cases = [(choice.a < choice.b, choice.a if smaller else choice.b)]
        cases += [(choice.a >= choice.b, choice.b if smaller else choice.a)]
        found = [self._where(holds, _with_chosen(expr, choice, chosen), slope, most - 1) for holds, chosen in cases]
        known = [interval for interval in found if interval is not None]
        if len(known) < len(found):
            return bounds
        either = known[0].hull(known[1])
        return Interval(max(bounds.low, either.low), min(bounds.high, either.high))

    def _where(self, condition: tirx.PrimExpr, expr: tirx.PrimExpr, slope: Fraction, most: int) -> Interval | None:
        with self._analyzer.constraint_scope(condition):
            return self._by_cases(self._analyzer.simplify(expr), slope, most)

    def _ends(
        self, expr: tirx.PrimExpr, terms: Sequence[tuple[tirx.PrimExpr, int]]
    ) -> tuple[tirx.PrimExpr, tirx.PrimExpr] | None:
        """The expression at the start and at the end of a loop that another's bounds depend on, if there is one: where
        its variable is a term, what lies between is between these."""
        for var, _ in terms:
            loop = self._loops.get(var) if isinstance(var, tirx.Var) and not self._is_walked(var) else None
            if loop is None or self._is_simple(var) or any(var in vars_of([t], {}) for t, _ in terms if t is not var):
                continue
            ends = (loop.min, loop.min + loop.extent - 1)
            at = [tirx.stmt_functor.substitute(expr, {var: end}) for end in ends]
            return self._analyzer.simplify(at[0]), self._analyzer.simplify(at[1])
        return None

    def _is_walked(self, var: tirx.Var) -> bool:
        return var == self._outer or var in self._rest

    def _with_opaque(
        self, total: Interval, opaque: list[tuple[tirx.PrimExpr, Fraction]], left: Fraction
    ) -> Interval | None:
        """The last of what is no plain variable takes the slope that is left, the others their own."""
        for number, (term, count) in enumerate(opaque):
            last = number == len(opaque) - 1
            slope = left / count if last else next(iter(self._slopes(term)), Fraction(0))
            bounds = self._opaque(term, slope)
            if bounds is None:
                return None
            total += bounds.scaled(count)
            left -= slope * count
        return total + self._along.scaled(-left)

    def _opaque(self, expr: tirx.PrimExpr, slope: Fraction) -> Interval | None:
        if isinstance(expr, tirx.Var):
            return self._loop(expr, slope)
        if isinstance(expr, (tirx.Max, tirx.Min)):
            a, b = self.bounds(expr.a, slope), self.bounds(expr.b, slope)
            pick = max if isinstance(expr, tirx.Max) else min
            return None if a is None or b is None else Interval(pick(a.low, b.low), pick(a.high, b.high))
        divisor = _divisor(expr)
        if isinstance(expr, tirx.FloorDiv) and divisor:
            bounds = self.bounds(expr.a, slope * divisor)
            return bounds and Interval((bounds.low - (divisor - 1)) / divisor, bounds.high / divisor)
        if isinstance(expr, tirx.FloorMod) and divisor:
            return Interval(Fraction(0), Fraction(divisor - 1)) + self._along.scaled(-slope)
        if (choice := chosen(expr)) is not None:
            a, b = (self.bounds(branch, slope) for branch in choice[1:])
            return None if a is None or b is None else a.hull(b)
        return None

    def _loop(self, var: tirx.Var, slope: Fraction) -> Interval | None:
        """A loop's variable is its start at least, and its end, less 1, at most."""
        loop = self._loops.get(var)
        if loop is None:
            return None
        simplify = self._analyzer.simplify
        first, last = (self.bounds(simplify(end), slope) for end in (loop.min, loop.min + loop.extent - 1))
        return None if first is None or last is None else Interval(first.low, max(first.low, last.high))

    def _is_simple(self, var: tirx.Var) -> bool:
        loop = self._loops.get(var)
        return loop is not None and all(isinstance(e, (int, tirx.IntImm)) for e in (loop.min, loop.extent))

    def _slopes(self, expr: tirx.PrimExpr) -> list[Fraction]:
        """Slopes that the expression may follow."""
        _, terms = _terms(expr)
        sums = product(*([share * count for share in self._own_slopes(term)] for term, count in terms))
        return list(dict.fromkeys(sum(shares, Fraction(0)) for shares in islice(sums, _MOST_SLOPES)))

    def _own_slopes(self, term: tirx.PrimExpr) -> list[Fraction]:
        found = list(dict.fromkeys(self._term_slopes(term)))
        return sorted(found, reverse=True) or [Fraction(0)]

    def _term_slopes(self, term: tirx.PrimExpr) -> Iterator[Fraction]:
        divisor = _divisor(term)
        if isinstance(term, tirx.Var):
            if term == self._outer:
                yield Fraction(1, self._step)
            elif term in self._loops and not self._is_simple(term) and term not in self._rest:
                yield from self._slopes(self._loops[term].min)
        elif isinstance(term, (tirx.Max, tirx.Min)):
            yield from (*self._slopes(term.a), *self._slopes(term.b))
        elif isinstance(term, tirx.FloorDiv) and divisor:
            yield from (slope / divisor for slope in self._slopes(term.a))
        elif op_name(term) == "tirx.if_then_else":
            yield from (*self._slopes(term.args[1]), *self._slopes(term.args[2]))


def _with_chosen(expr: tirx.PrimExpr, choice: tirx.PrimExpr, chosen: tirx.PrimExpr) -> tirx.PrimExpr:
    """The expression, in which a choice is what it is in one case."""

    def exchange(node: tirx.PrimExpr) -> tirx.PrimExpr | None:
        return chosen if same_expression(node, choice) else None

    return tirx.stmt_functor.ir_transform(tirx.Evaluate(expr), None, exchange, ["tirx.Max", "tirx.Min"]).value


def _divisor(expr: tirx.PrimExpr) -> int:
    """What an expression is divided by, if that is a positive constant; else 0."""
    divides = isinstance(expr, (tirx.FloorDiv, tirx.FloorMod)) and isinstance(expr.b, tirx.IntImm)
    return int(expr.b) if divides and int(expr.b) > 0 else 0


def _terms(expr: tirx.PrimExpr | int) -> tuple[int, list[tuple[tirx.PrimExpr, int]]]:
    """The constant of a sum, and its terms with their coefficients; what is no sum is its own term."""
    parts: list[tirx.PrimExpr] = []

    def term(part: tirx.PrimExpr) -> Linear | None:
        if isinstance(part, tirx.Cast) and part.dtype in ("int32", "int64") and part.value.dtype == "int32":
            return sum_of(part.value, term)
        number = next((number for number, known in enumerate(parts) if known.same_as(part)), len(parts))
        parts[number:] = parts[number:] or [part]
        return Linear({number: 1})

    form = sum_of(expr, term)
    assert form is not None
    return form.const, [(parts[number], count) for number, count in form.terms.items()]
