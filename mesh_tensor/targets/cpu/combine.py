"""What reductions, scans and atomics combine values with."""

from __future__ import annotations

from tvm import tirx

from mesh_tensor.base.reductions import reduction

from .dtypes import compute_dtype
from .exprs import const


def combine(op: str, total: tirx.PrimExpr, value: tirx.PrimExpr) -> tirx.PrimExpr:
    """`total op value`, as the reductions, scans and atomics of that name do it."""
    record = reduction(op)
    return getattr(tirx, record.tir)(total, _abs(value) if record.magnitudes else value)


def accumulator_dtype(dtype: str) -> str:
    """What values of `dtype` are accumulated in."""
    return compute_dtype(dtype)


def _abs(value: tirx.PrimExpr) -> tirx.PrimExpr:
    zero = const(0, value.dtype)
    if "int" not in value.dtype:
        return tirx.Call(value.dtype, "tirx.fabs", [value])
    return value if value.dtype.startswith("u") else tirx.Select(tirx.GE(value, zero), value, tirx.Sub(zero, value))
