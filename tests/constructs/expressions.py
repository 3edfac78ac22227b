"""Expressions: arithmetic, comparisons, functions of floats, bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import erf as scalar_erf
from typing import Any

import numpy as np
import tilelang.language as T

from .row import ROWS, Example, Row

_ROWS_OF_RESULTS = {"X": ROWS["X"], "Y": {"x": 1}}
_F32 = np.float32


def _elementwise(name: str, functions: Mapping[str, tuple[Callable, Callable]], inputs: np.ndarray) -> Example:
    """Y[n] is the n-th function of X, beside numpy's."""
    ours = [function for function, _ in functions.values()]
    rows, columns = inputs.shape
    dtype = str(inputs.dtype)

    def kernel() -> Any:
        @T.prim_func
        def elements(X: T.Tensor((rows, columns), dtype), Y: T.Tensor((len(ours), rows, columns), dtype)):
            with T.Kernel(T.ceildiv(rows, 4), threads=32) as bx:
                for i, j in T.Parallel(4, columns):
                    for n, function in enumerate(ours):
                        Y[n, bx * 4 + i, j] = T.cast(function(X[bx * 4 + i, j]), dtype)

        return elements

    def reference(x: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.stack([np.asarray(theirs(x)).astype(x.dtype) for _, theirs in functions.values()])

    return Example(name, kernel, (inputs,), reference, _ROWS_OF_RESULTS)


def _like(names: str, **others: Callable) -> dict[str, tuple[Callable, Callable]]:
    """Functions that numpy has under the same name, and some that it has under others."""
    found = {name: (getattr(T, name), getattr(np, name)) for name in names.split()}
    return found | {name: (getattr(T, name), function) for name, function in others.items()}


def _fractions(rows: int = 12, columns: int = 4) -> np.ndarray:
    return np.random.default_rng(1).uniform(0.1, 0.9, (rows, columns)).astype(_F32)


_OF_FRACTIONS = _like(
    "exp exp2 log log2 log10 log1p sqrt sin cos tan sinh cosh tanh floor ceil trunc isnan isinf isfinite",
    acos=np.arccos,
    asin=np.arcsin,
    atan=np.arctan,
    asinh=np.arcsinh,
    atanh=np.arctanh,
    acosh=np.arccosh,
    exp10=lambda x: _F32(10) ** x,
    rsqrt=lambda x: 1 / np.sqrt(x),
    sigmoid=lambda x: 1 / (1 + np.exp(-x)),
    erf=np.vectorize(scalar_erf),
)
_ROUNDING = _like("fabs abs floor ceil trunc", nearbyint=np.rint, round=np.rint)
_ROUNDING["away"] = (
    lambda x: T.round(x, "ties-away-from-zero"),
    lambda x: np.trunc(x + np.copysign(_F32(0.5), x)),
)
_BINARY: dict[str, tuple[Callable, Callable]] = {
    "pow": (lambda x: T.pow(x, T.float32(2.5)), lambda x: x ** _F32(2.5)),
    "atan2": (lambda x: T.atan2(x, T.float32(2)), lambda x: np.arctan2(x, _F32(2))),
    "fmod": (lambda x: T.fmod(x, T.float32(0.3)), lambda x: np.fmod(x, _F32(0.3))),
    "hypot": (lambda x: T.hypot(x, T.float32(2)), lambda x: np.hypot(x, _F32(2))),
    "copysign": (lambda x: T.copysign(x, T.float32(-1)), lambda x: np.copysign(x, _F32(-1))),
    "nextafter": (lambda x: T.nextafter(x, T.float32(2)), lambda x: np.nextafter(x, _F32(2))),
    "ldexp": (lambda x: T.ldexp(x, T.int32(3)), lambda x: x * _F32(8)),
    "max": (lambda x: T.max(x, T.float32(0.5)), lambda x: np.maximum(x, _F32(0.5))),
    "min": (lambda x: T.min(x, T.float32(0.5)), lambda x: np.minimum(x, _F32(0.5))),
    "clamp": (lambda x: T.clamp(x, T.float32(0.3), T.float32(0.6)), lambda x: np.clip(x, _F32(0.3), _F32(0.6))),
    "fma": (lambda x: T.fma(x, x, T.float32(1)), lambda x: x * x + 1),
    "ieee_add": (lambda x: T.ieee_add(x, x, "rn"), lambda x: x + x),
    "ieee_sub": (lambda x: T.ieee_sub(x, T.float32(1), "rn"), lambda x: x - 1),
    "ieee_mul": (lambda x: T.ieee_mul(x, x, "rn"), lambda x: x * x),
    "ieee_fdiv": (lambda x: T.ieee_fdiv(x, T.float32(3), "rn"), lambda x: x / _F32(3)),
    "ieee_fmaf": (lambda x: T.ieee_fmaf(x, x, T.float32(1), "rn"), lambda x: x * x + 1),
    "ieee_frcp": (lambda x: T.ieee_frcp(x, "rn"), lambda x: 1 / x),
    "ieee_fsqrt": (lambda x: T.ieee_fsqrt(x, "rn"), np.sqrt),
    "ieee_frsqrt": (T.ieee_frsqrt, lambda x: 1 / np.sqrt(x)),
    "fast_rcp": (T.fast_rcp, lambda x: 1 / x),
}
_ARITHMETIC: dict[str, tuple[Callable, Callable]] = {
    "Add": (lambda x: x + 3, lambda x: x + 3),
    "Sub": (lambda x: 3 - x, lambda x: 3 - x),
    "Mul": (lambda x: x * x, lambda x: x * x),
    "FloorDiv": (lambda x: x // 3, lambda x: x // 3),
    "FloorMod": (lambda x: x % 3, lambda x: x % 3),
    "truncdiv": (lambda x: T.truncdiv(x, 3), lambda x: np.trunc(x / 3)),
    "truncmod": (lambda x: T.truncmod(x, 3), lambda x: np.fmod(x, 3)),
    "ceildiv": (lambda x: T.ceildiv(x, 3), lambda x: -(-x // 3)),
    "Max": (lambda x: T.max(x, 2), lambda x: np.maximum(x, 2)),
    "Min": (lambda x: T.min(x, 2), lambda x: np.minimum(x, 2)),
    "EQ": (lambda x: x == 2, lambda x: x == 2),
    "NE": (lambda x: x != 2, lambda x: x != 2),
    "LT": (lambda x: x < 2, lambda x: x < 2),
    "LE": (lambda x: x <= 2, lambda x: x <= 2),
    "GT": (lambda x: x > 2, lambda x: x > 2),
    "GE": (lambda x: x >= 2, lambda x: x >= 2),
    "And": (lambda x: T.And(x > 2, x < 5), lambda x: (x > 2) & (x < 5)),
    "Or": (lambda x: T.Or(x < 2, x > 5), lambda x: (x < 2) | (x > 5)),
    "Not": (lambda x: T.Not(x > 2), lambda x: x <= 2),
    "Select": (lambda x: T.Select(x > 2, x, -x), lambda x: np.where(x > 2, x, -x)),
    "if_then_else": (lambda x: T.if_then_else(x > 2, x, -x), lambda x: np.where(x > 2, x, -x)),
    "Cast": (lambda x: T.cast(x, "int8"), lambda x: x.astype(np.int8)),
    "bitwise_and": (lambda x: T.bitwise_and(x, 6), lambda x: x & 6),
    "bitwise_or": (lambda x: T.bitwise_or(x, 6), lambda x: x | 6),
    "bitwise_xor": (lambda x: T.bitwise_xor(x, 6), lambda x: x ^ 6),
    "bitwise_not": (T.bitwise_not, np.invert),
    "shift_left": (lambda x: T.shift_left(x, 2), lambda x: x << 2),
    "shift_right": (lambda x: T.shift_right(x, 2), lambda x: x >> 2),
    "likely": (lambda x: T.cast(T.likely(x > 2), "int32"), lambda x: x > 2),
    "max_value": (lambda x: T.max_value("int32"), lambda x: np.full_like(x, 2**31 - 1)),
    "min_value": (lambda x: T.min_value("int32"), lambda x: np.full_like(x, -(2**31))),
    "popcount": (T.popcount, lambda x: np.bitwise_count(x.view(np.uint32))),
    "clz": (T.clz, np.vectorize(lambda x: 32 - int(x).bit_length() if x >= 0 else 0)),
    "reinterpret": (lambda x: T.cast(T.reinterpret(x, "float32") > 0, "int32"), lambda x: x.view(_F32) > 0),
}
_INTEGERS = np.random.default_rng(2).integers(-9, 9, (12, 4)).astype(np.int32)
_TIES = (np.random.default_rng(3).integers(-9, 9, (12, 4)) / 2).astype(_F32)


def _cast(**said: Any) -> Callable[[], Any]:
    def kernel() -> Any:
        @T.prim_func
        def cast(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float16")):
            with T.Kernel(12, threads=32) as bx:
                for j in T.Parallel(4):
                    Y[bx, j] = T.cast(X[bx, j], "float16", **said)

        return cast

    return kernel


ROWS_OF_EXPRESSIONS = (
    Row(
        "functions of floats",
        "understood",
        "computed in float32 or float64; 16-bit and 8-bit floats are rounded after every function",
        names=" ".join(name for name in [*_OF_FRACTIONS, *_ROUNDING] if name not in ("away", "abs"))
        + " infinity __cos __exp __exp10 __log __log2 __log10 __sin __tan",
        ops=" ".join(f"tirx.{name}" for name in [*_OF_FRACTIONS, *_ROUNDING] if name not in ("abs", "away"))
        + " tl.__cos tl.__exp tl.__exp10 tl.__log tl.__log10 tl.__log2 tl.__sin tl.__tan tl.infinity"
        + " tl.round_ties_away_from_zero tl.pow_of_int",
        examples=(
            _elementwise("of fractions", {k: v for k, v in _OF_FRACTIONS.items() if k != "acosh"}, _fractions()),
            _elementwise("acosh", {"acosh": _OF_FRACTIONS["acosh"]}, 1 + _fractions()),
            _elementwise("rounding", _ROUNDING, _TIES),
        ),
    ),
    Row(
        "functions of several floats",
        "understood",
        "`ieee_*` with the rounding mode `rn` only",
        names=" ".join(_BINARY),
        ops=" ".join(f"tirx.{n}" for n in ["pow", "atan2", "fmod", "hypot", "copysign", "nextafter", "ldexp", "fma"])
        + " tl.clamp tl.fma tl.ieee_* tl.fast_rcp tl.max_nan tl.min_nan",
        examples=(_elementwise("of several", _BINARY, _fractions()),),
    ),
    Row(
        "arithmetic, comparisons, choices, bits",
        "understood",
        "integers wrap; `//` and `%` round down, `truncdiv` and `truncmod` towards 0",
        names=" ".join(_ARITHMETIC) + " abs floordiv floormod cdiv align_up cast Div Mod __ldg boolean IntImm FloatImm",
        ops="tirx.if_then_else tirx.bitwise_* tirx.shift_* tirx.likely tirx.popcount tirx.clz tirx.reinterpret"
        " tirx.large_uint_imm tirx.tvm_thread_invariant tl.__ldg",
        nodes="Add Sub Mul Div Mod FloorDiv FloorMod Min Max EQ NE LT LE GT GE And Or Not Select Cast Call IntImm"
        " FloatImm Var SizeVar PrimExpr StringImm BufferLoad",
        examples=(_elementwise("of integers", _ARITHMETIC, _INTEGERS),),
    ),
    Row(
        "casts that say how they round, or not to saturate",
        "refused",
        "a cast to float16 with",
        examples=(
            Example("towards 0", _cast(round="rz"), (_fractions(),)),
            Example("by random bits", _cast(round="rs", rbits=T.uint32(7)), (_fractions(),)),
            Example("to infinity", _cast(sat=False), (_fractions(),)),
        ),
    ),
)
