"""Reductions: one record each, of all that any part of the compiler has to know about one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from .dtypes import extreme, is_float
from .errors import did_you_mean, listing, refuse, shown

Number = float | int


@dataclass(frozen=True)
class Reduction:
    """An operation that combines values.

    neutral     what changes nothing, of a dtype
    function    what numpy and torch call the function of two tensors
    tir         what TIR calls the expression, or the function, of two values
    torch       what torch's placements call it; None if no tensor can be partial in it
    operands    "numbers", those with an order ("ordered"), or "bits"
    idempotent  a value that is combined with itself stays what it is
    rounds      results of floats are rounded, so that they depend on the order and on what they are accumulated in
    magnitudes  the reduction that combines the values' magnitudes; None where the values themselves are combined"""

    name: str
    neutral: Callable[[str], Number]
    function: str
    tir: str
    torch: str | None = None
    operands: str = "numbers"
    idempotent: bool = False
    rounds: bool = False
    magnitudes: str | None = None

    @property
    def completed_by(self) -> str:
        """The reduction that makes one result of several."""
        return self.magnitudes or self.name

    def takes(self, dtype: str) -> bool:
        """Whether values of a dtype can be combined."""
        is_complex = dtype.startswith("complex")
        return self.operands == "numbers" or not (is_complex or self.operands == "bits" and is_float(dtype))


def _zero(dtype: str) -> Number:
    return 0


def _one(dtype: str) -> Number:
    return 1


def _all_bits(dtype: str) -> Number:
    return -1 if dtype.startswith("int") else extreme(dtype, 1)


_lowest, _highest = partial(extreme, sign=-1), partial(extreme, sign=1)
_TABLE = (
    Reduction("sum", _zero, "add", "Add", "sum", rounds=True),
    Reduction("max", _lowest, "maximum", "Max", "max", "ordered", idempotent=True),
    Reduction("min", _highest, "minimum", "Min", "min", "ordered", idempotent=True),
    Reduction("prod", _one, "multiply", "Mul", "product", rounds=True),
    Reduction("bitand", _all_bits, "bitwise_and", "bitwise_and", "band", "bits", idempotent=True),
    Reduction("bitor", _zero, "bitwise_or", "bitwise_or", "bor", "bits", idempotent=True),
    Reduction("bitxor", _zero, "bitwise_xor", "bitwise_xor", "bxor", "bits"),
    Reduction("abssum", _zero, "add", "Add", rounds=True, magnitudes="sum"),
    Reduction("absmax", _zero, "maximum", "Max", None, "ordered", idempotent=True, magnitudes="max"),
)
REDUCTIONS = {record.name: record for record in _TABLE}

#: What a tensor can be partial in, and what torch's placements call it.
PARTIAL_OPS = {record.name: record.torch for record in _TABLE if record.torch is not None}


def reduction(op: str) -> Reduction:
    """The reduction of that name; refused if there is none."""
    if op not in REDUCTIONS:
        known = listing(tuple(REDUCTIONS))
        refuse(f"unknown reduction {shown(op)}{did_you_mean(op, REDUCTIONS)}", fix=f"use one of {known}")
    return REDUCTIONS[op]


def neutral(op: str, dtype: str) -> Number:
    """The element that changes nothing under `op`: 0 for sum, the lowest value for max, all bits set for bitand.

    >>> neutral("max", "int8"), neutral("min", "float16"), neutral("bitand", "int32"), neutral("max", "float8_e4m3")
    (-128, inf, -1, -448.0)
    """
    record = reduction(op)
    if not record.takes(dtype):
        refuse(f"{op!r} has no meaning for {dtype}", fix="reduce with an op that the dtype has")
    return record.neutral(dtype)
