"""Gelu by its approximation with tanh, and its gradient, as compiled loops: torch's own take four times as long.

Where there is no C++ compiler, and none has made them before, torch's serve. What ranks have is compared before a
program runs on them (`how`)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from .loops import in_parts, is_plain, loops

Tensor = torch.Tensor
_PER_THREAD = 1 << 19  # elements: with fewer, to start a thread costs more than it saves
_aten = torch.ops.aten


def gelu_tanh(x: Tensor) -> Tensor:
    """`torch.nn.functional.gelu(x, approximate="tanh")`, to rounding."""
    if not is_plain(x) or (library := _library()) is None:
        return torch.nn.functional.gelu(x, approximate="tanh")
    x = x.contiguous()
    made = torch.empty_like(x)
    _on_all(library.mt_gelu, x, made)
    return made


def gelu_tanh_backward(seed: Tensor, x: Tensor) -> Tensor:
    """The gradient with respect to `x`, of that of the result."""
    if not (is_plain(x) and is_plain(seed)) or x.shape != seed.shape or (library := _library()) is None:
        return _aten.gelu_backward(seed, x, approximate="tanh")
    seed, x = seed.contiguous(), x.contiguous()
    made = torch.empty_like(x)
    _on_all(library.mt_gelu_backward, seed, x, made)
    return made


def how() -> str:
    """Who computes them in this process."""
    return "torch's" if _library() is None else "compiled"


def _on_all(function: Callable[..., None], *tensors: Tensor) -> None:
    addresses = [tensor.data_ptr() for tensor in tensors]

    def run(begin: int, end: int) -> None:
        function(*[address + 4 * begin for address in addresses], end - begin)

    in_parts(run, tensors[0].numel(), _PER_THREAD)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = loops("cpu", "math", "gelu")
    if library is None:
        return None
    for function, pointers in ((library.mt_gelu, 2), (library.mt_gelu_backward, 3)):
        function.restype, function.argtypes = None, (*[ctypes.c_void_p] * pointers, ctypes.c_int64)
    return library
