"""Functions of elements that TIR calls: one record each, of all that any part of the compiler has to know about one.

The value at an element needs nothing but the arguments at that element. What is not listed, such as everything that
asks which thread, warp or lane it is, is more than that.
"""

from __future__ import annotations

from dataclasses import dataclass

from .tile_position import CALLED


@dataclass(frozen=True)
class Intrinsic:
    """A function of elements.

    python   what computes it in the interpreter: a function of numpy, of `operator`, or of its own; None without one
    c        the function of `csrc/mesh_tensor_cpu.h`, without `mt_` and the dtype; None where it is spelled otherwise
    rounds   its last argument is a mode of rounding"""

    python: str | None = None
    c: str | None = None
    rounds: bool = False


def _tirx(names: str, intrinsic: Intrinsic | None = None) -> dict[str, Intrinsic]:
    return {f"tirx.{name}": intrinsic or Intrinsic(name, name) for name in names.split()}


def _tl(names: str, intrinsic: Intrinsic) -> dict[str, Intrinsic]:
    return {f"tl.{name}": intrinsic for name in names.split()}


_INVERSE = ("cos", "cosh", "sin", "sinh", "tan", "tan2", "tanh")
_FAST = ("cos", "exp", "exp10", "log", "log10", "log2", "sin", "tan")

INTRINSICS: dict[str, Intrinsic] = {
    **_tirx("ceil copysign cos cosh erf exp exp10 exp2 floor fma fmod hypot isfinite isinf isnan log log10 log1p"),
    **_tirx("log2 nextafter rsqrt sigmoid sin sinh sqrt tan tanh trunc"),
    **{f"tirx.a{name}": Intrinsic(f"arc{name}", f"a{name}") for name in _INVERSE},
    **{f"tl.__{name}": Intrinsic(name, name) for name in _FAST},
    **_tirx("fabs", Intrinsic("abs", "fabs")),
    **_tirx("nearbyint round", Intrinsic("rint", "nearbyint")),
    **_tirx("pow", Intrinsic("power", "pow")),
    **_tirx("ldexp", Intrinsic("ldexp")),
    **_tirx("bitwise_and", Intrinsic("and_")),
    **_tirx("bitwise_or", Intrinsic("or_")),
    **_tirx("bitwise_xor", Intrinsic("xor")),
    **_tirx("bitwise_not", Intrinsic("invert")),
    **_tirx("shift_left", Intrinsic("lshift")),
    **_tirx("shift_right", Intrinsic("rshift")),
    **_tirx("popcount", Intrinsic("popcount")),
    **_tirx("clz", Intrinsic("leading_zeros")),
    **_tirx("likely tvm_thread_invariant", Intrinsic("same")),
    **_tl("__ldg", Intrinsic("same")),
    **_tl("clamp", Intrinsic("clamp")),
    **_tl("pow_of_int", Intrinsic("power_of_int")),
    **_tl("round_ties_away_from_zero", Intrinsic("round_away", "round")),
    **_tl("max_nan", Intrinsic("maximum", "max")),
    **_tl("min_nan", Intrinsic("minimum", "min")),
    **_tl("fma", Intrinsic("fma", "fma")),
    **_tl("fast_rcp", Intrinsic("reciprocal", "rcp")),
    **_tl("ieee_frsqrt", Intrinsic("rsqrt", "rsqrt")),
    **_tl("ieee_fmaf", Intrinsic("fma", "fma", rounds=True)),
    **_tl("ieee_frcp", Intrinsic("reciprocal", "rcp", rounds=True)),
    **_tl("ieee_fsqrt", Intrinsic("sqrt", "sqrt", rounds=True)),
    **_tl("ieee_add", Intrinsic("add", rounds=True)),
    **_tl("ieee_sub", Intrinsic("sub", rounds=True)),
    **_tl("ieee_mul", Intrinsic("mul", rounds=True)),
    **_tl("ieee_fdiv", Intrinsic("truediv", rounds=True)),
    # What nothing but a GPU computes, or each target in its own way
    **_tirx("if_then_else reinterpret large_uint_imm dp4a vectorcombine vectorhigh vectorlow", Intrinsic()),
    **_tirx("q_multiply_shift q_multiply_shift_per_axis", Intrinsic()),
    **_tl("infinity __ffs __fns fmul pack_b16 pack_b8x4 abs2 add2 fma2 max2 max2_nan min2 min2_nan", Intrinsic()),
    **_tl("mul2 sub2", Intrinsic()),
    **dict.fromkeys(CALLED, Intrinsic()),
}
