"""numpy's meaning of the functions that TIR calls: one table, name to function."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

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


FUNCTIONS: dict[str, Function] = {
    "tirx.abs": np.abs,
    "tirx.fabs": np.abs,
    "tirx.exp": np.exp,
    "tirx.exp2": np.exp2,
    "tirx.exp10": lambda x: np.power(np.asarray(10, x.dtype), x),
    "tirx.log": np.log,
    "tirx.log2": np.log2,
    "tirx.log10": np.log10,
    "tirx.log1p": np.log1p,
    "tirx.sqrt": np.sqrt,
    "tirx.rsqrt": lambda x: np.reciprocal(np.sqrt(x)),
    "tirx.tanh": np.tanh,
    "tirx.sigmoid": lambda x: np.reciprocal(np.exp(-x) + np.asarray(1, x.dtype)),
    "tirx.erf": erf,
    "tirx.pow": np.power,
    "tirx.fmod": np.fmod,
    "tirx.hypot": np.hypot,
    "tirx.copysign": np.copysign,
    "tirx.ldexp": np.ldexp,
    "tirx.nextafter": np.nextafter,
    "tirx.fma": _fma,
    "tirx.sin": np.sin,
    "tirx.cos": np.cos,
    "tirx.tan": np.tan,
    "tirx.sinh": np.sinh,
    "tirx.cosh": np.cosh,
    "tirx.asin": np.arcsin,
    "tirx.acos": np.arccos,
    "tirx.atan": np.arctan,
    "tirx.asinh": np.arcsinh,
    "tirx.acosh": np.arccosh,
    "tirx.atanh": np.arctanh,
    "tirx.atan2": np.arctan2,
    "tirx.floor": np.floor,
    "tirx.ceil": np.ceil,
    "tirx.trunc": np.trunc,
    "tirx.round": np.rint,
    "tirx.nearbyint": np.rint,
    "tirx.isnan": np.isnan,
    "tirx.isinf": np.isinf,
    "tirx.isfinite": np.isfinite,
    "tirx.likely": lambda x: x,
    "tirx.bitwise_and": operator.and_,
    "tirx.bitwise_or": operator.or_,
    "tirx.bitwise_xor": operator.xor,
    "tirx.bitwise_not": operator.invert,
    "tirx.shift_left": operator.lshift,
    "tirx.shift_right": operator.rshift,
    "tirx.popcount": lambda x: np.bitwise_count(x.view(f"u{x.dtype.itemsize}")).astype(x.dtype)[()],
    "tirx.clz": _leading_zeros,
    "tirx.tvm_thread_invariant": lambda x: x,
    "tl.__exp": np.exp,
    "tl.__exp10": lambda x: np.power(np.asarray(10, x.dtype), x),
    "tl.__log": np.log,
    "tl.__log2": np.log2,
    "tl.__log10": np.log10,
    "tl.__sin": np.sin,
    "tl.__cos": np.cos,
    "tl.__tan": np.tan,
    "tl.__ldg": lambda x: x,
    "tl.fast_rcp": np.reciprocal,
    "tl.fma": _fma,
    "tl.ieee_frsqrt": lambda x: np.reciprocal(np.sqrt(x)),
    "tl.max_nan": np.maximum,
    "tl.min_nan": np.minimum,
    "tl.pow_of_int": _power_of_int,
    "tl.round_ties_away_from_zero": _round,
    "tl.clamp": lambda x, low, high: np.minimum(np.maximum(x, low), high),
}

#: The same with a mode of rounding as their last argument, of which "rn" is understood.
ROUNDED_TO_NEAREST: dict[str, Function] = {
    "tl.ieee_add": operator.add,
    "tl.ieee_sub": operator.sub,
    "tl.ieee_mul": operator.mul,
    "tl.ieee_fdiv": operator.truediv,
    "tl.ieee_fmaf": _fma,
    "tl.ieee_frcp": np.reciprocal,
    "tl.ieee_fsqrt": np.sqrt,
}


def rounded_once(function: Function, dtype: np.dtype) -> Function:
    """`function` of 16-bit and shorter floats, computed in float32 and rounded to `dtype` at the end."""
    if not is_float(dtype) or dtype.itemsize >= 4:
        return function

    def run(*args: Any) -> Any:
        result = function(*[np.asarray(a).astype(np.float32) for a in args])
        return convert(result, dtype) if result.dtype == np.float32 else result

    return run
