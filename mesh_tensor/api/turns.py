"""Calls that go on from the state that the one before left: one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mesh_tensor.base.errors import refuse


class Turns:
    """Who goes on from a state: a thread, whose call may make others of the same state."""

    def __init__(self) -> None:
        self._lock, self._within = threading.RLock(), ""

    @contextmanager
    def one(self, what: str) -> Iterator[None]:
        """Within, no other thread has a turn. It does not wait for one: on ranks, threads of several orders would wait
        for each other.

        Raises:
            MeshTensorError: another thread has one, or this thread's is `closed`.
        """
        if not self._lock.acquire(blocking=False):
            refuse(
                f"{what}, while another thread's is under way",
                why="each goes on from the state that the one before left: one of them would be lost",
                fix="make these calls from one thread, or give every thread a module of its own",
            )
        try:
            if self._within:
                refuse(
                    f"{what}, from within {self._within}",
                    why="that goes on from the state that this call would leave",
                    fix="use a module of its own there: distribute it once more",
                )
            yield
        finally:
            self._lock.release()

    @contextmanager
    def closed(self, within: str) -> Iterator[None]:
        """Within, this thread, which has a turn, gets no other one: it runs what a caller gave."""
        before, self._within = self._within, within
        try:
            yield
        finally:
            self._within = before
