"""Sizes with symbols in them, as functions of the symbols' values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

from mesh_tensor.base.errors import listing, refuse

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
