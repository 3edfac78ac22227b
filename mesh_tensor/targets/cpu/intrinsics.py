"""How calls in TIR are spelled in C: the functions of `csrc/mesh_tensor_cpu.h`, one per operator and dtype."""

from __future__ import annotations

_SAME_NAME = (
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "ceil",
    "copysign",
    "cos",
    "cosh",
    "erf",
    "exp",
    "exp10",
    "exp2",
    "fabs",
    "floor",
    "fma",
    "fmod",
    "hypot",
    "isfinite",
    "isinf",
    "isnan",
    "log",
    "log10",
    "log1p",
    "log2",
    "nearbyint",
    "nextafter",
    "pow",
    "rsqrt",
    "sigmoid",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
)
_TIR = {f"tirx.{name}": name for name in _SAME_NAME} | {"tirx.round": "nearbyint"}
_TL = {
    "tl.__cos": "cos",
    "tl.__exp": "exp",
    "tl.__exp10": "exp10",
    "tl.__log": "log",
    "tl.__log10": "log10",
    "tl.__log2": "log2",
    "tl.__sin": "sin",
    "tl.__tan": "tan",
    "tl.fast_rcp": "rcp",
    "tl.fma": "fma",
    "tl.ieee_fmaf": "fma",
    "tl.ieee_frcp": "rcp",
    "tl.ieee_frsqrt": "rsqrt",
    "tl.ieee_fsqrt": "sqrt",
    "tl.max_nan": "max",
    "tl.min_nan": "min",
    "tl.round_ties_away_from_zero": "round",
}
FLOAT_FUNCTIONS = _TIR | _TL
"""Operators on floats, by the name of the C function without `mt_` and its dtype."""

EXACT = frozenset(
    (
        "ceil",
        "copysign",
        "fabs",
        "floor",
        "fmod",
        "isfinite",
        "isinf",
        "isnan",
        "max",
        "min",
        "nearbyint",
        "round",
        "trunc",
    )
)
"""Functions whose result, for 16-bit arguments, needs no rounding."""

VECTORISED = frozenset(
    ("ceil", "copysign", "erf", "exp", "exp2", "fabs", "floor", "fma", "max", "min", "nearbyint", "rcp", "rsqrt")
    + ("sigmoid", "sqrt", "tanh", "trunc")
)
"""Functions that leave a loop over float32 one that compilers vectorise."""

LIBM = frozenset({"expf", "exp", "logf", "log", "sqrtf", "sqrt", "tanhf", "tanh", "erff", "erf", "powf", "pow"})
"""What a kernel may call with T.call_extern."""

PREFETCH = "mt_prefetch_"
"""How the functions are called that ask for memory before it is needed; a dtype follows."""

BITWISE = frozenset(
    f"tirx.{name}" for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "shift_left", "shift_right")
)


def float_function(op: str, dtype: str) -> str | None:
    """The C function for the operator `op` on arguments of `dtype`, or None if there is none."""
    name = FLOAT_FUNCTIONS.get(op)
    return f"mt_{name}_{dtype}" if name is not None and dtype in ("float32", "float64") else None
