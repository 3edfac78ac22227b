"""Calls that go on from the state that the one before left: one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from mesh_tensor.base.errors import refuse


class Turns:
    """Who goes on from a state: a thread, whose call may make others of the same state. `as_call`: within what it gives
    for a call's tensors, a refusal counts as a call, of which other ranks hear."""

    def __init__(self, as_call: Callable[[Iterable[Any]], AbstractContextManager[None]]) -> None:
        self._as_call, self._lock, self._within = as_call, threading.RLock(), ""

    @contextmanager
    def one(self, what: str, given: Iterable[Any] = (), *, of_several: bool = False) -> Iterator[None]:
        """Within, no other thread has a turn, nor this one another: code of a caller's that runs on the way, or as
        Python collects garbage, might take it. `of_several`: what is made of calls that take turns themselves. It does
        not wait for one: on ranks, threads of several orders would wait for each other. Refused where another thread
        has one, or this thread's is closed."""
        with self._as_call(given):
            self._take(what)
        try:
            with nullcontext() if of_several else self.closed(what):
                yield
        finally:
            self._lock.release()

    def _take(self, what: str) -> None:
        if not self._lock.acquire(blocking=False):
            refuse(
                f"{what}, while another thread's is under way",
                why="each goes on from the state that the one before left: one of them would be lost",
                fix="make these calls from one thread, or give every thread a module of its own",
            )
        if self._within:
            self._lock.release()
            refuse(
                f"{what}, from within {self._within}",
                why="that goes on from the state that this call would leave",
                fix="use a module of its own there: distribute it once more",
            )

    @contextmanager
    def closed(self, within: str) -> Iterator[None]:
        """Within, this thread, which has a turn, gets no other one: it runs what a caller gave."""
        before, self._within = self._within, within
        try:
            yield
        finally:
            self._within = before
