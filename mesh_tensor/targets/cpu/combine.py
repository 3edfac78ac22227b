"""What reductions, scans and atomics combine values with, and where they start."""

from __future__ import annotations

from tvm import tirx

from .dtypes import compute_dtype
from .exprs import const


def combine(op: str, total: tirx.PrimExpr, value: tirx.PrimExpr) -> tirx.PrimExpr:
    """`total op value`, as the reductions, scans and atomics of that name do it."""
    if op == "sum":
        return tirx.Add(total, value)
    if op == "prod":
        return tirx.Mul(total, value)
    if op == "abssum":
        return tirx.Add(total, _abs(value))
    if op == "max":
        return tirx.Max(total, value)
    if op == "min":
        return tirx.Min(total, value)
    if op == "absmax":
        return tirx.Max(total, _abs(value))
    functions = {"bitand": tirx.bitwise_and, "bitor": tirx.bitwise_or, "bitxor": tirx.bitwise_xor}
    return functions[op](total, value)


def neutral(op: str, dtype: str) -> tirx.PrimExpr:
    """What `op` starts from: combined with it, a value stays what it is."""
    if dtype == "bool":
        return const(op in ("min", "bitand", "prod"), dtype)
    if op in ("sum", "abssum", "bitor", "bitxor", "absmax"):
        return const(0, dtype)
    if op == "prod":
        return const(1, dtype)
    if op == "bitand":
        return tirx.IntImm("int32", -1).astype(dtype) if dtype.startswith("int") else tirx.max_value(dtype)
    if "int" in dtype:
        return tirx.min_value(dtype) if op == "max" else tirx.max_value(dtype)
    return const(float("-inf") if op == "max" else float("inf"), dtype)


def accumulator_dtype(dtype: str) -> str:
    """What values of `dtype` are accumulated in."""
    return compute_dtype(dtype)


def _abs(value: tirx.PrimExpr) -> tirx.PrimExpr:
    zero = const(0, value.dtype)
    if "int" not in value.dtype:
        return tirx.Call(value.dtype, "tirx.fabs", [value])
    return value if value.dtype.startswith("u") else tirx.Select(tirx.GE(value, zero), value, tirx.Sub(zero, value))
