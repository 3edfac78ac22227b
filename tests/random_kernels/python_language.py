"""TileLang's words as Python functions over numpy arrays, for `reference`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Memory:
    """A parameter or an on-chip buffer."""

    array: np.ndarray
    is_param: bool = False

    def _inside(self, index: Any) -> tuple[int, ...] | None:
        at = tuple(int(i) for i in (index if isinstance(index, tuple) else (index,)))
        assert len(at) == self.array.ndim, f"{len(at)} indices into {self.array.ndim} dims"
        if all(0 <= i < n for i, n in zip(at, self.array.shape, strict=True)):
            return at
        assert self.is_param, f"index {at} leaves an on-chip buffer of shape {self.array.shape}"
        return None

    def __getitem__(self, index: Any) -> Any:
        at = self._inside(index)
        return self.array.dtype.type(0) if at is None else self.array[at]

    def __setitem__(self, index: Any, value: Any) -> None:
        at = self._inside(index)
        if at is not None:
            self.array[at] = value


class Region:
    """A box of memory: where it starts, and how far it goes where that is said."""

    def __init__(self, memory: Memory, *indices: Any):
        self.memory = memory
        self.slices = any(isinstance(i, slice) for i in indices)
        shape = memory.array.shape
        whole = [slice(None)] * (len(shape) - len(indices)) if not indices else []
        self.starts, self.extents = [], []
        for index, size in zip([*indices, *whole], shape, strict=True):
            if isinstance(index, slice):
                start = 0 if index.start is None else int(index.start)
                self.starts.append(start)
                self.extents.append((size if index.stop is None else int(index.stop)) - start)
            else:
                self.starts.append(int(index))
                self.extents.append(1)

    @property
    def says_extents(self) -> bool:
        return self.slices

    def long(self) -> list[int]:
        return [extent for extent in self.extents if extent != 1]

    def as_long_as(self, shape: Sequence[int]) -> None:
        """Take the extents of the other side."""
        missing = len(self.starts) - len(shape)
        tail = list(shape) if missing >= 0 else [n for n in shape if n != 1]
        self.extents = [1] * (len(self.starts) - len(tail)) + tail

    def elements(self) -> Iterator[tuple[int, ...]]:
        for offset in itertools.product(*(range(n) for n in self.extents)):
            yield tuple(start + i for start, i in zip(self.starts, offset, strict=True))


def _region(x: Memory | Region) -> tuple[Region, bool]:
    """The region, and whether it is known how far it goes."""
    if isinstance(x, Region):
        return x, x.says_extents
    return Region(x), True


def _pair(a: Memory | Region, b: Memory | Region) -> Iterator[tuple[Memory, tuple[int, ...], Memory, tuple[int, ...]]]:
    (one, one_known), (two, two_known) = _region(a), _region(b)
    if not one_known and two_known:
        one.as_long_as(two.extents)
    elif not two_known and one_known:
        two.as_long_as(one.extents)
    assert one.long() == two.long(), f"regions of {one.extents} and {two.extents}"
    for x, y in zip(one.elements(), two.elements(), strict=True):
        yield one.memory, x, two.memory, y


# -- the language --------------------------------------------------------------------------------------------------


def _alloc(shape: Sequence[int], dtype: str = "float32", *_: Any, **__: Any) -> Memory:
    return Memory(np.zeros(tuple(shape), dtype))


def _alloc_var(dtype: str, init: Any = 0) -> Any:
    return np.dtype(dtype).type(init)


def _serial(*bounds: Any, **_: Any) -> range:
    return range(*(int(b) for b in bounds))


def _nest(*extents: Any, **_: Any) -> Iterator[Any]:
    if len(extents) == 1:
        return iter(range(int(extents[0])))
    return itertools.product(*(range(int(n)) for n in extents))


def _transpose(src: Memory, dst: Memory) -> None:
    dst.array[...] = src.array.T


def _copy(src: Memory | Region, dst: Memory | Region) -> None:
    for a, at, b, to in list(_pair(src, dst)):
        b[to] = a[at]


def _fill(dst: Memory | Region, value: Any) -> None:
    region, _ = _region(dst)
    for at in region.elements():
        region.memory[at] = value


def _gemm(
    a: Memory, b: Memory, c: Memory, transpose_A: bool = False, transpose_B: bool = False, clear_accum: bool = False
) -> None:
    if clear_accum:
        c.array[...] = 0
    left = a.array.T if transpose_A else a.array
    right = b.array.T if transpose_B else b.array
    c.array[...] += left.astype(c.array.dtype) @ right.astype(c.array.dtype)


def _maximum(a: Any, b: Any) -> Any:
    """What is no number stays that, as in numpy and unlike Python's."""
    return a if a != a else b if b != b else max(a, b)


