"""Small helpers over TIR expressions and statements, shared by the passes for the CPU: what values are combined with,
how calls are spelled in C (`csrc/mesh_tensor_cpu.h`), and how prints and assertions note their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from tvm import arith, ir, tirx

from mesh_tensor.base.dtypes import is_float
from mesh_tensor.base.reductions import reduction
from mesh_tensor.tir.effects import INTRINSICS
from mesh_tensor.tir.nodes import is_const, nodes
from mesh_tensor.tir.prover import Prover
from mesh_tensor.tir.rewrite import cast
from mesh_tensor.tir.user_reports import report_of

BINARY = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max)
COMPARISON = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
LEAVES = (tirx.Var, tirx.IntImm, tirx.FloatImm, tirx.StringImm)

LoopRange = tuple[tirx.Var, tirx.PrimExpr, tirx.PrimExpr]
"""A variable that runs from a begin to before an end."""


def map_children(expr: tirx.PrimExpr, fn: Callable[[tirx.PrimExpr], tirx.PrimExpr]) -> tirx.PrimExpr:
    """`expr` with `fn` applied to each of its operands; nothing is folded or simplified."""
    if isinstance(expr, LEAVES):
        return expr
    if isinstance(expr, BINARY + COMPARISON + (tirx.And, tirx.Or)):
        return type(expr)(fn(expr.a), fn(expr.b))
    if isinstance(expr, tirx.Not):
        return tirx.Not(fn(expr.a))
    if isinstance(expr, tirx.Select):
        return tirx.Select(fn(expr.condition), fn(expr.true_value), fn(expr.false_value))
    if isinstance(expr, tirx.Cast):
        return tirx.Cast(expr.dtype, fn(expr.value))
    if isinstance(expr, tirx.Call):
        return tirx.Call(expr.dtype, expr.op, [fn(arg) for arg in expr.args])
    if isinstance(expr, tirx.BufferLoad):
        return tirx.BufferLoad(expr.buffer, [fn(index) for index in expr.indices])
    raise TypeError(f"{type(expr).__name__} is not an expression that the CPU passes know")


def is_pure_index(expr: tirx.PrimExpr) -> bool:
    """Whether `expr` keeps its value: it reads no memory and calls nothing, and is of one element."""
    return not nodes(expr, tirx.BufferLoad, tirx.Call, tirx.Let, tirx.Ramp, tirx.Broadcast)


def const(value: float, dtype: str) -> tirx.PrimExpr:
    """`value` as an immediate of `dtype`."""
    if dtype == "bool":
        return tirx.IntImm("bool", int(value))
    return tirx.IntImm(dtype, int(value)) if "int" in dtype else tirx.FloatImm(dtype, float(value))


def same(a: tirx.PrimExpr, b: tirx.PrimExpr) -> bool:
    """Whether two expressions are written alike."""
    return bool(tirx.analysis.expr_deep_equal(a, b))


def all_of(conditions: Iterable[tirx.PrimExpr]) -> tirx.PrimExpr | None:
    """The conjunction of `conditions`, or None if there are none."""
    result = None
    for condition in conditions:
        result = condition if result is None else tirx.And(result, condition)
    return result


def if_then(condition: tirx.PrimExpr | None, body: tirx.Stmt) -> tirx.Stmt:
    """`body` under `condition`, or `body` itself if there is no condition."""
    return body if condition is None else tirx.IfThenElse(condition, body, None)


def loop_nest(loops: Sequence[LoopRange], body: tirx.Stmt) -> tirx.Stmt:
    """Serial loops, the first outermost."""
    for var, begin, end in reversed(loops):
        extent = end if is_const(begin, 0) else end - begin
        body = tirx.For(var, begin, extent, tirx.ForKind.SERIAL, body)
    return body


def temporary(name: str, dtype: str, shape: Sequence[int] = (1,)) -> tirx.Buffer:
    """A new buffer of a kernel's own."""
    return tirx.decl_buffer(list(shape), dtype, name, scope="local")


def combine(op: str, total: tirx.PrimExpr, value: tirx.PrimExpr) -> tirx.PrimExpr:
    """`total op value`, as the reductions, scans and atomics of that name do it."""
    record = reduction(op)
    return getattr(tirx, record.tir)(total, _abs(value) if record.magnitudes else value)


def _abs(value: tirx.PrimExpr) -> tirx.PrimExpr:
    zero = const(0, value.dtype)
    if "int" not in value.dtype:
        return tirx.Call(value.dtype, "tirx.fabs", [value])
    return value if value.dtype.startswith("u") else tirx.Select(tirx.GE(value, zero), value, tirx.Sub(zero, value))


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

GEMM = "mt_gemm_"
"""How products are called; the dtypes of both factors and of the result follow."""

FOLD = "mt_fold_"
"""How the functions are called that combine totals; what TIR calls the operation and a dtype follow."""

BITWISE = frozenset(
    f"tirx.{name}" for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "shift_left", "shift_right")
)


def float_function(op: str, dtype: str) -> str | None:
    """The C function for the operator `op` on arguments of `dtype`, or None if there is none."""
    name = FLOAT_FUNCTIONS.get(op)
    return f"mt_{name}_{dtype}" if name is not None and dtype in ("float32", "float64") else None


