"""numpy dtypes of TIR, and the values that poison, padding and reductions start from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.rules.kernel.values import FINITE

_FINITE_ONLY = np.dtype(ml_dtypes.float8_e4m3fn)

#: Floats that are computed in float32, rounded after every operation, and never overflow to NaN.
FLOAT8 = (_FINITE_ONLY, np.dtype(ml_dtypes.float8_e5m2))

UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "abssum": np.add,
    "max": np.maximum,
    "absmax": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "bitand": np.bitwise_and,
    "bitor": np.bitwise_or,
    "bitxor": np.bitwise_xor,
}


@cache
def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a TIR one, or of a TIR vector's elements; ml_dtypes gives bfloat16 and the 8-bit floats."""
    try:
        element = re.sub(r"x\d+$", "", str(name))
        return np.dtype(FINITE.get(element, element))
    except TypeError:
        raise MeshTensorError(f"the interpreter has no numpy dtype for {name!r}") from None


def is_float(dtype: np.dtype) -> bool:
    """Whether `dtype` is a floating-point one, those of ml_dtypes included (numpy sees them as kind 'V')."""
    return dtype.kind in "fV"


def wide(dtype: np.dtype) -> np.dtype:
    """The dtype in which many values of `dtype` are combined before one rounding: float32 for the shorter floats."""
    return np.dtype(np.float32) if is_float(dtype) and dtype.itemsize < 4 else dtype


def poisoned(shape: Sequence[int], dtype: np.dtype | str) -> np.ndarray:
    """A new array full of values that betray whoever reads them: NaN, or the most negative (for unsigned integers the
    largest) integer; booleans, which have no such value, are True."""
    dtype = numpy_dtype(dtype) if isinstance(dtype, str) else dtype
    return np.full(shape, _poison(dtype), dtype)


@cache
def _poison(dtype: np.dtype) -> Any:
    if is_float(dtype):
        return np.nan
    if dtype.kind == "b":
        return True
    info = np.iinfo(dtype)
    return info.max if dtype.kind == "u" else info.min


@cache
def neutral(op: str, dtype: np.dtype) -> Any:
    """What a reduction with `op` starts from: `op(neutral, v) == v`."""
    if op in ("sum", "abssum", "absmax", "bitor", "bitxor"):
        return dtype.type(0)
    if op == "prod":
        return dtype.type(1)
    if op == "bitand":
        return dtype.type(True) if dtype.kind == "b" else np.invert(dtype.type(0))
    sign = 1 if op == "min" else -1
    if is_float(dtype):
        infinite = dtype.type(sign * np.inf)
        return infinite if dtype != _FINITE_ONLY else dtype.type(sign * finite_max(dtype))
    if dtype.kind == "b":
        return dtype.type(op == "min")
    info = np.iinfo(dtype)
    return dtype.type(info.max if op == "min" else info.min)


def convert(value: Any, dtype: np.dtype) -> Any:
    """`value`, a scalar or an array, as C converts it: floats are truncated, integers wrap."""
    if dtype in FLOAT8:
        value = np.asarray(value).astype(np.float32)[()]  # as torch does
        if dtype == _FINITE_ONLY:
            value = np.clip(value, -finite_max(dtype), finite_max(dtype), dtype=np.float32)
    if isinstance(value, np.ndarray):
        return value.astype(dtype)
    if type(value) is int and dtype.kind == "i" and dtype.itemsize >= 4:
        return value
    return np.asarray(value).astype(dtype)[()]


def assign(target: np.ndarray, where: Any, value: Any) -> None:
    """`target[where] = value`, converted as :func:`convert` does it."""
    target[where] = convert(value, target.dtype) if target.dtype in FLOAT8 else value


@cache
def finite_max(dtype: np.dtype) -> Any:
    """The largest finite value of a dtype."""
    return np.float32(ml_dtypes.finfo(dtype).max) if is_float(dtype) else np.iinfo(dtype).max
