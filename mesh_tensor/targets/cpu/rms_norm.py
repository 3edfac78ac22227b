"""Norms by the root mean square, as a compiled loop: torch's own is eight operators.

Where there is no C++ compiler, and none has made it before, torch's serves. What ranks have is compared before a
program runs on them (`how`)."""

from __future__ import annotations

import ctypes
import functools
import math
from functools import partial

import torch

from .loops import in_parts, is_plain, loops

Tensor = torch.Tensor
_PER_THREAD = 1 << 19  # elements: with fewer, to start a thread costs more than it saves


def rms_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor, epsilon: float) -> Tensor:
    """`torch.rms_norm(x, shape, weight, epsilon)`, to rounding."""
    if not (is_plain(x) and is_plain(weight)) or (library := _library()) is None:
        return torch.rms_norm(x, shape, weight, epsilon)
    x, weight, width = x.contiguous(), weight.contiguous(), math.prod(shape)
    made, count = torch.empty_like(x), x.numel()
    given = x.data_ptr(), weight.data_ptr(), made.data_ptr(), width, epsilon
    if count < 2 * _PER_THREAD:
        library.mt_rms_norm(*given, 0, count // max(1, width))
    else:
        in_parts(partial(library.mt_rms_norm, *given), count // width, _PER_THREAD // width)
    return made


def how() -> str:
    """Who computes them in this process."""
    return "torch's" if _library() is None else "compiled"


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = loops("cpu", "rms_norm")
    if library is None:
        return None
    numbers = ctypes.c_int64, ctypes.c_float, ctypes.c_int64, ctypes.c_int64
    library.mt_rms_norm.restype, library.mt_rms_norm.argtypes = None, (*[ctypes.c_void_p] * 3, *numbers)
    return library