#: The function that reports (in C it takes the number of the report), and those that note a number.
REPORT = "mt_report"
NOTES = {"int64": "mt_note_int64", "float64": "mt_note_float64"}


def report_statements(call: tirx.Call, rewrite: Callable[[tirx.PrimExpr], tirx.PrimExpr]) -> list[tirx.Stmt]:
    """The statements that report what a print or an assertion says; `rewrite` is applied to its numbers."""
    report, numbers = report_of(call)
    notes = [_note(rewrite(number)) for number in numbers]
    return [*notes, tirx.Evaluate(tirx.call_extern("void", REPORT, report.encode()))]


def _note(number: tirx.PrimExpr) -> tirx.Stmt:
    dtype = "float64" if is_float(number.dtype) else "int64"
    wide = number if number.dtype == dtype else tirx.Cast(dtype, number)
    return tirx.Evaluate(tirx.call_extern("void", NOTES[dtype], wide))


_FAR = arith.ConstIntBound.POS_INF
# The second one finds bounds of variables in each other, such as those of a loop over a symbolic number of blocks.
_STRENGTHS = (arith.ProofStrength.DEFAULT, arith.ProofStrength.SYMBOLIC_BOUND)


class Bounds:
    """Ranges of the variables in scope, and the proofs that rest on them."""

    def __init__(self) -> None:
        self._analyzer = Prover()

    def not_negative(self, var: tirx.Var) -> None:
        """`var` is a size: never negative."""
        self._analyzer.update(var, arith.ConstIntBound(0, _FAR), True)

    def loop(self, var: tirx.Var, begin: tirx.PrimExpr, extent: tirx.PrimExpr) -> None:
        """`var` runs over `begin ... begin + extent - 1`."""
        if is_pure_index(begin) and is_pure_index(extent):
            self._analyzer.bind(var, ir.Range.from_min_extent(begin, self.simplify(extent)), True)

    def let(self, var: tirx.Var, value: tirx.PrimExpr) -> None:
        """`var` is `value`."""
        if is_pure_index(value) and "int" in value.dtype:
            self._analyzer.bind(var, value, True)

    @contextmanager
    def assume(self, condition: tirx.PrimExpr, holds: bool = True) -> Iterator[None]:
        """Within the scope, `condition` holds (or doesn't)."""
        if not is_pure_index(condition):
            yield
            return
        with self._analyzer.constraint_scope(condition if holds else tirx.Not(condition)):
            yield

    def simplify(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        """`expr` in a simpler form."""
        return self._analyzer.simplify(expr)

    def divided(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        """An index or a condition on indices in which something is divided, in a simpler form: what is the same all
        along a block then leaves its loop. Others stay as they are."""
        is_index = is_pure_index(expr) and nodes(expr, tirx.FloorDiv, tirx.FloorMod) and not _has_floats(expr)
        return self.simplify(expr) if is_index else expr

    def proves(self, condition: tirx.PrimExpr) -> bool:
        """Whether `condition` always holds."""
        return any(self._analyzer.can_prove(condition, strength) for strength in _STRENGTHS)

    def open_part(self, condition: tirx.PrimExpr) -> tirx.PrimExpr | None:
        """What of a condition on indices is left once what always holds is known; None if nothing is."""
        if isinstance(condition, tirx.And):
            left, right = self.open_part(condition.a), self.open_part(condition.b)
            return right if left is None else left if right is None else tirx.And(left, right)
        holds = is_pure_index(condition) and not _has_floats(condition) and self.proves(condition)
        return None if holds else condition

    def outside(self, index: tirx.PrimExpr, size: tirx.PrimExpr) -> list[tirx.PrimExpr]:
        """Those of `0 <= index` and `index < size` that can't be proved."""
        zero = tirx.IntImm(index.dtype, 0)
        return [c for c in (tirx.GE(index, zero), tirx.LT(index, cast(size, index.dtype))) if not self.proves(c)]

    def guard(self, buffer: tirx.Buffer, indices: Sequence[tirx.PrimExpr]) -> list[tirx.PrimExpr]:
        """The conditions under which `buffer[indices]` is inside the buffer, without those that always hold."""
        return [c for index, size in zip(indices, buffer.shape, strict=True) for c in self.outside(index, size)]

    def clip(
        self, start: tirx.PrimExpr, extent: tirx.PrimExpr, size: tirx.PrimExpr
    ) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
        """The `i` in `begin <= i < end` are those of `0 ... extent - 1` for which `start + i` is inside `size`."""
        start = self.simplify(start)
        zero, size, extent = tirx.IntImm(start.dtype, 0), cast(size, start.dtype), cast(extent, start.dtype)
        begin = zero if self.proves(start >= 0) else tirx.Max(zero, self.simplify(0 - start))
        inside = self.proves(start + extent <= size)
        end = extent if inside else tirx.Min(extent, self.simplify(size - start))
        return cast(begin, "int32"), cast(end, "int32")


def _has_floats(expr: tirx.PrimExpr) -> bool:
    """Whether a part of an expression is no integer: what simplifies integers need not hold of NaN."""
    return not all(part.dtype.startswith(("int", "uint", "bool")) for part in nodes(expr, tirx.PrimExpr))
