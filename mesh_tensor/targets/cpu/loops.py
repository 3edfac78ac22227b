"""Functions of C++ that serve operators as they are, compiled once per machine, as kernels are, and run by threads."""

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


@functools.cache
def loops(*parts: str) -> ctypes.CDLL | None:
    """The library of these headers of csrc; None where there is no C++ compiler, and none has made it before."""
    texts = [(Path(__file__).parent / "csrc" / f"mesh_tensor_{part}.h").read_text() for part in parts]
    source, compiler = "\n".join(texts), compiler_stamp()
    key = hashlib.sha256("\0".join([parts[-1], processor(), *FLAGS, source]).encode()).hexdigest()
    try:
        if not tilelang.env.is_cache_enabled():
            return build_once(source, compile_library)
        return find_library(key, compiler) or add_library(key, compiler, source, compile_library)
    except (MeshTensorError, OSError):
        return None


def is_plain(x: torch.Tensor) -> bool:
    """Whether it is nothing but numbers in this machine's memory, as they are, whose gradient nobody records."""
    plain = x.__class__ is torch.Tensor and x.dtype is torch.float32 and x.device.type == "cpu" and not x.is_neg()
    return plain and not (x.requires_grad and torch.is_grad_enabled())


def in_parts(run: Callable[[int, int], object], count: int, least: int) -> None:
    """`run(begin, end)` for parts of `range(count)`, on as many threads as torch takes, of at least `least` each."""
    parts = min(torch.get_num_threads(), count // max(1, least))
    if parts <= 1:
        run(0, count)
        return
    each = -(-count // parts)
    threads = [
        threading.Thread(target=run, args=(begin, min(begin + each, count))) for begin in range(each, count, each)
    ]
    for thread in threads:
        thread.start()
    run(0, each)
    for thread in threads:
        thread.join()
