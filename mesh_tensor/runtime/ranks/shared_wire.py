"""A wire between ranks of one machine: large tensors go through memory that two processes share, what says so, and
small tensors, through Unix sockets, which also tell that a rank has ended.

A tensor is copied when it is sent, so that its sender goes on, and once more when its receiver waits for it: no thread
works beside those that compute. Blocks of memory have no names: they are passed on as file descriptors, and end with
the processes that have them.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch

from .shared_memory import Block, Blocks

_RECORD = struct.Struct("<QQqQ")  # tag, bytes, number of a block, its size where the reader gets it with this
_INLINE = 2048  # bytes: so much goes through the socket itself
_IN_SOCKET, _ONCE = -1, -2  # instead of a block's number: there is none; it is for this message alone
_BUFFER = 1 << 20  # bytes that wait in a socket, as far as the system allows
_T = TypeVar("_T")


@dataclass(slots=True)
class _Message:
    """What came: `nbytes` in a block, or as they are."""

    nbytes: int
    inline: bytes
    block: Block | None

    def put(self, address: int) -> None:
        """Copy it there; its block is free then."""
        if self.block is None:
            ctypes.memmove(address, self.inline, self.nbytes)
        else:
            ctypes.memmove(address, self.block.data, self.nbytes)
            self.block.read()


class _Peer:
    """The connection with one rank, by a socket that keeps packets apart."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self.end, self.blocks, self.is_gone = end, Blocks(), False
        self.unsaid: deque[tuple[bytes, int]] = deque()  # what the socket had no room for
        self._known: dict[int, Block] = {}
        self._arrived: dict[int, deque[_Message]] = {}

    def message(self, tag: int) -> _Message | None:
        """The next message with that tag, if it is here."""
        waiting = self._arrived.get(tag)
        if waiting is None:
            return None
        message = waiting.popleft()
        if not waiting:
            del self._arrived[tag]
        return message

    def say(self, record: bytes, file: int) -> None:
        """Send a packet, and a file with it, which is closed then.

        Raises:
            BlockingIOError: there is no room.
        """
        if file < 0:
            self.end.send(record, socket.MSG_NOSIGNAL)
        else:
            socket.send_fds(self.end, [record], [file], socket.MSG_NOSIGNAL)
            os.close(file)

    def say_more(self) -> None:
        """Send what there is room for now."""
        with suppress(BlockingIOError):
            while self.unsaid:
                self.say(*self.unsaid[0])
                self.unsaid.popleft()

    def hear(self) -> None:
        """Read all that came."""
        while not self.is_gone:
            try:
                packet, files, _, _ = socket.recv_fds(self.end, _RECORD.size + _INLINE, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:  # it has ended without reading all; what it sent before is still here
                continue
            except OSError:
                packet = b""
            if packet:
                self._keep(packet, files)
            else:
                self.is_gone = True

    def _keep(self, packet: bytes, files: list[int]) -> None:
        tag, nbytes, number, size = _RECORD.unpack_from(packet)
        block = None
        if files:
            block = Block(files[0], size)
            os.close(files[0])
            if number != _ONCE:
                self._known[number] = block
        elif number != _IN_SOCKET:
            block = self._known[number]
        self._arrived.setdefault(tag, deque()).append(_Message(nbytes, packet[_RECORD.size :], block))


class SharedWire:
    """The Wire of a rank whose `peers` are connected by packet sockets. Several threads may use it."""

    def __init__(self, peers: Mapping[int, socket.socket], timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()
        self._peers = {number: _Peer(end) for number, end in peers.items()}
        self._of_file = {peer.end.fileno(): peer for peer in self._peers.values()}
        self._poll = select.poll()
        for file in self._of_file:
            self._poll.register(file, select.POLLIN)
        self._changed = threading.Condition()
        self._looks = self._is_cut = False

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> _Done | _Unsaid:
        """Send a contiguous tensor; it may be written as soon as this returns."""
        peer, address, nbytes = self._peers[to], tensor.data_ptr(), tensor.nbytes
        if nbytes <= _INLINE:
            record = _RECORD.pack(tag, nbytes, _IN_SOCKET, 0) + ctypes.string_at(address, nbytes)
            return self._say(peer, record, -1)
        try:
            with self._changed:
                block, number, file = peer.blocks.free(nbytes)
        except OSError as error:
            raise RuntimeError(f"no memory to send {nbytes} bytes: {error}") from error
        ctypes.memmove(block.data, address, nbytes)
        place = _ONCE if number is None else number
        return self._say(peer, _RECORD.pack(tag, nbytes, place, block.size if file >= 0 else 0), file)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> _Receipt:
        """What fills a contiguous tensor when it is waited for."""
        return _Receipt(self, tensor, source, tag)

    def cut(self) -> None:
        """End whatever is under way, here and where others wait for this rank."""
        with self._changed:
            self._is_cut = True
            for peer in self._peers.values():
                with suppress(OSError):
                    peer.end.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    def take(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        """Wait for a message, and fill the tensor with it."""
        peer = self._peers[source]
        message = self._awaited(peer, lambda: peer.message(tag))
        if message.nbytes != tensor.nbytes:
            raise RuntimeError(f"rank {source} sent {message.nbytes} bytes where {tensor.nbytes} are expected")
        message.put(tensor.data_ptr())

    def flush(self, to: int) -> None:
        """Wait until a rank has taken what its socket has no room for."""
        peer = self._peers[to]
        self._awaited(peer, lambda: None if peer.unsaid else True)

    def _say(self, peer: _Peer, record: bytes, file: int) -> _Done | _Unsaid:
        try:
            if not peer.unsaid:
                peer.say(record, file)
                return _DONE
        except BlockingIOError:
            pass
        except OSError as error:
            raise RuntimeError(f"Connection closed by peer: {error}") from error
        with self._changed:
            peer.unsaid.append((record, file))
        return _Unsaid(self, next(number for number, other in self._peers.items() if other is peer))

    def _awaited(self, peer: _Peer, ready: Callable[[], _T | None]) -> _T:
        """What `ready` gives once that is not None. Of the threads that wait, one looks what comes, for all."""
        with self._changed:
            if not self._looks:
                peer.hear()
            end = 0.0
            while (found := ready()) is None:
                now = time.monotonic()
                end = end or now + self._timeout
                if self._is_cut or peer.is_gone:
                    raise RuntimeError("Connection closed by peer")
                if now > end:
                    raise RuntimeError(f"Timed out waiting {self._timeout:g} seconds")
                if self._looks:
                    self._changed.wait(end - now)
                else:
                    self._look(end - now)
            return found

    def _look(self, seconds: float) -> None:
        """Wait until something comes, or there is room again, and see to it."""
        self._looks = True
        for file, peer in self._of_file.items():
            self._poll.modify(file, select.POLLIN | select.POLLOUT if peer.unsaid else select.POLLIN)
        self._changed.release()
        try:
            found = self._poll.poll(seconds * 1000)
        finally:
            self._changed.acquire()
            self._looks = False
            self._changed.notify_all()
        for file, _ in found:
            peer = self._of_file[file]
            peer.hear()
            try:
                peer.say_more()
            except OSError:
                peer.is_gone = True
            if peer.is_gone:
                self._poll.unregister(file)
                del self._of_file[file]


class _Done:
    """What was sent at once."""

    def wait(self) -> None:
        """Return."""


_DONE = _Done()


@dataclass(slots=True, frozen=True)
class _Unsaid:
    """Something that goes when there is room for it."""

    wire: SharedWire
    to: int

    def wait(self) -> None:
        """Wait until it is gone."""
        self.wire.flush(self.to)


@dataclass(slots=True, frozen=True)
class _Receipt:
    """What is to be received."""

    wire: SharedWire
    tensor: torch.Tensor
    source: int
    tag: int

    def wait(self) -> None:
        """Wait until it is there, and put it into the tensor."""
        self.wire.take(self.tensor, self.source, self.tag)
