"""Runs the same work for several devices at once, on the cores that this process may use."""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import threading
from collections.abc import Callable

import torch

Work = Callable[[int], None]


class _Job:
    """Indices are taken one by one by whoever is free; `done` hears of each that another thread finished."""

    def __init__(self, work: Work, count: int) -> None:
        self._work, self._count = work, count
        self._take = itertools.count().__next__
        self._inference = torch.is_inference_mode_enabled()
        self.done: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()

    def help(self) -> None:
        if self._inference:  # else nothing could be written to tensors that the caller has made
            with torch.inference_mode():
                self._help()
        else:
            self._help()

    def _help(self) -> None:
        while (index := self._take()) < self._count:
            self.done.put((index, self._attempt(index)))

    def run(self) -> dict[int, BaseException]:
        """Do what the helpers leave over, wait for them, and give back what went wrong where."""
        outcomes = []
        while (index := self._take()) < self._count:
            outcomes.append((index, self._attempt(index)))
        outcomes += [self.done.get() for _ in range(self._count - len(outcomes))]
        return {index: error for index, error in outcomes if error is not None}

    def _attempt(self, index: int) -> BaseException | None:
        try:
            self._work(index)
        except BaseException as error:  # handed to the caller's thread
            return error
        return None


class DeviceThreads:
    """The calling thread and one helper for every further core. Helpers start with the first job that needs them."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._helpers: list[threading.Thread] = []

    def run(self, work: Work, count: int) -> None:
        """`work(0)` ... `work(count - 1)`, at the same time as far as there are cores. All of them end before this
        does; then the error of the lowest index, if there is one, is raised."""
        helpers = min(self._threads, count) - 1
        if helpers <= 0:
            for index in range(count):
                work(index)
            return
        if len(self._helpers) < helpers:
            self._start(helpers)
        job = _Job(work, count)
        for _ in range(helpers):
            self._jobs.put(job)
        errors = job.run()
        if errors:
            raise errors[min(errors)]

    def close(self) -> None:
        """End the helpers, when they are done. A later job starts new ones."""
        with self._lock:
            helpers, self._helpers = self._helpers, []
            for _ in helpers:
                self._jobs.put(None)
            for helper in helpers:
                helper.join()

    def _start(self, helpers: int) -> None:
        with self._lock:
            torch_threads, ready = torch.get_num_threads(), threading.Semaphore(0)
            while len(self._helpers) < helpers:
                name = f"mesh_tensor-{len(self._helpers)}"
                helper = threading.Thread(target=_serve, args=(self._jobs, ready), name=name, daemon=True)
                helper.start()
                ready.acquire()
                self._helpers.append(helper)
            torch.set_num_threads(torch_threads)


def _serve(jobs: queue.SimpleQueue[_Job | None], ready: threading.Semaphore) -> None:
    torch.get_num_threads()  # else the first operation would undo what follows
    torch.set_num_threads(1)  # of this thread; and of threads to come, which the caller undoes
    torch.set_grad_enabled(False)
    ready.release()
    while (job := jobs.get()) is not None:
        job.help()
        del job  # its tensors may be in its hands alone


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_device_threads: DeviceThreads | None = None


def device_threads() -> DeviceThreads:
    """The threads that all virtual meshes of this process share."""
    global _device_threads
    if _device_threads is None:
        _device_threads = DeviceThreads(cores())
    return _device_threads


@atexit.register
def _close() -> None:
    """A helper that the end of Python finds in torch, if only to free a job's tensors, would abort the process."""
    if _device_threads is not None:
        _device_threads.close()


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _device_threads
    _device_threads = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
