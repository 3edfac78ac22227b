"""The watch: one thread of a process, which looks again and again whether a call of its ranks waits in vain."""

from __future__ import annotations

import threading
import time
from weakref import WeakSet

from .calls import Calls

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
