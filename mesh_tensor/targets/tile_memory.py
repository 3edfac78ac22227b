"""Memory for tiles. Large ones on a CPU use memory again that earlier tiles have left.

Fresh memory costs a page fault per 4 KiB when it is first written, by the devices' threads at the same time: for tiles
of megabytes as much as a collective takes. The C library gives memory of that size back to the system when it is
freed, or keeps it, as its heap happens to lie. So it is kept here, in large pages where the system has them.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

from mesh_tensor.base.machine_presets import CPU

LARGE = CPU.tuning.fresh_memory  # bytes: smaller tiles come from torch, which gets them from the C library's heap
_KEPT = CPU.tuning.kept_memory  # bytes: more than that is not kept for later

_left: list[mmap.mmap] = []
_HEAP_MOST = (1 << 25) - (1 << 13)  # bytes: of more the C library makes nothing of its heap


@functools.cache
def keep_heap() -> None:
    """Let the C library keep more of what small tiles have left, once per process: a model's steps leave tens of MB at
    their end, which come back page by page in the next one. How much it keeps it sees from the largest memory that was
    ever freed: here one that nobody writes."""
    if sys.platform == "linux":
        torch.empty(_HEAP_MOST, dtype=torch.uint8)


def empty_tile(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor, uninitialised. When the last tensor on its memory is gone, a later one may get that memory.

    Can be called from several threads at once."""
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    if nbytes < LARGE or device.type != "cpu" or sys.platform != "linux":
        return torch.empty(shape, dtype=dtype, device=device)
    region = _take(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    owner = (ctypes.c_char * len(region)).from_buffer(region)
    weakref.finalize(owner, _leave, region).atexit = False
    return torch.frombuffer(owner, dtype=dtype, count=count).view(shape)


def _take(size: int) -> mmap.mmap:
    """A region of that size: one that was left, or a new one."""
    for _ in range(len(_left)):
        try:
            region = _left.pop(0)
        except IndexError:  # another thread was faster
            break
        if len(region) == size:
            return region
        _left.append(region)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without large pages
        region.madvise(mmap.MADV_HUGEPAGE)
    return region


def _leave(region: mmap.mmap) -> None:
    """Keep the region for later, instead of those that were left first where there is too much.

    The garbage collector may call this anywhere, in the middle of `_take` too: there is no lock to wait for, and what
    is done to the list is done in one step each. Threads that meet here may keep a region more or less than they
    should."""
    if len(region) > _KEPT:
        return
    _left.append(region)
    while sum(map(len, _left[:])) > _KEPT:
        try:
            _left.pop(0)
        except IndexError:  # another thread was faster
            break


def memory_of(tensor: torch.Tensor) -> int:
    """What tells a tensor's memory from other memory; tensors without elements have the same."""
    return tensor.untyped_storage().data_ptr()
