"""A wire between ranks of one machine: large tensors go through memory that two processes share, what says so, and
small tensors, through Unix sockets, which also tell that a rank has ended.

A tensor is copied when it is sent, and once more when its receiver waits for it: no thread works beside those that
compute. A receiver says what it asks for, and a sender waits for that, as gloo's do: who sends what nobody wants finds
out. Blocks of memory have no names: they are passed on as file descriptors, and end with the processes that have them.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch

from .shared_memory import Block, Blocks

_RECORD = struct.Struct("<QQqQ")  # tag, bytes, number of a block, its size where the reader gets it with this
_INLINE = 2048  # bytes: so much goes through the socket itself
# Instead of a block's number: there is none; it is for this message alone; it is no message, but asked for with this.
_IN_SOCKET, _ONCE, _ASKED = -1, -2, -3
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
        self._asked: Counter[int] = Counter()

    def message(self, tag: int) -> _Message | None:
        """The next message with that tag, if it is here."""
        waiting = self._arrived.get(tag)
        if waiting is None:
            return None
        message = waiting.popleft()
        if not waiting:
            del self._arrived[tag]
        return message

    def has_asked(self, tag: int) -> bool:
        """Whether it asked for a message with that tag, which counts once, and all is said that was to be."""
        if self.unsaid or not self._asked[tag]:
            return False
        self._asked[tag] -= 1
        if not self._asked[tag]:
            del self._asked[tag]
        return True

    def say(self, record: bytes, file: int) -> None:
        """Send a packet, and a file with it, which is closed then. Raises BlockingIOError where there is no room."""
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
            try:
                self.is_gone = not packet or not self._keep(packet, files)
            except OSError:  # no memory for its block
                self.is_gone = True

    def _keep(self, packet: bytes, files: list[int]) -> bool:
        """Keep what came; False where its block didn't, as this process has too many files."""
        tag, nbytes, number, size = _RECORD.unpack_from(packet)
        if number == _ASKED:
            self._asked[tag] += 1
            return True
        if size and not files:
            return False
        block = None
        if files:
            block = Block(files[0], size)
            os.close(files[0])
            if number != _ONCE:
                self._known[number] = block
        elif number != _IN_SOCKET:
            block = self._known[number]
        self._arrived.setdefault(tag, deque()).append(_Message(nbytes, packet[_RECORD.size :], block))
        return True


class SharedWire:
    """The Wire of a rank whose `peers` are connected by packet sockets. Several threads may use it."""

    copies = True

    def __init__(self, peers: Mapping[int, socket.socket], timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()
        self._peers = {number: _Peer(end) for number, end in peers.items()}
        self._of_file = {peer.end.fileno(): peer for peer in self._peers.values()}
        self._poll = select.poll()
        for file in self._of_file:
            self._poll.register(file, select.POLLIN)
        self._more = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # who looks is to see to what was left unsaid
        self._poll.register(self._more, select.POLLIN)
        self._changed = threading.Condition()
        self._looks = self._is_cut = False
        weakref.finalize(self, _close, list(self._peers.values()), self._more)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> _Sent:
        """Send a contiguous tensor. The wait ends when it is asked for."""
        peer, address, nbytes = self._peers[to], tensor.data_ptr(), tensor.nbytes
        if nbytes <= _INLINE:
            self._say(peer, _RECORD.pack(tag, nbytes, _IN_SOCKET, 0) + ctypes.string_at(address, nbytes))
            return _Sent(self, to, tag)
        try:
            with self._changed:
                block, number, file = peer.blocks.free(nbytes)
        except OSError as error:
            raise RuntimeError(f"no memory to send {nbytes} bytes: {error}") from error
        ctypes.memmove(block.data, address, nbytes)
        place = _ONCE if number is None else number
        self._say(peer, _RECORD.pack(tag, nbytes, place, block.size if file >= 0 else 0), file)
        return _Sent(self, to, tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> _Receipt:
        """What fills a contiguous tensor when it is waited for."""
        with suppress(RuntimeError):  # what it sent before it ended is here all the same
            self._say(self._peers[source], _RECORD.pack(tag, 0, _ASKED, 0))
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

    def asked(self, to: int, tag: int) -> None:
        """Wait until a rank has asked for a message."""
        peer = self._peers[to]
        self._awaited(peer, lambda: peer.has_asked(tag) or None)

    def _say(self, peer: _Peer, record: bytes, file: int = -1) -> None:
        try:
            if not peer.unsaid:
                peer.say(record, file)
                return
        except BlockingIOError:
            pass
        except OSError as error:
            if file >= 0:
                os.close(file)
            raise RuntimeError(f"Connection closed by peer: {error}") from error
        with self._changed:
            peer.unsaid.append((record, file))
            if self._looks:
                os.eventfd_write(self._more, 1)

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
            if file == self._more:
                os.eventfd_read(file)
                continue
            peer = self._of_file[file]
            peer.hear()
            try:
                peer.say_more()
            except OSError:
                peer.is_gone = True
            if peer.is_gone:
                self._poll.unregister(file)
                del self._of_file[file]


def _close(peers: Sequence[_Peer], more: int) -> None:
    os.close(more)
    for peer in peers:
        peer.end.close()
        for _, file in peer.unsaid:
            if file >= 0:
                os.close(file)


@dataclass(slots=True, frozen=True)
class _Sent:
    wire: SharedWire
    to: int
    tag: int

    def wait(self) -> None:
        """Wait until it is asked for."""
        self.wire.asked(self.to, self.tag)


@dataclass(slots=True, frozen=True)
class _Receipt:
    wire: SharedWire
    tensor: torch.Tensor
    source: int
    tag: int

    def wait(self) -> None:
        """Wait until it is there, and put it into the tensor."""
        self.wire.take(self.tensor, self.source, self.tag)
