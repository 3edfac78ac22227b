"""Torch dtypes of TVM dtype names, and the values that tiles are filled with: neutral elements and poison."""

from __future__ import annotations

import torch

from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.kernel.values import FINITE


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a TVM dtype name such as `float16`."""
    dtype = getattr(torch, FINITE.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        refuse(f"dtype {name!r} has no torch counterpart", fix="use a dtype that torch tensors can have")
    return dtype


def neutral(dtype: torch.dtype, op: str) -> float | int:
    """The element that changes nothing under `op`: 0 for sum, the lowest value for max, all bits set for bitand.

    >>> neutral(torch.int8, "max"), neutral(torch.float16, "min"), neutral(torch.int32, "bitand")
    (-128, inf, -1)
    """
    if op in ("sum", "bitor", "bitxor"):
        return 0
    if op == "prod":
        return 1
    if op == "max":
        return extreme(dtype, -1)
    if op == "min":
        return extreme(dtype, 1)
    if op == "bitand" and not dtype.is_floating_point:
        return extreme(dtype, 1) if dtype == torch.bool or not dtype.is_signed else -1
    return refuse(f"no neutral element of {op!r} for {dtype}", fix="reduce with an op that the dtype has")


def extreme(dtype: torch.dtype, sign: int) -> float | int:
    """The largest (`sign` > 0) or smallest value of `dtype`; infinite where the dtype has infinities."""
    if dtype == torch.bool:
        return int(sign > 0)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return limits.max if sign > 0 else limits.min
    if "fn" in str(dtype):  # float8_e4m3fn and its like: finite only
        return sign * torch.finfo(dtype).max
    return sign * float("inf")


def poison_value(dtype: torch.dtype) -> float | int:
    """What memory that nobody may read holds under poison: NaN, or the integer farthest from 0."""
    return float("nan") if dtype.is_floating_point else extreme(dtype, -1 if dtype.is_signed else 1)
