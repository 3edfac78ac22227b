"""Sizes with symbols in them, as functions of the symbols' values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from tvm import tirx

from ..errors import refuse

_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.FloorDiv: operator.floordiv,
    tirx.FloorMod: operator.mod,
    tirx.Min: min,
    tirx.Max: max,
}


def size_function(size: Any) -> Callable[[Mapping[tirx.Var, int]], int]:
    """From the values of the symbols in a size to its own. The function raises a KeyError where it lacks one."""
    if isinstance(size, (int, tirx.IntImm)):
        value = int(size)
        return lambda sizes: value
    if isinstance(size, tirx.Var):
        return lambda sizes: sizes[size]
    operation = _ARITHMETIC.get(type(size))
    if operation is None:
        refuse(f"a dim is {size}", why="sizes are made of + - * // % min max", fix="write it so")
    left, right = size_function(size.a), size_function(size.b)
    return lambda sizes: operation(left(sizes), right(sizes))
