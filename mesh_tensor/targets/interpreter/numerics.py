"""numpy's arithmetic as TIR's: what combines, converts, and poisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from mesh_tensor.base.dtypes import extreme, numpy_dtype, poison_value
from mesh_tensor.base.reductions import REDUCTIONS

_FINITE_ONLY = np.dtype(ml_dtypes.float8_e4m3fn)

#: Floats that are computed in float32, rounded after every operation, and never overflow to NaN.
FLOAT8 = (_FINITE_ONLY, np.dtype(ml_dtypes.float8_e5m2))

UFUNCS: dict[str, np.ufunc] = {name: getattr(np, record.function) for name, record in REDUCTIONS.items()}


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
    return np.full(shape, poison_value(dtype.name), dtype)


def convert(value: Any, dtype: np.dtype) -> Any:
    """`value`, a scalar or an array, as C converts it: floats are truncated, integers wrap."""
    if dtype in FLOAT8:
        value = np.asarray(value).astype(np.float32)[()]  # as torch does
        if dtype == _FINITE_ONLY:
            value = np.clip(value, extreme(dtype.name, -1), extreme(dtype.name, 1), dtype=np.float32)
    if isinstance(value, np.ndarray):
        return value.astype(dtype)
    if type(value) is int and dtype.kind == "i" and dtype.itemsize >= 4:
        return value
    return np.asarray(value).astype(dtype)[()]


def assign(target: np.ndarray, where: Any, value: Any) -> None:
    """`target[where] = value`, converted as :func:`convert` does it."""
    target[where] = convert(value, target.dtype) if target.dtype in FLOAT8 else value
