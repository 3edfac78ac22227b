"""Gelu by its approximation with tanh, and its gradient, as compiled loops: torch's own take four times as long.

Where there is no C++ compiler, and none has made them before, torch's serve. What ranks have is compared before a
program runs on them (`how`)."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import tilelang
import torch

from mesh_tensor.base.errors import MeshTensorError

from .build import FLAGS, compile_library, compiler_stamp, processor
from .cache import add_library, build_once, find_library

Tensor = torch.Tensor
_PER_THREAD = 1 << 19  # elements: with fewer, to start a thread costs more than it saves
_aten = torch.ops.aten


def gelu_tanh(x: Tensor) -> Tensor:
    """`torch.nn.functional.gelu(x, approximate="tanh")`, to rounding."""
    if not _is_plain(x) or (library := _library()) is None:
        return torch.nn.functional.gelu(x, approximate="tanh")
    x = x.contiguous()
    made = torch.empty_like(x)
    _in_parts(library.mt_gelu, x, made)
    return made


def gelu_tanh_backward(seed: Tensor, x: Tensor) -> Tensor:
    """The gradient with respect to `x`, of that of the result."""
    if not (_is_plain(x) and _is_plain(seed)) or x.shape != seed.shape or (library := _library()) is None:
        return _aten.gelu_backward(seed, x, approximate="tanh")
    seed, x = seed.contiguous(), x.contiguous()
    made = torch.empty_like(x)
    _in_parts(library.mt_gelu_backward, seed, x, made)
    return made


def how() -> str:
    """Who computes them in this process."""
    return "torch's" if _library() is None else "compiled"


def _is_plain(x: Tensor) -> bool:
    """Whether it is nothing but numbers in this machine's memory, whose gradient nobody records."""
    plain = x.__class__ is Tensor and x.dtype is torch.float32 and x.device.type == "cpu"
    return plain and not (x.requires_grad and torch.is_grad_enabled())


def _in_parts(function: Callable[..., None], *tensors: Tensor) -> None:
    """On as many threads as torch takes, where there is enough to do."""
    count, addresses = tensors[0].numel(), [tensor.data_ptr() for tensor in tensors]
    parts = min(torch.get_num_threads(), count // _PER_THREAD)
    if parts <= 1:
        function(*addresses, count)
        return
    each = -(-count // parts)
    starts = range(0, count, each)
    threads = [
        threading.Thread(target=function, args=(*[a + 4 * start for a in addresses], min(each, count - start)))
        for start in starts[1:]
    ]
    for thread in threads:
        thread.start()
    function(*addresses, each)
    for thread in threads:
        thread.join()


@functools.cache
def _library() -> ctypes.CDLL | None:
    texts = [(Path(__file__).parent / "csrc" / f"mesh_tensor_{part}.h").read_text() for part in ("cpu", "math", "gelu")]
    source, compiler = "\n".join(texts), compiler_stamp()
    key = hashlib.sha256("\0".join(["gelu", processor(), *FLAGS, source]).encode()).hexdigest()
    try:
        if not tilelang.env.is_cache_enabled():
            library = build_once(source, compile_library)
        else:
            library = find_library(key, compiler) or add_library(key, compiler, source, compile_library)
    except (MeshTensorError, OSError):
        return None
    for function, pointers in ((library.mt_gelu, 2), (library.mt_gelu_backward, 3)):
        function.restype, function.argtypes = None, (*[ctypes.c_void_p] * pointers, ctypes.c_int64)
    return library
