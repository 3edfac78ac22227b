"""Arithmetic of whole numbers that has no result: what is divided by 0, and positions that leave int32 or int64. (Those
of other types begin anew.)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx

from mesh_tensor.base.dtypes import extreme
from mesh_tensor.base.errors import MeshTensorError, refuse
from mesh_tensor.tir.linear import loop_ranges
from mesh_tensor.tir.nodes import DIVISIONS, function_name, nodes
from mesh_tensor.tir.tile_position import text_of

_LARGE = 2**16  # what positions are multiplied by in hashes, and by which they leave int32
_KNOWN = 2**30  # bounds beyond this are those of a type


@contextmanager
def without_overflow(func: tirx.PrimFunc) -> Iterator[None]:
    """Inside, kernels are refused in which whole numbers leave their type where terms are multiplied out: TVM gives up.

    Raises:
        MeshTensorError: there is such a number.
    """
    try:
        yield
    except ValueError as error:
        if isinstance(error, MeshTensorError) or "Literal value" not in str(error):
            raise
        _refuse_growth(func, str(error).rpartition(": ")[2])


def refuse_overflow(func: tirx.PrimFunc) -> None:
    """Refuse positions that are multiplied by so large a number that they leave int32 or int64: compilers take it that
    none does."""
    hashed = [expr for expr in nodes(func.body, tirx.Mul) if _is_large(expr.b) and expr.dtype in ("int32", "int64")]
    hashed = [expr for expr in hashed if not nodes(expr.a, tirx.BufferLoad, tirx.Call)]
    if not hashed:
        return
    analyzer = loop_ranges(func.body)
    for expr in hashed:
        bound = analyzer.const_int_bound(expr.a)
        most = max(abs(bound.min_value), abs(bound.max_value))
        grown = most * abs(int(expr.b))
        if most <= _KNOWN and grown > extreme(expr.dtype, 1):
            _refuse_growth(func, f"{text_of(expr)}, up to {grown}, exceeds maximum of {expr.dtype}")


def _is_large(expr: tirx.PrimExpr) -> bool:
    return isinstance(expr, tirx.IntImm) and abs(int(expr)) >= _LARGE


def _refuse_growth(func: tirx.PrimFunc, what: str) -> None:
    refuse(
        f"a whole number grows beyond its type ({what})",
        where=f"kernel {function_name(func)!r}",
        why="what comes of that is not defined",
        fix='compute it in "int64", as by T.cast(i, "int64") * 1103515245, or in "uint32", which begins anew at 0',
    )


def refuse_division_by_0(func: tirx.PrimFunc) -> None:
    """Refuse integers that are divided by what is always 0, such as the variable of a grid dim that is 1 long."""
    divisions = nodes(func.body, *DIVISIONS)
    whole = [expr for expr in divisions if expr.dtype.startswith(("int", "uint")) and not nodes(expr.b, tirx.Call)]
    if not whole:
        return
    analyzer = loop_ranges(func.body)
    for expr in whole:
        bound = analyzer.const_int_bound(expr.b)
        if bound.min_value == bound.max_value == 0:
            refuse(
                f"{text_of(expr)} divides by {text_of(expr.b)}, which is always 0",
                where=f"kernel {function_name(func)!r}",
                fix="divide by something else, or make the loop that counts it longer",
            )
