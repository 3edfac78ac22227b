"""Constants of TIR: made of Python's numbers, and understood as such."""

from __future__ import annotations

import math

from tvm import tirx

from mesh_tensor.base import reductions
from mesh_tensor.base.dtypes import extreme, is_float

_INFINITE = ("float16", "float32", "float64")  # what code generators spell the infinities of


def constant(value: float, dtype: str) -> tirx.PrimExpr:
    """A number as a constant of `dtype`."""
    if math.isinf(value) and dtype not in _INFINITE:
        return tirx.Cast(dtype, tirx.const(value, "float32"))
    return tirx.const(value, dtype)


def neutral_element(op: str, dtype: str) -> tirx.PrimExpr:
    """The constant that changes nothing under `op`: 0 for sum, 1 for prod, the smallest value for max, ..."""
    return constant(reductions.neutral(op, dtype), dtype)


def number(expr: object) -> float | None:
    """The value of a constant expression, None if it is none that is understood."""
    if isinstance(expr, (int, float)):
        return expr
    if isinstance(expr, (tirx.IntImm, tirx.FloatImm)):
        return expr.value
    if isinstance(expr, tirx.Cast):
        return _cast(number(expr.value), expr.dtype)
    if isinstance(expr, tirx.Call) and getattr(expr.op, "name", "") in ("tl.infinity", "tirx.infinity"):
        return math.inf
    if isinstance(expr, (tirx.Mul, tirx.Sub)):
        a, b = number(expr.a), number(expr.b)
        if a is not None and b is not None:
            return a * b if isinstance(expr, tirx.Mul) else a - b
    return None


def _cast(value: float | None, dtype: str) -> float | None:
    """What becomes of a number; integers keep those that they have, others are not understood."""
    if value is None or is_float(dtype):
        return value
    return value if extreme(dtype, -1) <= value <= extreme(dtype, 1) and value == int(value) else None