def _minimum(a: Any, b: Any) -> Any:
    return a if a != a else b if b != b else min(a, b)


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "max": _maximum,
    "min": _minimum,
    "or": lambda a, b: a | b,
}


_UFUNCS = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "abssum": np.add,
    "absmax": np.maximum,
    "bitand": np.bitwise_and,
    "bitor": np.bitwise_or,
    "bitxor": np.bitwise_xor,
}


def _reduce(op: str) -> Callable[..., None]:
    def reduce(src: Memory, dst: Memory, dim: int = -1, clear: bool = True) -> None:
        x = np.moveaxis(src.array, dim, 0).astype(dst.array.dtype)
        start = {"sum": 0, "abssum": 0, "absmax": 0, "bitor": 0, "bitxor": 0, "bitand": -1}.get(op, x[0])
        total = np.full(x.shape[1:], start, dst.array.dtype) if clear else dst.array.reshape(x.shape[1:]).copy()
        for row in x:
            row = abs(row) if op.startswith("abs") else row
            total = _UFUNCS[op](total, row)
        dst.array[...] = total.reshape(dst.array.shape)

    return reduce


def _running(ufunc: np.ufunc) -> Callable[..., None]:
    def running(src: Memory, dst: Memory | None = None, dim: int = 0, reverse: bool = False) -> None:
        x = np.flip(src.array, dim) if reverse else src.array
        total = ufunc.accumulate(x, axis=dim, dtype=src.array.dtype)
        (dst or src).array[...] = np.flip(total, dim) if reverse else total

    return running


@dataclass(frozen=True)
class Reducer(Memory):
    """What is combined by `op`."""

    op: str = "sum"


def _reducer(shape: Sequence[int], dtype: str, op: str) -> Reducer:
    return Reducer(np.zeros(tuple(shape), dtype), op=op)


def _reducer_init(reducer: Reducer, init: float | None = None) -> None:
    reducer.array[...] = {"sum": 0, "max": -np.inf, "min": np.inf}[reducer.op] if init is None else init


def _reducer_update(target: Region, value: Any) -> None:
    assert isinstance(target.memory, Reducer)
    _atomic(target.memory.op)(target, value)


def _finalize_reducer(reducer: Reducer, dst: Memory) -> None:
    dst.array[...] = reducer.array


def _atomic(op: str) -> Callable[..., Any]:
    def atomic(dst: Region, value: Any, return_prev: bool = False) -> Any:
        if isinstance(value, (Memory, Region)):
            for a, at, b, to in list(_pair(value, dst)):
                b[to] = _COMBINE[op](b[to], b.array.dtype.type(a[at]))
            return None
        (at,) = dst.elements()
        previous = dst.memory[at]
        dst.memory[at] = _COMBINE[op](previous, dst.memory.array.dtype.type(value))
        return previous

    return atomic


def _of_float(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function, for which a literal is a float32, as in TileLang: numpy would go on with a float64."""
    return lambda x: function(np.float32(x) if isinstance(x, float) and not isinstance(x, np.generic) else x)


def _infinity(dtype: str) -> Any:
    return np.dtype(dtype).type(math.inf)


def _view(memory: Memory, shape: tuple[int, ...]) -> Memory:
    """The same memory in another shape."""
    return Memory(memory.array.reshape(shape), memory.is_param)


LANGUAGE = SimpleNamespace(
    alloc_fragment=_alloc,
    alloc_shared=_alloc,
    alloc_local=_alloc,
    alloc_var=_alloc_var,
    serial=_serial,
    unroll=_serial,
    Pipelined=_serial,
    Parallel=_nest,
    grid=_nest,
    transpose=_transpose,
    reshape=_view,
    view=_view,
    copy=_copy,
    fill=_fill,
    clear=lambda dst: _fill(dst, 0),
    gemm=_gemm,
    wgmma_gemm=_gemm,
    cumsum=_running(np.add),
    cummax=_running(np.maximum),
    alloc_reducer=_reducer,
    reducer_init=_reducer_init,
    reducer_update=_reducer_update,
    finalize_reducer=_finalize_reducer,
    infinity=_infinity,
    min_value=lambda dtype: np.iinfo(dtype).min,
    max_value=lambda dtype: np.iinfo(dtype).max,
    cast=lambda value, dtype: np.dtype(dtype).type(value),
    int32=np.int32,
    float32=np.float32,
    ceildiv=lambda a, b: -(-a // b),
    max=_maximum,
    min=_minimum,
    abs=abs,
    **{name: _of_float(getattr(np, name)) for name in ("exp", "exp2", "log", "floor", "round")},
    **{f"reduce_{op}": _reduce(op) for op in _UFUNCS},
    **{f"atomic_{op}": _atomic({"add": "sum"}.get(op, op)) for op in ("add", "max", "min", "or")},
)
