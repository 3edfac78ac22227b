"""Lane: the calls of one thread on a mesh, and the tags of what they send."""

from __future__ import annotations

import json
import threading
from collections import deque
from typing import TYPE_CHECKING
from zlib import crc32

from .wire import Work

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
        "_base", "_depth", "_indices", "_kernels", "_seed", "alone", "calls", "counted", "doing", "ended", "history",
        "kernel", "mark", "met", "name", "number", "opened", "owner", "said", "since", "waiting", "waits",
    )  # fmt: skip

    def __init__(self, calls: Calls, name: str) -> None:
        self.calls, self.name, self.owner = calls, name, threading.current_thread()
        self._seed = crc32(name.encode())
        self.number = self.waits = self._depth = self._base = self.opened = 0
        self._indices: dict[int, int] = {}
        self.waiting = self.said = self.counted = self.alone = self.met = self.ended = False
        self.history: deque[list[int]] = deque(maxlen=_HISTORY)
        self.doing = self.kernel = ""
        self._kernels: dict[str, int] = {}
        self.mark, self.since = (0, 0), 0.0

    def __enter__(self) -> Lane:
        if not self._depth:
            self.calls.check()
            self.said = self.counted = self.alone = self.met = False
            self.doing, self.kernel = "the checks of the call", ""
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

    def run(self, digest: int) -> None:
        """What the call sends from here on is of that digest."""
        self.count()
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
