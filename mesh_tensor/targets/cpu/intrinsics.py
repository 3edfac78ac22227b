"""How calls in TIR are spelled in C: the functions of `csrc/mesh_tensor_cpu.h`, one per operator and dtype."""

from __future__ import annotations

from mesh_tensor.tir.intrinsics import INTRINSICS

FLOAT_FUNCTIONS = {op: intrinsic.c for op, intrinsic in INTRINSICS.items() if intrinsic.c is not None}
"""Operators on floats, by the name of the C function without `mt_` and its dtype."""

EXACT = frozenset(
    ("ceil", "copysign", "fabs", "floor", "fmod", "isfinite", "isinf", "isnan", "max", "min", "nearbyint", "round")
    + ("trunc",)
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
