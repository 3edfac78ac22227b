"""Blocks of memory that two processes of one machine share: what the one writes, the other reads, once it was told."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import deque

_HEAD = 64  # bytes before a block's data, of which the first says whether somebody is still to read it
_LEAST = 1 << 16  # bytes
_KEPT = 1 << 26  # bytes of blocks for one reader: what comes beyond that is not kept
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Block:
    """A block of `size` bytes of data, at the address `data` in this process. Its memory is there for as long as one of
    the processes that have it."""

    def __init__(self, file: int, size: int) -> None:
        """Of a file of memory, which may be closed afterwards."""
        address = _libc.mmap(None, _HEAD + size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), "no shared memory")
        self.size, self.data = size, address + _HEAD
        self._unread = ctypes.c_uint8.from_address(address)
        weakref.finalize(self, _libc.munmap, address, _HEAD + size).atexit = False

    @property
    def is_unread(self) -> bool:
        """Whether what was written to it is still to be read."""
        return bool(self._unread.value)

    def written(self) -> None:
        """Somebody is to read it."""
        self._unread.value = 1

    def read(self) -> None:
        """It was read, and may be written again."""
        self._unread.value = 0


def new_block(size: int) -> tuple[Block, int]:
    """A block, and its file, which the caller closes once it was passed on. Raises OSError where there is no such
    memory."""
    file = os.memfd_create("mesh_tensor")
    try:
        os.posix_fallocate(file, 0, _HEAD + size)  # or a lack of memory would end the process when it is written
        return Block(file, size), file
    except BaseException:
        os.close(file)
        raise


class Blocks:
    """The blocks that one reader takes messages from, each of which is used again once it was read."""

    def __init__(self) -> None:
        self._of_size: dict[int, deque[tuple[int, Block]]] = {}
        self._count = self._bytes = 0

    def free(self, nbytes: int) -> tuple[Block, int | None, int]:
        """A block of at least that size to write to; its number, by which the reader knows it, or None where it is for
        one message; and the file to pass on, or -1 where the reader has the block."""
        size = max(_LEAST, 1 << (nbytes - 1).bit_length())
        kept = self._of_size.setdefault(size, deque())
        if kept and not kept[0][1].is_unread:  # the one that was used first
            kept.rotate(-1)
            number, block = kept[-1]
            block.written()
            return block, number, -1
        if self._bytes + size > _KEPT:
            return (*_once(nbytes),)
        block, file = new_block(size)
        block.written()
        kept.append((self._count, block))
        self._count += 1
        self._bytes += size
        return block, self._count - 1, file


def _once(nbytes: int) -> tuple[Block, None, int]:
    block, file = new_block(nbytes)
    return block, None, file
