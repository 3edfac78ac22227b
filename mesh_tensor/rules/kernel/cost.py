"""What a kernel computes, counted from its statements; and sizes with symbols in them, as functions of the symbols'
values."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from tvm import ir, tirx

from mesh_tensor.base.dtypes import is_float
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.tir.loops import is_one_iteration
from mesh_tensor.tir.nodes import nodes

from .reader import read_kernel
from .statements import Statement

#: What sizes are made of others by.
ON_SIZES: dict[type, Callable[[int, int], int]] = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.FloorDiv: operator.floordiv,
    tirx.FloorMod: operator.mod,
    tirx.Min: min,
    tirx.Max: max,
}


def is_size(size: Any, symbols: Sequence[tirx.Var]) -> bool:
    """Whether a size is known from the values of the symbols."""
    if isinstance(size, tirx.Var):
        return any(symbol.same_as(size) for symbol in symbols)
    if type(size) in ON_SIZES:
        return is_size(size.a, symbols) and is_size(size.b, symbols)
    return isinstance(size, (int, tirx.IntImm))


def size_function(size: Any, symbols: Sequence[tirx.Var]) -> Callable[[Sequence[int]], int]:
    """From the values of all `symbols`, in their order, to the value of a size.

    Raises:
        MeshTensorError: there is something else in it than the symbols and arithmetic.
    """
    if isinstance(size, (int, tirx.IntImm)):
        value = int(size)
        return lambda values: value
    if isinstance(size, tirx.Var):
        position = next((index for index, symbol in enumerate(symbols) if symbol.same_as(size)), None)
        if position is not None:
            return lambda values: values[position]
    operation = ON_SIZES.get(type(size))
    if operation is None:
        known = listing([symbol.name for symbol in symbols]) if symbols else "numbers"
        refuse(f"the size {size} is not known", why=f"only {known} are, and + - * // % min max of them")
    left, right = size_function(size.a, symbols), size_function(size.b, symbols)
    return lambda values: operation(left(values), right(values))


_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)
_NO_WORK = ("tirx.if_then_else", "tl.region", "tl.access_ptr", "tl.infinity", "tirx.reinterpret")


def count_flops(func: tirx.PrimFunc) -> int:
    """Floating-point operations of one run of a kernel: 2 per multiply-add, 1 per other operation or function.

    Loops whose extent is no constant count once. Branches count as taken."""
    return flops_of(read_kernel(func).statements)


@lru_cache(maxsize=256)
def has_products(func: tirx.PrimFunc) -> bool:
    """Whether a kernel multiplies matrices by what machines have for that."""
    return any(isinstance(c.op, ir.Op) and c.op.name.startswith("tl.tileop.gemm") for c in nodes(func.body, tirx.Call))


def flops_of(statements: Iterable[Statement]) -> int:
    """`count_flops` of a kernel that is read already."""
    return _flops_function(statements, ())(())


def flops_function(func: tirx.PrimFunc, symbols: Sequence[tirx.Var]) -> Callable[[Sequence[int]], int]:
    """`count_flops` for kernels with symbols in the extents of their loops: from the values of all `symbols`."""
    return _flops_function(read_kernel(func).statements, symbols)


def _flops_function(statements: Iterable[Statement], symbols: Sequence[tirx.Var]) -> Callable[[Sequence[int]], int]:
    terms = []
    for statement in statements:
        if each := _flops(statement):
            loops = [loop for loop in statement.loops if loop.node is None or not is_one_iteration(loop.node)]
            extents = [loop.extent for loop in loops if is_size(loop.extent, symbols)]
            terms.append((each, [size_function(extent, symbols) for extent in extents]))
    return lambda values: sum(each * math.prod(extent(values) for extent in extents) for each, extents in terms)


def _flops(statement: Statement) -> int:
    """Of one run of the statement."""
    record = statement.tile_op
    if record is not None:
        return record.flops
    if statement.write is None:
        return 0
    work = sum(_operations(value) for value in statement.values[:1])
    return work + (statement.op is not None)


def _operations(expr: tirx.PrimExpr) -> int:
    calls = [c for c in nodes(expr, tirx.Call) if isinstance(c.op, ir.Op) and c.op.name not in _NO_WORK]
    return sum(is_float(node.dtype) for node in [*nodes(expr, *_ARITHMETIC), *calls])
