"""What a kernel computes, counted from its statements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from tvm import ir, tirx

from mesh_tensor.base.dtypes import is_float
from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.short_loops import ONE_ITERATION_MARK
from mesh_tensor.tir.sizes import is_size, size_function

from .reader import read_kernel
from .statements import Statement

_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)
_NO_WORK = ("tirx.if_then_else", "tl.region", "tl.access_ptr", "tl.infinity", "tirx.reinterpret")


def count_flops(func: tirx.PrimFunc) -> int:
    """Floating-point operations of one run of a kernel: 2 per multiply-add, 1 per other operation or function.

    Loops whose extent is no constant count once. Branches count as taken."""
    return flops_of(read_kernel(func).statements)


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
            loops = [
                loop for loop in statement.loops if loop.node is None or ONE_ITERATION_MARK not in loop.node.annotations
            ]
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
