"""Which ranks can share memory, and how they connect."""

from __future__ import annotations

import functools
import os
import platform
import socket
import struct
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from .shared_memory import new_block
from .shared_wire import SharedWire

SWITCH_VARIABLE = "MESH_TENSOR_SHARED_MEMORY"
_HELLO = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")
_AGAIN = 0.001  # seconds until a connection is tried again
_PATIENCE = 1.0  # seconds for a stranger to say who it is


def shared_place() -> str:
    """What ranks that can share memory have in common; nothing where this one can't, or is not to."""
    return "" if os.environ.get(SWITCH_VARIABLE, "1") == "0" else _place()


@functools.cache
def _place() -> str:
    """Elsewhere than on these processors a block could be seen as read before it is."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return ""
    try:
        boot, network = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")
        os.close(new_block(1)[1])
        _socket().close()
    except OSError:
        return ""
    return f"{boot} {network} {os.getuid()}"


def shared_wire(name: str, rank: int, count: int, timeout: timedelta) -> SharedWire:
    """The wire of a rank, of `count` that all ask at the same time, by one name that nobody else uses. Raises
    RuntimeError where one of them doesn't within the timeout."""
    end = time.monotonic() + timeout.total_seconds()
    peers: dict[int, socket.socket] = {}
    with _socket() as listener:
        try:
            listener.bind(_address(name, rank))
            listener.listen(count)
            for other in range(rank):
                peers[other] = _reached(_address(name, other), end)
                peers[other].send(_HELLO.pack(rank))
            while len(peers) < count - 1:
                listener.settimeout(max(end - time.monotonic(), _AGAIN))
                peer, _ = listener.accept()
                other = _who(peer)
                if other >= 0:
                    peers[other] = peer
        except OSError as error:
            missing = [other for other in range(count) if other not in peers and other != rank]
            for peer in peers.values():
                peer.close()
            raise RuntimeError(f"Timed out waiting for connections with {missing}: {error}") from error
    return SharedWire(peers, timeout)


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(name: str, rank: int) -> bytes:
    return f"\0mesh_tensor {name} {rank}".encode()


def _reached(address: bytes, end: float) -> socket.socket:
    while True:
        peer = _socket()
        try:
            peer.connect(address)
            if not _is_own(peer):
                raise ConnectionRefusedError("a stranger listens there")
            return peer
        except OSError:
            peer.close()
            if time.monotonic() > end:
                raise
            time.sleep(_AGAIN)


def _is_own(peer: socket.socket) -> bool:
    """Whether the other end is this user's."""
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.getuid())


def _who(peer: socket.socket) -> int:
    """The rank that a connection is from; -1: a stranger's, which is closed."""
    said = b""
    peer.settimeout(_PATIENCE)
    with suppress(OSError):
        said = peer.recv(_HELLO.size) if _is_own(peer) else b""
    if len(said) == _HELLO.size:
        return int(_HELLO.unpack(said)[0])
    peer.close()
    return -1
