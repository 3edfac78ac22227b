"""Kernels with symbolic dims: from the sizes that a call brings to a kernel without symbols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.arith import Analyzer
from tvm.tirx.stmt_functor import substitute

from mesh_tensor.base.dtypes import TensorType
from mesh_tensor.base.errors import refuse
from mesh_tensor.tir.nodes import function_name, nodes
from mesh_tensor.tir.views import declared

from .annotate import INFO_ATTR, TILES_ATTR


def symbols(func: tirx.PrimFunc) -> tuple[tirx.Var, ...]:
    """The variables in the shapes and strides of the parameters, in order of appearance."""
    found: dict[tirx.Var, None] = {}
    for param in func.params:
        buffer = func.buffer_map.get(param)
        for size in (*buffer.shape, *buffer.strides) if buffer is not None else ():
            found.update(dict.fromkeys(_variables(size)))
    return tuple(found)


_QUOTIENTS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)


def specialize(func: tirx.PrimFunc, sizes: Mapping[tirx.Var, int | tirx.PrimExpr]) -> tirx.PrimFunc:
    """`func` with every symbol of `sizes` replaced by its value, or by an expression of other symbols, in its
    annotations too. A scalar parameter that is such a symbol is a parameter no more."""
    values = {var: tirx.const(size, var.dtype) if isinstance(size, int) else size for var, size in sizes.items()}
    params = [*func.params, *(var for var in values if var not in set(func.params))]
    _check_divisors(func, values)
    as_params = tirx.PrimFunc(params, declared(func).body, func.ret_type, func.buffer_map, func.attrs)
    result = as_params.specialize(values)
    for name in (INFO_ATTR, TILES_ATTR):
        if result.attrs and name in result.attrs:
            result = result.with_attr(name, _replace(result.attrs[name], values))
    return result


def _check_divisors(func: tirx.PrimFunc, values: Mapping[tirx.Var, tirx.PrimExpr]) -> None:
    """Refuse sizes that make a divisor in the kernel 0: TVM fails on it."""
    for divisor in [quotient.b for quotient in nodes(func.body, *_QUOTIENTS)]:  # inner ones come first
        if any(var in values for var in _variables(divisor)):
            value = _simplify(substitute(divisor, values))
            if isinstance(value, tirx.IntImm) and int(value) == 0:
                told = ", ".join(f"{var.name} = {size}" for var, size in values.items())
                refuse(
                    f"the kernel divides by {divisor}, which is 0 where {told}",
                    where=f"kernel {function_name(func)!r}",
                    fix="call it with other sizes, or write the kernel without this division",
                )


def sized(
    func: tirx.PrimFunc, inputs: Sequence[TensorType], outputs: Sequence[TensorType], numbers: Sequence[int]
) -> tirx.PrimFunc:
    """`func` as R.call_tir calls it on tensors and numbers: with the sizes that these bring in place of its symbols.

    Raises:
        MeshTensorError: `func` takes other parameters.
    """
    tensors = [*inputs, *outputs]
    if len(func.params) != len(tensors) + len(numbers):
        refuse(f"a TIR function of {len(func.params)} parameters is called with {len(tensors) + len(numbers)}")
    sizes: dict[tirx.Var, int] = dict(zip(func.params[len(tensors) :], numbers, strict=True))
    for param, tensor in zip(func.params, tensors, strict=False):
        buffer = func.buffer_map[param]
        sizes_differ = any(
            isinstance(size, tirx.IntImm) and int(size) != actual
            for size, actual in zip(buffer.shape, tensor.shape, strict=False)
        )
        if len(buffer.shape) != tensor.ndim or str(buffer.dtype) != tensor.dtype or sizes_differ:
            refuse(
                f"parameter {buffer.name!r} of a TIR function is {list(buffer.shape)} {buffer.dtype}, its argument "
                f"{list(tensor.shape)} {tensor.dtype}"
            )
        for size, actual in zip(buffer.shape, tensor.shape, strict=True):
            if isinstance(size, tirx.Var):
                sizes.setdefault(size, actual)
    return specialize(func, sizes) if sizes else func


def evaluate(size: Any, sizes: Mapping[tirx.Var, int]) -> int | None:
    """The value of a dim, or None while a symbol in it is unknown."""
    if isinstance(size, (int, tirx.IntImm)):
        return int(size)
    if isinstance(size, tirx.Var):
        return sizes.get(size)
    if any(var not in sizes for var in _variables(size)):
        return None
    values = {var: tirx.const(value, var.dtype) for var, value in sizes.items()}
    return int(_simplify(substitute(size, values)))


def _replace(value: Any, values: Mapping[tirx.Var, tirx.PrimExpr]) -> Any:
    """`value`, an attribute or a part of one, with its symbols replaced."""
    if isinstance(value, Mapping):
        return {key: _replace(item, values) for key, item in value.items()}
    if isinstance(value, (list, tuple, tvm_ffi.Array)):
        return [_replace(item, values) for item in value]
    return _simplify(substitute(value, values)) if isinstance(value, tirx.PrimExpr) else value


def _simplify(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    return Analyzer().simplify(expr)


def _variables(expr: Any) -> list[tirx.Var]:
    return nodes(expr, tirx.Var) if isinstance(expr, tirx.PrimExpr) else []
