"""Expressions as TileLang's C code generator prints them right: see `cpu_legalize`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NoReturn

import numpy as np
from tvm import ir, tirx

from mesh_tensor.base.dtypes import extreme, numpy_dtype
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.tir.effects import INTRINSICS, op_name

from .exprs import (
    BINARY,
    BITWISE,
    COMPARISON,
    EXACT,
    FLOAT_FUNCTIONS,
    FOLD,
    GEMM,
    LIBM,
    NOTES,
    PREFETCH,
    REPORT,
    const,
    float_function,
    map_children,
)

_FLOAT8 = ("float8_e4m3", "float8_e4m3fn", "float8_e5m2")
_LOW = ("float16", "bfloat16", *_FLOAT8)
_SMALL_INT = ("int8", "uint8", "int16", "uint16")
_WIDE_INT = ("int32", "uint32", "int64", "uint64")
_STORED_AS = {"float16": "uint16", "bfloat16": "uint16", "bool": "uint8"} | dict.fromkeys(_FLOAT8, "uint8")
_FLOATS = (*_LOW, "float32", "float64")
_SUPPORTED = frozenset((*_FLOATS, "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))))
_NAMES = {
    tirx.Min: "min",
    tirx.Max: "max",
    tirx.FloorDiv: "floordiv",
    tirx.FloorMod: "floormod",
    tirx.Div: "div",
    tirx.Mod: "mod",
}
_KEYWORDS = frozenset(
    ("alignas", "alignof", "asm", "auto", "bool", "catch", "class", "const", "constexpr", "decltype", "delete", "enum")
    + ("explicit", "export", "false", "friend", "goto", "inline", "long", "mutable", "namespace", "new", "noexcept")
    + ("nullptr", "operator", "private", "protected", "public", "short", "signed", "sizeof", "static", "struct")
    + ("switch", "template", "this", "throw", "true", "try", "typedef", "typeid", "typename", "union", "unsigned")
    + ("using", "virtual", "volatile", "wchar_t")
)
_IEEE = {"tl.ieee_add": tirx.Add, "tl.ieee_sub": tirx.Sub, "tl.ieee_mul": tirx.Mul, "tl.ieee_fdiv": tirx.Div}

Flatten = Callable[[tirx.Buffer, list[tirx.PrimExpr]], tuple[tirx.Buffer, tirx.PrimExpr]]


def storage_dtype(dtype: str) -> str:
    """What values of `dtype` are stored as in C."""
    return _STORED_AS.get(dtype, dtype)


def compute_dtype(dtype: str) -> str:
    """What values of `dtype` are computed in."""
    return "float32" if dtype in _LOW else dtype


def c_name(name: str) -> str:
    """`name`, unless C++ means something by it."""
    return f"{name}_" if name in _KEYWORDS else name


class LegalExpr:
    """Rewrites expressions: `legal(expr)` has the value of `expr`, in `compute_dtype(expr.dtype)`."""

    def __init__(self, flatten: Flatten, kernel: str) -> None:
        self._flatten = flatten
        self._kernel = kernel
        self._vars: dict[tirx.Var, tirx.Var] = {}
        self.gemms: set[str] = set()
        self.reports: list[str] = []

    def __call__(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        self._check(expr.dtype)
        if isinstance(expr, tirx.Var):
            return self._vars.get(expr, expr)
        if isinstance(expr, tirx.FloatImm):
            return _float(expr.value, expr.dtype)
        if isinstance(expr, tirx.BufferLoad):
            return self._load(expr)
        if isinstance(expr, tirx.Cast):
            return self._cast(expr.value, expr.dtype)
        if isinstance(expr, BINARY):
            return self._binary(expr)
        if isinstance(expr, tirx.Call):
            return self._call(expr)
        if isinstance(expr, COMPARISON) and expr.a.dtype == "bool":
            return type(expr)(tirx.Cast("int32", self(expr.a)), tirx.Cast("int32", self(expr.b)))
        return map_children(expr, self)

    def bind(self, var: tirx.Var, value: tirx.PrimExpr) -> tuple[tirx.Var, tirx.PrimExpr]:
        """The variable and value of a let."""
        legal = self(value)
        return self.fresh(var), legal

    def fresh(self, var: tirx.Var) -> tirx.Var:
        """A new variable to stand for `var` from now on: in C, every declaration has its own."""
        self._vars[var] = tirx.Var(c_name(var.name), compute_dtype(var.dtype))
        return self._vars[var]

    def stored(self, value: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
        """`value` as a buffer of `dtype` stores it."""
        if dtype in _LOW:
            return _extern(_STORED_AS[dtype], f"mt_store_{dtype}", _unrounded(self(value), dtype))
        return tirx.Cast("uint8", self(value)) if dtype == "bool" else self(value)

    def _check(self, dtype: str) -> None:
        if dtype not in _SUPPORTED and dtype not in ("handle", "void", ""):
            self._refuse(f"dtype {dtype} can't run on a CPU", f"use one of {', '.join(sorted(_SUPPORTED))}")

    def _refuse(self, what: str, fix: str) -> NoReturn:
        refuse(what, where=f"kernel '{self._kernel}', target 'c'", fix=fix)

    def _load(self, load: tirx.BufferLoad) -> tirx.PrimExpr:
        flat, index = self._flatten(load.buffer, list(load.indices))
        return self._from_storage(tirx.BufferLoad(flat, [index]), load.dtype)

    def _from_storage(self, value: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
        if dtype in _LOW:
            return _extern("float32", f"mt_load_{dtype}", value)
        return tirx.NE(value, const(0, "uint8")) if dtype == "bool" else value

    def _cast(self, value: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
        legal, source = self(value), value.dtype
        if dtype == source:
            return legal
        if dtype in _LOW:
            if source == "float64" and dtype not in _FLOAT8:  # torch goes through float32 there
                legal = _extern("float32", "mt_narrow_float64", legal)
            return _rounded(legal if legal.dtype == "float32" else _to_float(legal, "float32"), dtype)
        if source in _FLOATS and dtype in (*_SMALL_INT, "uint32"):
            legal = tirx.Cast("int64" if dtype == "uint32" else "int32", legal)
        if legal.dtype == dtype:
            return legal
        return _to_float(legal, dtype) if dtype in _FLOATS else tirx.Cast(dtype, legal)

    def _binary(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        kind, dtype = type(expr), expr.dtype
        a, b = self(expr.a), self(expr.b)
        if dtype in _SMALL_INT:
            return tirx.Cast(dtype, self._int(kind, tirx.Cast("int32", a), tirx.Cast("int32", b)))
        if "int" in dtype:
            return self._int(kind, a, b)
        if dtype == "bool":
            return self._bool(kind, a, b)
        if kind in (tirx.Min, tirx.Max):
            return _extern(a.dtype, f"mt_{_NAMES[kind]}_{a.dtype}", a, b)
        if kind is tirx.Mod:
            return _extern(a.dtype, f"mt_fmod_{a.dtype}", a, b)
        if kind is tirx.FloorMod:
            self._refuse("the remainder of a floor division of floats can't run on a CPU", "use T.fmod")
        result = _extern(a.dtype, f"mt_floordiv_{a.dtype}", a, b) if kind is tirx.FloorDiv else kind(a, b)
        return _rounded(result, dtype)

    def _bool(self, kind: type, a: tirx.PrimExpr, b: tirx.PrimExpr) -> tirx.PrimExpr:
        table = {tirx.Max: tirx.Or, tirx.Add: tirx.Or, tirx.Min: tirx.And, tirx.Mul: tirx.And}
        if kind not in table:
            self._refuse(f"{kind.__name__} of bools can't run on a CPU", "cast them to int32 first")
        return table[kind](a, b)

    def _int(self, kind: type, a: tirx.PrimExpr, b: tirx.PrimExpr) -> tirx.PrimExpr:
        if kind not in _NAMES:
            return kind(a, b)
        return _extern(a.dtype, f"mt_{_NAMES[kind]}_{a.dtype}", a, b)

    def _call(self, call: tirx.Call) -> tirx.PrimExpr:
        name = op_name(call)
        modes = [arg.value for arg in call.args if isinstance(arg, tirx.StringImm)]
        if name in INTRINSICS and INTRINSICS[name].rounds and modes != ["rn"]:
            self._refuse(f"T.{name[3:]} with the rounding mode {listing(modes)} can't run on a CPU", 'use "rn"')
        if name in ("tirx.call_extern", "tirx.call_pure_extern"):
            return self._extern_call(call)
        if name == "tirx.address_of":
            flat, index = self._flatten(call.args[0].buffer, list(call.args[0].indices))
            return tirx.address_of(tirx.BufferLoad(flat, [index]))
        if name in BITWISE:
            return self._bitwise(call)
        if name == "tl.infinity":
            return _float(float("inf"), call.dtype)
        if name in ("tirx.likely", "tl.__ldg", "tirx.tvm_thread_invariant"):
            return self(call.args[0])
        if name in ("tirx.break_loop", "tirx.continue_loop", "tirx.large_uint_imm"):
            return call
        if name == "tl.pow_of_int":
            return self._power(call)
        if name == "tirx.reinterpret":
            return self._reinterpret(call)
        if name in ("tirx.popcount", "tirx.clz"):
            return self._count(call, name.removeprefix("tirx."))
        if name == "tirx.ldexp":
            value, exponent = self(call.args[0]), tirx.Cast("int32", self(call.args[1]))
            return _rounded(_extern(value.dtype, f"mt_ldexp_{value.dtype}", value, exponent), call.dtype)
        if name == "tl.clamp":
            value, low, high = call.args
            return self(tirx.Min(tirx.Max(value, low), high))
        if name in _IEEE:
            return self._binary(_IEEE[name](call.args[0], call.args[1]))
        return self._math(call, name)

    def _math(self, call: tirx.Call, name: str) -> tirx.PrimExpr:
        dtype = call.args[0].dtype if call.args else ""
        function = float_function(name, compute_dtype(dtype))
        if function is None:
            spelled = "T." + name.rpartition(".")[2]
            self._refuse(f"{spelled} on {dtype or call.dtype} can't run on a CPU", "write it with other operations")
        args = [self(arg) for arg in call.args if arg.dtype == dtype]
        result = _extern("bool" if call.dtype == "bool" else compute_dtype(dtype), function, *args)
        return result if FLOAT_FUNCTIONS[name] in EXACT else _rounded(result, dtype)

    def _power(self, call: tirx.Call) -> tirx.PrimExpr:
        base, dtype = self(call.args[0]), call.dtype
        base = tirx.Cast("int32", base) if dtype in _SMALL_INT else base
        power = _extern(base.dtype, f"mt_power_{base.dtype}", base, const(int(call.args[1]), "int32"))
        return tirx.Cast(dtype, power) if dtype in _SMALL_INT else _rounded(power, dtype)

    def _reinterpret(self, call: tirx.Call) -> tirx.PrimExpr:
        value, dtype = call.args[0], call.dtype
        bits, source = self.stored(value, value.dtype), storage_dtype(value.dtype)
        if source != storage_dtype(dtype):
            bits = _extern(storage_dtype(dtype), f"mt_bits_{source}_{storage_dtype(dtype)}", bits)
        return self._from_storage(bits, dtype)

    def _count(self, call: tirx.Call, function: str) -> tirx.PrimExpr:
        """A number of bits: of the same width, without sign."""
        dtype = call.args[0].dtype
        width = int("".join(c for c in dtype if c.isdigit()) or 0)
        if "int" not in dtype:
            self._refuse(f"T.{function} on {dtype} can't run on a CPU", "take it of an integer")
        bits = tirx.Cast("uint64", tirx.Cast(f"uint{width}", self(call.args[0])))
        return tirx.Cast(call.dtype, _extern("int32", f"mt_{function}", bits, const(width, "int32")))

    def _bitwise(self, call: tirx.Call) -> tirx.PrimExpr:
        args = [self(arg) for arg in call.args]
        if call.dtype in _SMALL_INT or call.dtype == "bool":
            wide = [tirx.Cast("int32", arg) for arg in args]
            if call.dtype == "bool" and op_name(call) == "tirx.bitwise_not":
                return tirx.Not(args[0])
            return tirx.Cast(call.dtype, tirx.Call("int32", call.op, wide))
        return tirx.Call(call.dtype, call.op, args)

    def _extern_call(self, call: tirx.Call) -> tirx.PrimExpr:
        function = call.args[0].value
        if function.startswith(GEMM):
            self.gemms.add(function)
        elif function == REPORT:
            self.reports.append(call.args[1].value)
            return tirx.Call(call.dtype, call.op, [call.args[0], const(len(self.reports) - 1, "int32")])
        elif not function.startswith((FOLD, PREFETCH)) and function not in (*LIBM, *NOTES.values()):
            self._refuse(
                f"the function '{function}' that T.call_extern names is unknown on a CPU",
                f"write it with T's own operations, or use one of {', '.join(sorted(LIBM))}",
            )
        return tirx.Call(call.dtype, call.op, [call.args[0], *(self(arg) for arg in list(call.args)[1:])])


def _extern(dtype: str, function: str, *args: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.call_pure_extern(dtype, function, *args)


def _rounded(value: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
    return _extern("float32", f"mt_round_{dtype}", value) if dtype in _LOW else value


def _unrounded(value: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
    """What `value` rounds, if it does nothing but round to `dtype`: storing rounds by itself."""
    if op_name(value) == "tirx.call_pure_extern" and value.args[0].value == f"mt_round_{dtype}":
        return value.args[1]
    return value


def _float(value: float, dtype: str) -> tirx.PrimExpr:
    """A constant as its bit pattern, unless few digits say it exactly."""
    if dtype in _LOW:
        value, dtype = _round_to(value, dtype), "float32"
    if value in (0.5, 1.0, 2.0) or (value == 0.0 and str(value)[0] != "-"):
        return tirx.FloatImm(dtype, value)
    kind, bits = ("f", "i") if dtype == "float32" else ("d", "q")
    pattern = struct.unpack("<" + bits, struct.pack("<" + kind, _in_range(value, dtype)))[0]
    return _extern(dtype, f"mt_const_{dtype}", const(pattern, "int32" if bits == "i" else "int64"))


def _in_range(value: float, dtype: str) -> float:
    limit = 3.4028235677973366e38
    if dtype == "float32" and abs(value) >= limit:
        return float("inf") if value > 0 else float("-inf")
    return value


def _round_to(value: float, dtype: str) -> float:
    if dtype.startswith("float8_e4m3") and value == value:
        value = min(max(value, extreme(dtype, -1)), extreme(dtype, 1))
    if value != value or value in (float("inf"), float("-inf")):
        return value
    if dtype in _FLOAT8:
        return float(np.float32(_in_range(value, "float32")).astype(numpy_dtype(dtype)))
    if dtype == "float16":
        try:
            return float(struct.unpack("<e", struct.pack("<e", value))[0])
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")
    bits = struct.unpack("<I", struct.pack("<f", _in_range(value, "float32")))[0]
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
    return float(struct.unpack("<f", struct.pack("<I", rounded))[0])


def pointer_type(dtype: str) -> ir.PointerType:
    """The type of a pointer to values of `dtype`."""
    return ir.PointerType(ir.PrimType(storage_dtype(dtype)))


def _to_float(value: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
    """A number as one of these floats: of a whole one that was a float, g++ makes that float without its fraction."""
    if value.dtype in _WIDE_INT and not isinstance(value, tirx.IntImm):
        return _extern(dtype, f"mt_{dtype}_of_{value.dtype}", value)
    return tirx.Cast(dtype, value)
