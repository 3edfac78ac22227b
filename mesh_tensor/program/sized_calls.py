"""Calls of operators with other numbers: sizes of their operands and results, and what they are told beside them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any

from tvm import relax, tirx

from mesh_tensor.base.dtypes import TensorType
from mesh_tensor.rules.operator import OpCall
from mesh_tensor.rules.operator.call import Structure


class NotSizedError(Exception):
    """A call has something of which it is not known where its numbers are."""


def numbers_of(call: OpCall) -> tuple[Hashable, tuple[int, ...]]:
    """What of a call is no size, and its sizes. Raises NotSizedError where it has other parts than operators have."""
    numbers: list[int] = []
    expr = call.expr
    args = tuple([_read(arg, numbers) for arg in expr.args[:]])
    infos = tuple([_read_info(info, numbers) for info in (*expr.sinfo_args[:], expr.struct_info)])
    types = tuple([tuple([(t.ndim, t.dtype) for t in tensors]) for tensors in (call.inputs, call.outputs)])
    numbers += [size for tensor in (*call.inputs, *call.outputs) for size in tensor.shape]
    attrs = None if expr.attrs is None else Structure(expr.attrs)
    return (call.name, str(expr.op), attrs, args, infos, types), tuple(numbers)


class SizedCall(OpCall):
    """A call with others in place of its sizes. Its `expr` is made when somebody asks for it.

    plain   of the call, whether it `is_plain`"""

    _call: OpCall
    _sizes: Sequence[int]

    def __init__(self, call: OpCall, sizes: Sequence[int], plain: bool) -> None:
        left = iter(sizes[len(sizes) - sum([tensor.ndim for tensor in (*call.inputs, *call.outputs)]) :])
        inputs, outputs = (
            tuple([TensorType(tuple([next(left) for _ in t.shape]), t.dtype) for t in tensors])
            for tensors in (call.inputs, call.outputs)
        )
        known = {"name": call.name, "inputs": inputs, "outputs": outputs, "operator": call.operator}
        vars(self).update(known, _call=call, _sizes=sizes)
        if plain:
            vars(self).update(operands=call.operands, literals=call.literals)

    @cached_property
    def expr(self) -> relax.Call:  # type: ignore[override]
        return _expr(self._call.expr, iter(self._sizes))

    @property
    def attrs(self) -> Any:
        return self._call.attrs


def is_plain(call: OpCall) -> bool:
    """Whether none of the call's arguments beside tensors has sizes."""
    numbers: list[int] = []
    for arg, literal in zip(call.expr.args[:], call.operands, strict=True):
        if literal is not None:
            _read(arg, numbers)
    return not numbers


def _expr(expr: relax.Call, left: Iterator[int]) -> relax.Call:
    known: dict[relax.Var, relax.Var] = {}
    args = [_made(arg, left, known) for arg in expr.args[:]]
    infos = [_made_info(info, left) for info in expr.sinfo_args[:]]
    made = relax.Call(expr.op, args, expr.attrs, infos)
    relax.expr._update_struct_info(made, _made_info(expr.struct_info, left))
    return made


def _read(arg: relax.Expr, numbers: list[int]) -> Hashable:
    """What of an argument is no size; its sizes are added to `numbers`."""
    if isinstance(arg, relax.Tuple):
        return tuple([_read(field, numbers) for field in arg.fields[:]])
    if isinstance(arg, relax.ShapeExpr):
        return "shape", *[_read_number(size, numbers) for size in arg.values[:]]
    if isinstance(arg, relax.PrimValue):
        return "number", _read_number(arg.value, numbers)
    if isinstance(arg, relax.Var):
        return "tensor", _read_info(arg.struct_info, numbers)
    if isinstance(arg, (relax.Constant, relax.StringImm, relax.DataTypeImm, relax.ExternFunc)):
        return Structure(arg)
    raise NotSizedError


def _read_number(value: tirx.PrimExpr, numbers: list[int]) -> Hashable:
    if not isinstance(value, tirx.IntImm) or value.dtype == "bool":
        return Structure(value)
    numbers.append(int(value))
    return str(value.dtype)


def _read_info(info: relax.StructInfo, numbers: list[int]) -> Hashable:
    if isinstance(info, relax.TupleStructInfo):
        return tuple([_read_info(field, numbers) for field in info.fields[:]])
    if not isinstance(info, relax.TensorStructInfo) or not isinstance(info.shape, relax.ShapeExpr):
        raise NotSizedError
    sizes = tuple([_read_number(size, numbers) for size in info.shape.values[:]])
    return str(info.dtype), sizes


def _made(arg: relax.Expr, left: Iterator[int], known: dict[relax.Var, relax.Var]) -> Any:
    """The argument with the next sizes of `left` in place of its own."""
    if isinstance(arg, relax.Tuple):
        return relax.Tuple([_made(field, left, known) for field in arg.fields[:]])
    if isinstance(arg, relax.ShapeExpr):
        return relax.ShapeExpr([_made_number(size, left) for size in arg.values[:]])
    if isinstance(arg, relax.PrimValue):
        return relax.PrimValue(_made_number(arg.value, left))
    if isinstance(arg, relax.Var):
        info = _made_info(arg.struct_info, left)
        if arg not in known:
            known[arg] = relax.Var(arg.name_hint, info)
        return known[arg]
    return arg


def _made_number(value: tirx.PrimExpr, left: Iterator[int]) -> tirx.PrimExpr:
    if not isinstance(value, tirx.IntImm) or value.dtype == "bool":
        return value
    return tirx.IntImm(value.dtype, next(left))


def _made_info(info: relax.StructInfo, left: Iterator[int]) -> relax.StructInfo:
    if isinstance(info, relax.TupleStructInfo):
        return relax.TupleStructInfo([_made_info(field, left) for field in info.fields[:]])
    return relax.TensorStructInfo([_made_number(size, left) for size in info.shape.values[:]], info.dtype)
