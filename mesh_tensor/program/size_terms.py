"""Numbers of plans as functions of sizes: between sizes for which they are known, by multilinear interpolation."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from tvm import ir, relax, tirx

from mesh_tensor.rules.kernel.cost import ON_SIZES
from mesh_tensor.rules.operator.call import tensor_infos

Sizes = tuple[int, ...]

_LARGEST_PERIOD = 1 << 12


@dataclass(frozen=True)
class Box:
    """The sizes from `low` to `high` that have the remainders of `low` for `periods`; of one size, where both are the
    same. `high` has these remainders, too."""

    low: Sizes
    high: Sizes
    periods: Sizes

    def __contains__(self, sizes: Sizes) -> bool:
        ranges = zip(sizes, self.low, self.high, self.periods, strict=True)
        return all(low <= size <= high and (size - low) % period == 0 for size, low, high, period in ranges)

    @cached_property
    def corners(self) -> tuple[Sizes, ...]:
        """Its corners, each once."""
        return tuple(product(*(dict.fromkeys(ends) for ends in zip(self.low, self.high, strict=True))))

    def shares(self, sizes: Sizes) -> tuple[list[int], int]:
        """How much each of the corners counts at these sizes, in parts of a total."""
        shares, total = [1], 1
        for size, low, high in zip(sizes, self.low, self.high, strict=True):
            if low != high:
                shares = [share * part for share in shares for part in (high - size, size - low)]
                total *= high - low
        return shares, total

    def tells_periods(self, sizes: Sizes) -> bool:
        """Whether a number that has longer periods than these differs at these sizes from what its corners say: along
        each side the size is within, and divides it into parts without a common factor."""
        ranges = zip(sizes, self.low, self.high, self.periods, strict=True)
        return all(
            low == high or (low < size < high and math.gcd((size - low) // period, (high - size) // period) == 1)
            for size, low, high, period in ranges
        )


class Terms:
    """Numbers by what they are at the corners of a box; each is known once."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._known: dict[tuple[int, ...], int] = {}
        self._open: list[int] = []
        self._fixed: set[int] = set()

    def term(self, at_corners: tuple[int, ...]) -> int:
        """The number of the term that is so much at the corners."""
        number = self._known.get(at_corners)
        if number is None:
            number = self._known[at_corners] = len(self._known)
            if len(set(at_corners)) == 1:
                self._fixed.add(at_corners[0])
            else:
                self._open.append(number)
        return number

    def at(self, sizes: Sizes) -> list[int] | None:
        """What all terms are at these sizes; None where one would be no whole number."""
        shares, total = self._box.shares(sizes)
        found = []
        for at_corners in self._known:
            first = at_corners[0]
            if at_corners.count(first) == len(at_corners):
                found.append(first)
                continue
            number, rest = divmod(sum([share * at for share, at in zip(shares, at_corners, strict=True)]), total)
            if rest:
                return None
            found.append(number)
        return found

    def is_open(self, number: int) -> bool:
        """Whether the term of this number is not the same at all corners."""
        return number in self._open

    def coincide(self, values: Sequence[int], constants: Collection[int]) -> bool:
        """Whether at sizes where terms are these `values`, some that are open are as others by chance, or as
        constants."""
        chosen = [values[number] for number in self._open]
        return (
            len(set(chosen)) < len(chosen) or not self._fixed.isdisjoint(chosen) or any(c in constants for c in chosen)
        )


