"""What the interpreter computes the functions with that TIR calls, and numpy's arithmetic as TIR's: what combines,
converts, and poisons."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from mesh_tensor.base.dtypes import extreme, numpy_dtype, poison_value
from mesh_tensor.base.reductions import REDUCTIONS
from mesh_tensor.tir.effects import INTRINSICS

Function = Callable[..., Any]


def erf(x: Any) -> Any:
    """The error function, which numpy lacks."""
    dtype = x.dtype
    return torch.erf(torch.from_numpy(np.asarray(x, np.float64))).numpy().astype(dtype)[()]


def trunc_div(a: Any, b: Any) -> Any:
    """Integer division that rounds towards zero, as C's does."""
    floor = a // b
    return floor + ((floor < 0) & (floor * b != a))


def trunc_mod(a: Any, b: Any) -> Any:
    """The remainder that goes with :func:`trunc_div`: it has the sign of `a`."""
    return a - b * trunc_div(a, b)


def _round(x: Any) -> Any:
    """Round half away from zero, as C's `round` does."""
    return np.trunc(x + np.copysign(np.asarray(0.5, x.dtype), x))


def _fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once where a wider float holds the product."""
    return a * b + c if a.dtype != np.float32 else (np.asarray(a, np.float64) * b + c).astype(np.float32)[()]


def _power_of_int(base: Any, exponent: Any) -> Any:
    power = base ** abs(int(exponent))
    return power if exponent >= 0 else (1 / power if is_float(base.dtype) else trunc_div(base.dtype.type(1), power))


def _leading_zeros(x: Any) -> Any:
    bits, pattern = x.dtype.itemsize * 8, x.view(f"u{x.dtype.itemsize}")
    zeros = sum(pattern < pattern.dtype.type(1 << n) for n in range(bits))
    return np.asarray(zeros, np.int32)[()]


def _popcount(x: Any) -> Any:
    return np.bitwise_count(x.view(f"u{x.dtype.itemsize}")).astype(x.dtype)[()]


#: What neither numpy nor `operator` has.
_OWN: dict[str, Function] = {
    "clamp": lambda x, low, high: np.minimum(np.maximum(x, low), high),
    "erf": erf,
    "exp10": lambda x: np.power(np.asarray(10, x.dtype), x),
    "fma": _fma,
    "leading_zeros": _leading_zeros,
    "popcount": _popcount,
    "power_of_int": _power_of_int,
    "round_away": _round,
    "rsqrt": lambda x: np.reciprocal(np.sqrt(x)),
    "same": lambda x: x,
    "sigmoid": lambda x: np.reciprocal(np.exp(-x) + np.asarray(1, x.dtype)),
}


def _function(name: str) -> Function:
    return _OWN.get(name) or getattr(operator, name, None) or getattr(np, name)


FUNCTIONS = {op: _function(intrinsic.python) for op, intrinsic in INTRINSICS.items() if intrinsic.python is not None}


def rounded_once(function: Function, dtype: np.dtype) -> Function:
    """`function` of 16-bit and shorter floats, computed in float32 and rounded to `dtype` at the end."""
    if not is_float(dtype) or dtype.itemsize >= 4:
        return function

    def run(*args: Any) -> Any:
        result = function(*[np.asarray(a).astype(np.float32) for a in args])
        return convert(result, dtype) if result.dtype == np.float32 else result

    return run


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
        half = 1 << (8 * dtype.itemsize - 1)
        return value if -half <= value < half else (value + half) % (2 * half) - half
    return np.asarray(value).astype(dtype)[()]


def assign(target: np.ndarray, where: Any, value: Any) -> None:
    """`target[where] = value`, converted as :func:`convert` does it."""
    target[where] = convert(value, target.dtype) if target.dtype in FLOAT8 else value
