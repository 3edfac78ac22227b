"""Dtypes, by the names that TVM has for them: what they are, how large, and between which values; and TensorType, a
shape with a dtype."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import NamedTuple

import ml_dtypes
import numpy as np

from .errors import refuse

#: Formats of 8 bits that TileLang calls by a name of their own: they are torch's, without infinities.
_SAME_AS = {"float8_e4m3": "float8_e4m3fn"}

#: Floats whose sums are taken in float32, as torch takes them.
NARROW = ("float16", "bfloat16")

#: Bytes. Kernels may load whole vectors from where a tile, a slab of one or a workspace starts.
ALIGNMENT = 64


@cache
def element_dtype(dtype: str) -> str:
    """What torch, numpy and ml_dtypes call a dtype, or a vector's elements: `float32` of `float32x4`."""
    element = re.sub(r"(?<=\d)x\d+$", "", dtype)
    return _SAME_AS.get(element, element)


@cache
def numpy_dtype(dtype: str) -> np.dtype:
    """The numpy dtype of a dtype, or of a vector's elements; ml_dtypes gives bfloat16 and the 8-bit floats."""
    try:
        return np.dtype(element_dtype(dtype))
    except TypeError:
        return refuse(f"there is no numpy dtype for {str(dtype)!r}", fix="use a dtype that numpy or ml_dtypes has")


@cache
def dtype_bits(dtype: str) -> int:
    """The size of one element in bits.

    >>> dtype_bits("float32"), dtype_bits("float8_e4m3"), dtype_bits("int4"), dtype_bits("bool")
    (32, 8, 4, 8)
    """
    digits = re.search(r"\d+", element_dtype(dtype))
    return int(digits.group()) if digits else 8


@cache
def itemsize(dtype: str) -> int:
    """The size of one element in bytes, at least 1."""
    return max(1, dtype_bits(dtype) // 8)


def is_float(dtype: str) -> bool:
    """Whether a dtype is one of floating-point numbers, of any format."""
    return dtype.startswith(("float", "bfloat"))


@cache
def extreme(dtype: str, sign: int) -> float | int:
    """The largest (`sign` > 0) or smallest value of a dtype; infinite where the dtype has infinities.

    >>> extreme("int8", -1), extreme("float16", 1), extreme("float8_e4m3", 1), extreme("bool", 1)
    (-128, inf, 448.0, True)
    """
    kind = numpy_dtype(dtype)
    if kind.kind == "b":
        return sign > 0
    if not is_float(dtype):
        limits = ml_dtypes.iinfo(kind)
        return int(limits.max if sign > 0 else limits.min)
    with np.errstate(over="ignore"):
        has_infinity = bool(np.isinf(kind.type(math.inf)))
    return sign * (math.inf if has_infinity else float(ml_dtypes.finfo(kind).max))


def poison_value(dtype: str) -> float | int:
    """What memory that nobody may read holds under poison: NaN, or the integer farthest from 0."""
    if not dtype.startswith(("int", "uint", "bool")):
        return math.nan
    return extreme(dtype, -1 if dtype.startswith("int") else 1)


class TensorType(NamedTuple):
    """Shape and dtype of a tensor. Sizes are ints: modules are specialised to sizes before they are looked at."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def ndim(self) -> int:
        """How many dims."""
        return len(self.shape)

    @property
    def elements(self) -> int:
        """How many elements."""
        return math.prod(self.shape)