@dataclass(frozen=True, eq=False)
class Divisions:
    """How sizes of a function follow from its symbols. `periods`: per symbol, a number of which sizes that have the
    same remainder are divided alike; `constants`: the sizes that are the same for all; `choices`: sizes of which the
    smaller or the larger one is taken."""

    periods: Sizes
    constants: frozenset[int]
    choices: tuple[tuple[tirx.PrimExpr, tirx.PrimExpr], ...]

    def chosen(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Which ones are larger, at these sizes of symbols: 1 for the first, -1 for the second, 0 for none."""
        values = [(_value(one, sizes), _value(other, sizes)) for one, other in self.choices]
        return tuple([(one > other) - (one < other) for one, other in values])


def divisions(func: relax.Function, symbols: Sequence[str]) -> Divisions | None:
    """How the function's sizes follow from symbols. None where they are made by more than sums, products, quotients by
    constants and choices, or where the function is more than operators on tensors in one sequence."""
    found, constants = dict.fromkeys(symbols, 1), {0, 1}
    choices: list[tuple[tirx.PrimExpr, tirx.PrimExpr]] = []
    try:
        for expr in _sizes_of(func):
            if isinstance(expr, tirx.IntImm):
                constants.add(int(expr))
            else:
                for name, period in _periods(expr, choices).items():
                    found[name] = math.lcm(found[name], period)
    except (_OtherError, KeyError):
        return None
    made = tuple(found[name] for name in symbols)
    if max(made, default=1) > _LARGEST_PERIOD:
        return None
    return Divisions(made, frozenset(constants), tuple(choices))


def _value(expr: tirx.PrimExpr, sizes: Mapping[str, int]) -> int:
    if isinstance(expr, tirx.Var):
        return sizes[expr.name]
    if isinstance(expr, tirx.IntImm):
        return int(expr)
    if isinstance(expr, tirx.Cast):
        return _value(expr.value, sizes)
    return ON_SIZES[type(expr)](_value(expr.a, sizes), _value(expr.b, sizes))


class _OtherError(Exception):
    """Sizes are made otherwise."""


def _sizes_of(func: relax.Function) -> Iterator[tirx.PrimExpr]:
    """The sizes in a function, and its other numbers."""
    if not isinstance(func.body, relax.SeqExpr):
        raise _OtherError
    for var in func.params[:]:
        yield from _in_info(var.struct_info)
    for block in func.body.blocks[:]:
        for binding in block.bindings[:]:
            yield from _in_info(binding.var.struct_info)
            yield from _in_expr(binding.value)


def _in_info(info: relax.StructInfo) -> Iterator[tirx.PrimExpr]:
    for tensor in tensor_infos(info):
        shape = getattr(tensor, "tensor_sinfo", tensor).shape
        if not isinstance(shape, relax.ShapeExpr):
            raise _OtherError
        yield from shape.values[:]


def _in_expr(expr: relax.Expr) -> Iterator[tirx.PrimExpr]:
    if isinstance(expr, relax.Call):
        if not isinstance(expr.op, ir.Op):
            raise _OtherError
        for arg in expr.args[:]:
            yield from _in_expr(arg)
    elif isinstance(expr, relax.Tuple):
        for field in expr.fields[:]:
            yield from _in_expr(field)
    elif isinstance(expr, relax.ShapeExpr):
        yield from expr.values[:]
    elif isinstance(expr, relax.PrimValue) and str(expr.value.dtype).startswith("int"):
        yield expr.value
    elif isinstance(expr, (relax.If, relax.Function, ir.GlobalVar)):
        raise _OtherError


def _periods(expr: tirx.PrimExpr, choices: list[tuple[tirx.PrimExpr, tirx.PrimExpr]]) -> Mapping[str, int]:
    """Per symbol of a size, with which period it is a sum of products of symbols, once what is chosen is known, which
    is added to `choices`."""
    if isinstance(expr, tirx.Var):
        return {expr.name: 1}
    if isinstance(expr, tirx.IntImm):
        return {}
    if isinstance(expr, tirx.Cast):
        return _periods(expr.value, choices)
    if isinstance(expr, (tirx.Add, tirx.Sub, tirx.Mul, tirx.Min, tirx.Max)):
        if isinstance(expr, (tirx.Min, tirx.Max)):
            choices.append((expr.a, expr.b))
        one, other = _periods(expr.a, choices), _periods(expr.b, choices)
        return {name: math.lcm(one.get(name, 1), other.get(name, 1)) for name in (*one, *other)}
    if isinstance(expr, (tirx.FloorDiv, tirx.FloorMod)) and isinstance(expr.b, tirx.IntImm) and int(expr.b) > 0:
        return {name: period * int(expr.b) for name, period in _periods(expr.a, choices).items()}
    raise _OtherError
