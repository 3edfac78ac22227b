"""TIR expressions, compiled into closures over a frame. One small function per kind of node and one table."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from tvm import ir, tirx

from mesh_tensor.base.dtypes import numpy_dtype
from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.tir.effects import INTRINSICS
from mesh_tensor.tir.tile_calls import parse_previous
from mesh_tensor.tir.tile_ops import Atomic

from .access import BufferAccess
from .intrinsics import FLOAT8, FUNCTIONS, UFUNCS, convert, is_float, rounded_once, trunc_div, trunc_mod
from .scope import MASK, Code, Frame, FunctionScope, constant


def compile_expr(expr: tirx.PrimExpr, scope: FunctionScope) -> Code:
    """`expr` as a closure; its value has the expression's dtype (int32 and int64 scalars may be Python ints)."""
    build = _BUILDERS.get(type(expr))
    if build is None:
        raise MeshTensorError(f"the interpreter does not know the expression {expr} ({type(expr).__name__})")
    return build(expr, scope)


def under_mask(frame: Frame, lanes: np.ndarray, run: Callable[[Frame], Any]) -> Any:
    """`run` where `lanes` holds too; None if that is nowhere."""
    outer = frame[MASK]
    mask = lanes if outer is None else outer & lanes
    active = np.count_nonzero(mask)
    if not active:
        return None
    frame[MASK] = None if active == mask.size else mask
    value = run(frame)
    frame[MASK] = outer
    return value


def _apply(function: Callable[..., Any], args: Sequence[Code]) -> Code:
    varies = any(a.varies for a in args)
    if all(a.const is not None for a in args):
        return constant(function(*[a.const for a in args]))
    runs = [a.run for a in args]
    if len(runs) == 1:
        (only,) = runs
        return Code(lambda frame: function(only(frame)), varies)
    if len(runs) == 2:
        first, second = runs
        return Code(lambda frame: function(first(frame), second(frame)), varies)
    return Code(lambda frame: function(*[run(frame) for run in runs]), varies)


def _binary(function: Callable[..., Any], on_integers: Callable[..., Any] | None = None) -> Callable[..., Code]:
    def build(expr: Any, scope: FunctionScope) -> Code:
        integers = on_integers is not None and not is_float(numpy_dtype(expr.a.dtype))
        a, b = compile_expr(expr.a, scope), compile_expr(expr.b, scope)
        if numpy_dtype(expr.a.dtype) in FLOAT8:
            return _apply(rounded_once(function, numpy_dtype(expr.a.dtype)), (a, b))
        return _apply(on_integers if integers else function, (a, b))  # type: ignore[arg-type]

    return build


def _extremum(on_arrays: np.ufunc, on_ints: Callable[..., Any], expr: Any, scope: FunctionScope) -> Code:
    a, b = compile_expr(expr.a, scope), compile_expr(expr.b, scope)
    plain = not (a.varies or b.varies) and str(expr.dtype).startswith("int")
    return _apply(on_ints if plain else on_arrays, (a, b))


def _logical(decisive: bool, expr: Any, scope: FunctionScope) -> Code:
    """`and` (decided by False), `or` (by True): the second operand is evaluated where the first decides nothing."""
    a, b = compile_expr(expr.a, scope), compile_expr(expr.b, scope)
    varies = a.varies or b.varies
    decided = np.bool_(decisive)

    def scalar(frame: Frame) -> Any:
        return decided if bool(a.run(frame)) is decisive else b.run(frame)

    def lanes(frame: Frame) -> Any:
        first = a.run(frame)
        second = under_mask(frame, ~first if decisive else first, b.run)
        if second is None:
            return first
        return first | second if decisive else first & second

    return Code(lanes if a.varies else scalar, varies)


def _not(expr: tirx.Not, scope: FunctionScope) -> Code:
    return _apply(np.logical_not, (compile_expr(expr.a, scope),))


def _select(condition: tirx.PrimExpr, yes: tirx.PrimExpr, no: tirx.PrimExpr, dtype: str, scope: FunctionScope) -> Code:
    cond, a, b = (compile_expr(e, scope) for e in (condition, yes, no))
    target = numpy_dtype(dtype)

    def scalar(frame: Frame) -> Any:
        return a.run(frame) if cond.run(frame) else b.run(frame)

    def typed(frame: Frame) -> Any:
        return np.asarray(scalar(frame), target)

    def lanes(frame: Frame) -> Any:
        where = cond.run(frame)
        first = under_mask(frame, where, a.run)
        second = under_mask(frame, ~where, b.run)
        value = np.where(where, 0 if first is None else first, 0 if second is None else second)
        return value if value.dtype == target else value.astype(target)

    if cond.varies:
        return Code(lanes, True)
    varies = a.varies or b.varies
    return Code(typed if varies else scalar, varies)


def _cast(expr: tirx.Cast, scope: FunctionScope) -> Code:
    dtype = numpy_dtype(expr.dtype)
    return _apply(lambda value: convert(value, dtype), (compile_expr(expr.value, scope),))


