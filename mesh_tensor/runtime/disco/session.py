"""DiscoSession: TVM's Disco workers as the devices of a mesh."""

from __future__ import annotations

import atexit
import ctypes
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import tvm_ffi
from tvm.runtime.disco import _ffi_api as disco

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh

from . import actions
from .peers import HOST, POOL, WorkerProcesses, as_torch, as_tvm

_GRACE = 3.0  # seconds for workers to find out that another one failed
_PAUSE = 2e-4  # seconds by which looks for answers get further apart, ...
_LONGEST_PAUSE = 1e-2  # ... and at most are
_START = 60.0  # seconds that starting takes at most beside the timeout


class Held:
    """Something that every worker has. It is nothing any more when its session is closed."""

    __slots__ = ("__weakref__", "_let_go", "ref")

    def __init__(self, ref: Any, let_go: deque[Any]) -> None:
        self.ref, self._let_go = ref, let_go

    def __del__(self) -> None:
        self._let_go.append(self.ref)  # workers are told by the thread whose turn it is


class DiscoSession:
    """A Disco session with one worker per device of `mesh`: processes, or threads of this one. Worker 0 is a thread of
    this process in any case. Use it as a context manager, or close it.

    `timeout`, in seconds, bounds every collective and every call. After a worker failed, the session can only be
    closed. Several threads may use it: they take turns.

    Raises:
        MeshTensorError: workers do not start.
    """

    def __init__(self, mesh: Mesh | Mapping[str, int], *, threads: bool = False, timeout: float = 60.0) -> None:
        self.mesh = Mesh(mesh)
        self._timeout, self._number, self._broken = timeout, 0, ""
        self._threads, self._stuck = threads, False
        self._held: weakref.WeakSet[Held] = weakref.WeakSet()
        self._let_go: deque[Any] = deque()
        self._lock = threading.RLock()
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
        self._processes = WorkerProcesses()
        count = self.mesh.num_devices
        if threads:
            self._session = disco.SessionThreaded(count, 1)
        else:
            self._session = disco.SessionProcess(count, 1, POOL, self._processes.name)
        _open.add(self)
        self._functions: dict[str, Any] = {}
        try:
            self.act("connect", json.dumps(list(self.mesh.shape.items())), self._store.port, float(timeout))
            self.act("meet")
        except BaseException:
            self.close()
            raise

    def act(self, action: str, *args: Any) -> Held:
        """Let every worker do an action (of `actions`) and wait for it; its result stays on the workers.

        Raises:
            MeshTensorError: a worker failed, ended or takes too long; the session is then broken.
        """
        with self.turn():
            self._check_usable()
            self._number += 1
            refs = [arg.ref if isinstance(arg, Held) else arg for arg in args]
            made = self._hold(self._call(actions.ACT, self._number, action, *refs))
            self._await(self._number, action)
            return made

    def put(self, tensor: torch.Tensor) -> Held:
        """A copy of the tensor on worker 0; nothing on the others."""
        with self.turn():
            self._check_usable()
            host = as_tvm(tensor.cpu().resolve_conj().resolve_neg())  # memory is sent as it is
            place = self._call("runtime.disco.empty", tvm_ffi.Shape(host.shape), host.dtype, None, True, False)
            disco.SessionCopyToWorker0(self._session, host, place)
            return self._hold(place)

    def gather(self, value: Held, ports: Sequence[tuple[Sequence[int], Sequence[int], str]]) -> list[torch.Tensor]:
        """Whole tensors of what the workers hold; see `actions.gather`."""
        with self.turn():
            found = disco.DRefDebugGetFromRemote(self.act("gather", value, json.dumps(ports)).ref, 0)
            return [as_torch(tensor) for tensor in found]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The workers are the calling thread's meanwhile: Disco sends what several threads ask for as it comes, byte by
        byte, and an answer to whoever looks first."""
        with self._lock:
            self._let_go.clear()
            try:
                yield
            finally:
                self._let_go.clear()

    @property
    def process_ids(self) -> dict[int, int]:
        """The processes of the workers that have their own."""
        return self._processes.ids()

    @property
    def closed(self) -> bool:
        """Whether there are no workers any more."""
        return self._session is None

    def close(self) -> None:
        """End the workers. What they hold is gone."""
        with self._lock:
            if self._session is None:
                return
            if not self._broken and self._number:
                try:
                    self.act("leave")
                except Exception:
                    self._processes.kill()
            _open.discard(self)
            self._drop()
            self._processes.join(_GRACE)

    def __enter__(self) -> DiscoSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "broken" if self._broken else "open"
        return f"DiscoSession({self.mesh}, {state})"

    def _hold(self, ref: Any) -> Held:
        held = Held(ref, self._let_go)
        self._held.add(held)
        return held

    def _call(self, name: str, *args: Any) -> Any:
        if name not in self._functions:
            self._functions[name] = disco.SessionGetGlobalFunc(self._session, name)
        return disco.SessionCallPacked(self._session, 0, 0, self._functions[name], *args)

    def _check_usable(self) -> None:
        if self._session is None or self._broken:
            refuse(f"the {self!r} can't be used", why=self._broken or "it was closed", fix="make a new DiscoSession")

    def _await(self, number: int, action: str) -> None:
        """Wait for all workers' answers; once one failed, only a little while for the others'."""
        missing = {worker: actions.answer_key(number, worker) for worker in range(self.mesh.num_devices)}
        end = time.monotonic() + self._timeout + (_START if action == "connect" else 0)
        raised: dict[int, dict[str, Any]] = {}
        ended: dict[int, str] = {}
        pauses = 0
        while missing and time.monotonic() < end:
            found = [worker for worker, key in missing.items() if self._store.check([key])]
            for worker in found:
                answer = json.loads(self._store.get(missing.pop(worker)))
                raised |= {worker: answer} if answer else {}
            if not found:
                pauses += 1
                time.sleep(min(_LONGEST_PAUSE, pauses * _PAUSE))
                ended = {worker: how for worker, how in self._processes.ended().items() if worker in missing}
                if missing.keys() <= ended.keys():
                    break
            if raised or ended:
                end = min(end, time.monotonic() + _GRACE)
        if raised or missing:
            self._fail(action, raised, ended, [worker for worker in missing if worker not in ended])

    def _fail(
        self, action: str, raised: Mapping[int, Mapping[str, Any]], ended: Mapping[int, str], silent: Sequence[int]
    ) -> None:
        """Nothing can be run any more: say who is to blame."""
        own = {worker: words for worker, words in raised.items() if not words["waited"]}
        problems = [f"worker {worker} {words}" for worker, words in ended.items()]
        problems += [f"worker {worker} raised {_short(words['raised'])}" for worker, words in own.items()]
        if not problems:
            problems = [f"worker {worker} did not answer within {self._timeout:g} s" for worker in silent]
        if not problems:
            problems = [f"worker {worker} raised {_short(words['raised'])}" for worker, words in raised.items()]
        self._broken = problems[0]
        self._stuck = bool(silent) if self._threads else 0 in silent
        self._processes.kill()
        refuse(
            problems,
            where=f"action {action!r} of a {self!r}",
            fix="see what that worker says, and make a new DiscoSession",
        )

    def _drop(self) -> None:
        """Let go of Disco's session. Its destructor waits for the workers that are threads here, and has Python's lock
        meanwhile: what they still have to free, which may take that lock, has to be gone before."""
        for held in list(self._held):
            held.ref = None
        self._let_go.clear()
        self._functions.clear()
        if self._stuck:  # the destructor would wait for ever
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._session))
        else:
            for worker in range(self.mesh.num_devices if self._threads else 1):
                disco.SessionSyncWorker(self._session, worker)
        self._session = None


def _short(words: str) -> str:
    """An error without the trace that TVM puts into it."""
    lines = [line for line in words.splitlines() if line.strip()]
    return " ".join(line.strip() for line in lines[:6])


_open: weakref.WeakSet[DiscoSession] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for session in list(_open):
        session.close()
