"""Worker processes of Disco sessions: started when a session asks, watched, and ended with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import tvm_ffi

POOL = "mesh_tensor.api.disco.process_pool"  # what Disco asks for processes
_WORKER = "mesh_tensor.runtime.disco.worker"
_FOLDER = Path(__file__).resolve().parents[3]  # where mesh_tensor is imported from
_LAST_WORDS = 2000  # characters

_pools: dict[str, WorkerProcesses] = {}


class WorkerProcesses:
    """Workers 1, 2, ... of one session. `name` is what the session is to call its entry point."""

    def __init__(self) -> None:
        self.name = f"{_WORKER} {id(self)}"
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._words: dict[int, IO[bytes]] = {}
        self._ends: list[int] = []
        _pools[self.name] = self

    def start(self, worker: int, workers: int, groups: int) -> tuple[int, int]:
        """Start a worker: the ends of the pipes that Disco reads from and writes to."""
        from_worker, worker_writes = os.pipe()
        worker_reads, to_worker = os.pipe()
        words = self._words[worker] = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the process)
        arguments = [worker, workers, groups, worker_reads, worker_writes]
        self._processes[worker] = subprocess.Popen(
            [sys.executable, "-m", _WORKER, *map(str, arguments)],
            pass_fds=(worker_reads, worker_writes),
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            env=_environment(workers),
        )
        os.close(worker_writes)
        # Disco ends this process when it writes to a pipe that nobody can read, so one end stays here.
        self._ends.append(worker_reads)
        return from_worker, to_worker

    def ids(self) -> dict[int, int]:
        """The process of every worker."""
        return {worker: process.pid for worker, process in self._processes.items()}

    def ended(self) -> dict[int, str]:
        """The workers that are no more, with how they ended."""
        return {
            worker: f"has ended ({_how(process.returncode)}){self._last_words(worker)}"
            for worker, process in self._processes.items()
            if process.poll() is not None
        }

    def kill(self) -> None:
        """End all workers at once."""
        for process in self._processes.values():
            process.kill()

    def join(self, timeout: float) -> None:
        """Wait until all workers have ended by themselves; those that do not within `timeout` seconds are killed."""
        for process in self._processes.values():
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for end in self._ends:
            os.close(end)
        for words in self._words.values():
            words.close()
        self._ends.clear()
        _pools.pop(self.name, None)

    def _last_words(self, worker: int) -> str:
        words = self._words[worker]
        words.seek(0)
        text = words.read().decode(errors="replace").strip()
        return f"; it said last: {text[-_LAST_WORDS:]}" if text else ""


def _environment(workers: int) -> dict[str, str]:
    """Workers share the cores, and find what this process finds."""
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    path = os.pathsep.join(filter(None, [str(_FOLDER), os.environ.get("PYTHONPATH")]))
    return {"OMP_NUM_THREADS": threads, "TVM_NUM_THREADS": threads, **os.environ, "PYTHONPATH": path}


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _process_pool(workers: int, groups: int, name: str) -> Callable[[int], Any]:
    processes = _pools[str(name)]

    def pipes_of(worker: int) -> Any:
        """The pipes of a new worker; 0 means that the session is gone."""
        return tvm_ffi.Shape(processes.start(worker, workers, groups)) if worker else None

    return pipes_of


tvm_ffi.register_global_func(POOL, _process_pool, override=True)