def _int_imm(expr: tirx.IntImm, scope: FunctionScope) -> Code:
    dtype = numpy_dtype(expr.dtype)
    if dtype.kind == "i" and dtype.itemsize >= 4:
        return constant(int(expr.value))
    return constant(bool(expr.value) if dtype.kind == "b" else dtype.type(int(expr.value)))


def _float_imm(expr: tirx.FloatImm, scope: FunctionScope) -> Code:
    return constant(convert(float(expr.value), numpy_dtype(expr.dtype)))


def _load(expr: tirx.BufferLoad, scope: FunctionScope) -> Code:
    return BufferAccess(expr.buffer, expr.indices, scope, compile_expr).load()


def _let(expr: tirx.Let, scope: FunctionScope) -> Code:
    value = compile_expr(expr.value, scope)
    slot = scope.define(expr.var, value.varies)
    body = compile_expr(expr.body, scope)

    def run(frame: Frame) -> Any:
        frame[slot] = value.run(frame)
        return body.run(frame)

    return Code(run, body.varies)


def _ramp(expr: tirx.Ramp, scope: FunctionScope) -> Code:
    steps = np.arange(int(expr.lanes))
    return _apply(
        lambda base, stride: base + stride * steps, (compile_expr(expr.base, scope), compile_expr(expr.stride, scope))
    )._replace(varies=True, const=None)


def _broadcast(expr: tirx.Broadcast, scope: FunctionScope) -> Code:
    return compile_expr(expr.value, scope)


def _call(expr: tirx.Call, scope: FunctionScope) -> Code:
    name = expr.op.name if isinstance(expr.op, ir.Op) else str(expr.op)
    if name == "tirx.if_then_else":
        return _select(expr.args[0], expr.args[1], expr.args[2], expr.dtype, scope)
    if name == "tl.infinity":
        return constant(numpy_dtype(expr.dtype).type(np.inf))
    if name == "tirx.reinterpret":
        dtype, source = numpy_dtype(expr.dtype), numpy_dtype(expr.args[0].dtype)
        return _apply(lambda v: np.asarray(v, source).view(dtype)[()], (compile_expr(expr.args[0], scope),))
    update = parse_previous(expr)
    if update is not None:
        return _previous(update, scope)
    operands = list(expr.args)
    function = FUNCTIONS.get(name)
    if function is not None and INTRINSICS[name].rounds and getattr(operands.pop(), "value", None) != "rn":
        function = None
    if function is None or not operands:
        raise MeshTensorError(f"the interpreter does not know the operation {name}, a value in the kernel: {expr}")
    args = [compile_expr(a, scope) for a in operands]
    if name == "tirx.shift_left":  # Python's integers would keep the bits that leave int32
        dtype = numpy_dtype(expr.dtype)
        return _apply(lambda value, bits: convert(value << bits, dtype), args)
    return _apply(rounded_once(function, numpy_dtype(expr.args[0].dtype)), args)


def _previous(update: Atomic, scope: FunctionScope) -> Code:
    """An atomic's old value; nests with one in it run in order, never over lanes."""
    place = BufferAccess(update.dst.buffer, update.dst.mins, scope, compile_expr)
    old, new = place.load(), compile_expr(update.value, scope)
    combine, dtype, slot = UFUNCS[update.reduction], numpy_dtype(update.dst.buffer.dtype), scope.new_slot()
    store = place.store(Code(lambda frame: combine(frame[slot], convert(new.run(frame), dtype))))

    def run(frame: Frame) -> Any:
        frame[slot] = old.run(frame)
        store(frame)
        return frame[slot]

    return Code(run)


def _true_div(a: Any, b: Any) -> Any:
    return a / b


_BUILDERS: dict[type, Callable[[Any, FunctionScope], Code]] = {
    tirx.Var: lambda expr, scope: scope.variable(expr),
    tirx.SizeVar: lambda expr, scope: scope.variable(expr),
    tirx.IntImm: _int_imm,
    tirx.FloatImm: _float_imm,
    tirx.Add: _binary(operator.add),
    tirx.Sub: _binary(operator.sub),
    tirx.Mul: _binary(operator.mul),
    tirx.Div: _binary(_true_div, trunc_div),
    tirx.Mod: _binary(np.fmod, trunc_mod),
    tirx.FloorDiv: _binary(operator.floordiv),
    tirx.FloorMod: _binary(operator.mod),
    tirx.Min: partial(_extremum, np.minimum, min),
    tirx.Max: partial(_extremum, np.maximum, max),
    tirx.EQ: _binary(operator.eq),
    tirx.NE: _binary(operator.ne),
    tirx.LT: _binary(operator.lt),
    tirx.LE: _binary(operator.le),
    tirx.GT: _binary(operator.gt),
    tirx.GE: _binary(operator.ge),
    tirx.And: partial(_logical, False),
    tirx.Or: partial(_logical, True),
    tirx.Not: _not,
    tirx.Select: lambda e, scope: _select(e.condition, e.true_value, e.false_value, e.dtype, scope),
    tirx.Cast: _cast,
    tirx.BufferLoad: _load,
    tirx.Let: _let,
    tirx.Ramp: _ramp,
    tirx.Broadcast: _broadcast,
    tirx.Call: _call,
}
