"""Wire: what brings bytes from one rank of a mesh to another. Every message has a tag, and only a receive with the
same tag from the same rank takes it: a message is never taken for another, in whichever order they come."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mesh_tensor.base.errors import refuse

TIMEOUT_VARIABLE = "MESH_TENSOR_TIMEOUT"
_NEVER_SENT = (1 << 30) - 1  # a tag that no message has: tags of messages are larger
_AT_ONCE = timedelta(milliseconds=1)


class Work(Protocol):
    """A send or a receive under way."""

    def wait(self) -> Any:
        """Return when it is done; a RuntimeError says why it never will be."""


class Wire(Protocol):
    """The connections of one rank with the others of its mesh."""

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Work:
        """Begin to send a contiguous tensor, which stays as it is until that is done."""

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Work:
        """Begin to fill a contiguous tensor with what rank `source` sends with this tag."""

    def cut(self) -> None:
        """End whatever is under way, here and where others wait for this rank, with a RuntimeError; for good."""


class Board(Protocol):
    """What all ranks can write on and read, whatever has become of their connections."""

    def say(self, key: str, words: str) -> None:
        """Write. Says nothing where the board is gone, and with it whoever could have read."""

    def read(self, key: str) -> str | None:
        """What was written there, if anything was; a RuntimeError if the board is gone."""


class GlooWire:
    """Connections of gloo's, of CPU memory. They are the mesh's own: what becomes of them is of no matter to the user's
    process groups. All ranks have to make it at the same time."""

    def __init__(self, store: Any, rank: int, count: int, timeout: timedelta) -> None:
        self._peer = (rank + 1) % count
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, count, timeout)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Work:
        return self._gloo.send([tensor], to, tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Work:
        return self._gloo.recv([tensor], source, tag)

    def cut(self) -> None:
        # A wait that ends in vain is all that gloo closes connections for, all of them and at once.
        with contextlib.suppress(RuntimeError):
            self._gloo.recv([torch.empty(1)], self._peer, _NEVER_SENT).wait(_AT_ONCE)


class StoreBoard:
    """A store of torch's as a board; used by one thread at a time, and never for long."""

    def __init__(self, store: Any) -> None:
        self._store, self._lock = store, threading.Lock()

    def say(self, key: str, words: str) -> None:
        with self._lock, contextlib.suppress(RuntimeError, ValueError):
            self._store.set(key, words)

    def read(self, key: str) -> str | None:
        with self._lock:
            return self._store.get(key).decode() if self._store.check([key]) else None


def said_timeout() -> timedelta | None:
    """How long a rank waits for another, if the environment says so."""
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.001 <= seconds <= 1e9:
        refuse(
            f"{TIMEOUT_VARIABLE} is {text!r}",
            why="it says how many seconds a rank waits for another",
            fix="set it to a number like 60, or leave it out: then it is the default process group's timeout",
        )
    return timedelta(seconds=seconds)
