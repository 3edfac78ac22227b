"""Lane: the calls of one thread on a mesh, and the tags of what they send. Wire: what brings tagged bytes from one rank
of a mesh to another, and how fast. The watch: one thread that looks again and again whether a call waits too long."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet
from zlib import crc32

import torch
import torch.distributed as dist

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_presets import CPU, CPU_TO_SPARE

from .shared_meeting import shared_place

if TYPE_CHECKING:
    from .calls import Calls


_MASK = (1 << 30) - 1
_ODD = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35  # spread what is added to a tag over all its bits
_HISTORY = 64  # calls that a report tells of

AGREEMENT = crc32(b"the agreement on what to run")
_CHECKS = crc32(b"the checks of the call")


class Lane:
    """The calls of one thread on a mesh, in order. Entered for the time of a call; calls inside of a call are part of
    it."""

    __slots__ = (
        "_base", "_depth", "_indices", "_kernels", "_seed", "alone", "calls", "counted", "doing", "ended", "given",
        "history", "kernel", "mark", "met", "name", "number", "opened", "owner", "said", "since", "waiting", "waits",
    )  # fmt: skip

    def __init__(self, calls: Calls, name: str) -> None:
        self.calls, self.name, self.owner = calls, name, threading.current_thread()
        self._seed = crc32(name.encode())
        self.number = self.waits = self._depth = self._base = self.opened = 0
        self._indices: dict[int, int] = {}
        self.waiting = self.said = self.counted = self.alone = self.met = self.ended = False
        self.history: deque[list[int]] = deque(maxlen=_HISTORY)
        self.doing = self.kernel = ""
        self.given: Mapping[str, str] = {}
        self._kernels: dict[str, int] = {}
        self.mark, self.since = (0, 0), 0.0

    def __enter__(self) -> Lane:
        if not self._depth:
            self.calls.check()
            self.said = self.counted = self.alone = self.met = False
            self.doing, self.kernel, self.given = "the checks of the call", "", {}
        self._depth += 1
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self._depth -= 1
        if error is not None and not self._depth:
            self.calls.failed(self, error)

    def named(self, kernel: str) -> str:
        """A name for a kernel: those of one name are told apart by the order in which they are first called, alike on
        all ranks."""
        self._kernels[kernel] = self._kernels.get(kernel, 0) + 1
        return f"{kernel} {self._kernels[kernel]}"

    def count(self) -> None:
        """The call takes its number, unless it has one."""
        if not self.counted:
            self.counted = True
            self.number += 1
            self._indices, self._base = {}, _CHECKS + self.number * _ODD[0]
            self.history.append([self.number])

    def run(self, digest: int, given: Mapping[str, str] | None = None) -> None:
        """What the call sends from here on is of that digest, and of what was `given`, by name, as all ranks have to be
        given it."""
        self.count()
        if given:
            self.given, digest = given, crc32(repr(given).encode(), digest)
        self.history[-1].append(digest)
        self._base = digest + self.number * _ODD[0]
        self.doing = "the run"

    def tag(self, group: int = 0) -> int:
        """That of the next exchange in a group, by its number; all its members ask for it at the same point of the
        call."""
        self.count()
        index = self._indices[group] = self._indices.get(group, 0) + 1
        tag = self._base + group * _ODD[2] + index * _ODD[1]
        return ((tag ^ tag >> 15) + self._seed & _MASK) | 1 << 30

    def message(self, number: int) -> int:
        """That of a message between two ranks, by its number in the call: no two numbers have the same."""
        self.count()
        tag = self._base + number * _ODD[1] & _MASK
        return ((tag ^ tag >> 15) + self._seed & _MASK) | 1 << 30

    def wait(self, works: list[Work]) -> None:
        """Wait until all of them are done."""
        self.waits += 1
        self.waiting = True
        for work in works:
            work.wait()
        self.waiting = False
        self.opened -= 1

    def is_current(self) -> bool:
        """Whether its thread may still call."""
        return not self.ended and self.owner.is_alive()

    def report(self) -> str:
        """What this thread does and did, for other ranks."""
        return json.dumps(list(self.history))


TIMEOUT_VARIABLE = "MESH_TENSOR_TIMEOUT"
_NEVER_SENT = (1 << 30) - 1  # a tag that no message has: tags of messages are larger
_AT_ONCE = timedelta(milliseconds=1)


class Work(Protocol):
    """A send or a receive under way."""

    def wait(self) -> Any:
        """Return when it is done; a RuntimeError says why it never will be."""


class Wire(Protocol):
    """The connections of one rank with the others of its mesh. `copies`: what is sent is copied first, and may be
    written, or forgotten, at once."""

    copies: bool

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

    copies = False

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


_TICK = 0.05  # seconds between two looks
_watched: WeakSet[Calls] = WeakSet()
_lock = threading.Lock()
_stop = threading.Event()
_thread: list[threading.Thread] = []


def watch(calls: Calls) -> None:
    """Look after these calls, too, for as long as they are there."""
    with _lock:
        _watched.add(calls)
        if not (_thread and _thread[0].is_alive()):
            _stop.clear()
            _thread[:] = [threading.Thread(target=_run, name="mesh_tensor watch", daemon=True)]
            _thread[0].start()


def end_watch() -> None:
    """Watch no longer; return when the thread has ended."""
    with _lock:
        _stop.set()
        ending = list(_thread)
        _thread.clear()
    for thread in ending:
        thread.join(5)


def _run() -> None:
    while not _stop.wait(_TICK):
        with _lock:
            watched = list(_watched)
            if not watched:
                _thread.clear()
                return
        for calls in watched:
            calls.watch(time.monotonic())
        del watched


def place_here() -> bytes:
    """This process's host, cores, and with whom it can share memory, for the other ranks."""
    return json.dumps([socket.gethostname(), _cores(), shared_place()]).encode()


def can_share(places: Sequence[bytes]) -> bool:
    """Whether the ranks, of which each says its `place_here`, can share memory. All of them answer alike."""
    shared = {json.loads(words)[2] for words in places}
    return len(shared) == 1 and "" not in shared


def machine_of(places: Sequence[bytes]) -> Machine:
    """The machine that CPU ranks are, of which each says its `place_here`."""
    return CPU_TO_SPARE if _to_spare([json.loads(words)[:2] for words in places]) else CPU


def _cores() -> list[int]:
    everything = range(os.cpu_count() or 1)
    return sorted(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else everything)


def _to_spare(places: list[tuple[str, list[int]]]) -> bool:
    """Whether every rank has two cores; `places` are the ranks' hosts, and the cores that each may use there."""
    on_host: dict[str, list[list[int]]] = {}
    for host, cores in places:
        on_host.setdefault(host, []).append(cores)
    return all(len(set().union(*ranks)) >= 2 * len(ranks) and min(map(len, ranks)) >= 2 for ranks in on_host.values())
