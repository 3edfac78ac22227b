"""What the interpreter computes the functions with that TIR calls."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mesh_tensor.tir.intrinsics import INTRINSICS

from .numerics import convert, is_float

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
    if a.dtype != np.float32:
        return a * b + c
    return (np.asarray(a, np.float64) * b + c).astype(np.float32)[()]


def _power_of_int(base: Any, exponent: Any) -> Any:
    power = base ** abs(int(exponent))
    return power if exponent >= 0 else (1 / power if is_float(base.dtype) else trunc_div(base.dtype.type(1), power))


def _leading_zeros(x: Any) -> Any:
    bits = x.dtype.itemsize * 8
    zeros = sum((x.astype(np.int64) & ((1 << bits) - 1)) < (1 << n) for n in range(bits))
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
