"""Neutral elements of reductions, as TIR constants and as questions about statements."""

from __future__ import annotations

import math

from tvm import tirx

from mesh_tensor.tir import tile_ops

from .statements import Statement

#: Combining a value with itself changes nothing: such reductions need not count their start once.
IDEMPOTENT = ("max", "min", "bitand", "bitor")


#: Formats of 8 bits that TileLang calls by a name of their own: they are torch's, without infinities.
FINITE = {"float8_e4m3": "float8_e4m3fn"}

_LARGEST_E4M3 = 448.0


def neutral_element(op: str, dtype: str) -> tirx.PrimExpr:
    """The value that changes nothing under `op`: 0 for sum, 1 for prod, the smallest value for max, ..."""
    if op in ("sum", "bitor", "bitxor", "abssum", "absmax"):
        return tirx.const(0, dtype)
    if op == "prod":
        return tirx.const(1, dtype)
    if op == "bitand":
        return tirx.const(True, dtype) if dtype == "bool" else tirx.bitwise_not(tirx.const(0, dtype))
    if op in ("max", "min") and dtype.startswith("float8_e4m3"):
        return tirx.const(-_LARGEST_E4M3 if op == "max" else _LARGEST_E4M3, dtype)
    if op in ("max", "min") and dtype == "float8_e5m2":
        return tirx.Cast(dtype, neutral_element(op, "float32"))
    if op == "max":
        return -tirx.infinity(dtype) if _is_float(dtype) else tirx.min_value(dtype)
    if op == "min":
        return tirx.infinity(dtype) if _is_float(dtype) else tirx.max_value(dtype)
    raise ValueError(f"{op!r} is no reduction")


def neutral_number(op: str, dtype: str) -> float | None:
    """The neutral element as a number, where it is one that constants can be compared with."""
    if op in ("sum", "bitor", "bitxor", "abssum", "absmax"):
        return 0.0
    if op == "prod":
        return 1.0
    if _is_float(dtype) and op in ("max", "min"):
        return -math.inf if op == "max" else math.inf
    return None


def number(expr: object) -> float | None:
    """The value of a constant expression, None if it is none that is understood."""
    if isinstance(expr, (int, float)):
        return float(expr)
    if isinstance(expr, (tirx.IntImm, tirx.FloatImm)):
        return float(expr.value)
    if isinstance(expr, tirx.Cast):
        return number(expr.value)
    if isinstance(expr, tirx.Call) and getattr(expr.op, "name", "") in ("tl.infinity", "tirx.infinity"):
        return math.inf
    if isinstance(expr, (tirx.Mul, tirx.Sub)):
        a, b = number(expr.a), number(expr.b)
        if a is not None and b is not None:
            return a * b if isinstance(expr, tirx.Mul) else a - b
    return None


def is_neutral(statement: Statement, op: str) -> bool:
    """Whether the statement sets what it writes to `op`'s neutral element."""
    if statement.op is not None or not statement.values:
        return False
    if statement.tile_op is not None and not isinstance(statement.tile_op, tile_ops.Fill):
        return False
    value = number(statement.values[0])
    return value is not None and value == neutral_number(op, statement.target.buffer.dtype)


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))
