"""TileLang rewrites a function's source whenever `T.prim_func` or `T.macro` decorates it, and `T.reduce_sum` decorates
one at each call: three quarters of the time of a test that builds a small kernel. Tests build the same kernels a
thousand times, for other sizes; here each is rewritten once, and then bound to what it closes over."""

import linecache
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import tilelang.language.eager.builder as builder
from tilelang.language.eager.ast import IRGenerator, mutate
from tilelang.language.eager.utils import get_func_nonlocals

_rewritten: dict[tuple[Any, ...], tuple[list[str], IRGenerator[..., Any]]] = {}


def mutate_once(func: Callable[..., Any]) -> IRGenerator[..., Any]:
    """What TileLang's `mutate(func)` gives: that depends on the text, and the globals and names that it refers to."""
    code, values = func.__code__, get_func_nonlocals(func)
    key = (code, code.co_filename, tuple(values), id(func.__globals__))
    text = linecache.getlines(code.co_filename)
    known = _rewritten.get(key)
    if known is None or known[0] is not text:
        known = _rewritten[key] = (text, mutate(func))
        return known[1]
    first = known[1]
    cells = tuple(CellType(values[name]) for name in first.gen.__code__.co_freevars)
    gen = FunctionType(first.gen.__code__, first.gen.__globals__, first.gen.__name__, None, cells)
    return IRGenerator(gen, first.source, first.extra_type_hints)


def install() -> None:
    """From now on, in this process."""
    builder.mutate = mutate_once
