"""WorkerPeers: the workers of a session as the devices of a mesh, seen from one of them; and their processes: started
when a session asks, watched, and ended with it.

Their groups are gloo's, and known to nobody else: a process may be in torch.distributed's own group besides, and
several workers may be threads of one process.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import tvm_ffi

from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import Recent
from mesh_tensor.base.reductions import neutral
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.runtime.elementwise import combiner
from mesh_tensor.runtime.ranks.exchange import Exchange, TileTypes
from mesh_tensor.runtime.ranks.plan import ChunkedAllReduce, plan_exchange
from mesh_tensor.runtime.ranks.ranks import Group
from mesh_tensor.runtime.reshard import Delivery, Piece, reshard_of
from mesh_tensor.targets.dtypes import dtype_name
from mesh_tensor.targets.tile_memory import memory_of

HOST = "127.0.0.1"

Shape = tuple[int, ...]
_MOST_KEPT = 1024  # exchanges of a worker


class WorkerPeers:
    """Worker i is device i of `mesh`; this one is `rank`. `timeout`, in seconds, is that of every collective."""

    def __init__(self, mesh: Mesh, rank: int, store: dist.Store, timeout: float) -> None:
        self.mesh, self.rank = mesh, rank
        self._store, self._timeout = store, timeout
        self._groups: dict[tuple[int, ...], Group] = {}
        self._backends: list[dist.ProcessGroupGloo] = []
        self._made: Recent[tuple, Exchange | ChunkedAllReduce] = Recent(_MOST_KEPT)

    def group(self, axes: Iterable[str]) -> Group:
        """The workers that differ from this one only on `axes`. Made once; all members have to ask."""
        members = self.mesh.group_of(self.rank, self.mesh.in_order(axes))
        if members not in self._groups:
            self._groups[members] = Group(members, self._connect(members))
        return self._groups[members]

    def everybody(self) -> Group:
        """All workers."""
        return self.group(self.mesh.axis_names)

    def change(self, shape: Shape, dtype: torch.dtype, src: Sharding, dst: Sharding) -> Exchange | ChunkedAllReduce:
        """This worker's part in one collective, from tiles to tiles. Planned once, as all that follow."""
        key = (shape, dtype, src, dst)
        return self._made.made(key, lambda: plan_exchange(shape, dtype, src, dst, self))

    def scatter(self, shape: Shape, dtype: torch.dtype, dst: Sharding) -> Exchange | ChunkedAllReduce:
        """From a whole tensor that only worker 0 has to tiles."""

        def make() -> Exchange:
            deliveries = [_from_first(shape, dst, rank) for rank in range(self.mesh.num_devices)]
            types = TileTypes(shape, dst.tile_shape(shape), dtype)
            blank = neutral(dst.partial[0][1] if dst.partial else "sum", dtype_name(dtype))
            return Exchange(deliveries, self.rank, self.everybody(), types, combiner("max", dtype), blank)

        return self._made.made(("scatter", shape, dtype, dst), make)

    def gather(self, shape: Shape, dtype: torch.dtype, src: Sharding) -> Exchange | ChunkedAllReduce:
        """From tiles to a whole tensor, which only worker 0 gets."""

        def make() -> Exchange:
            reshard = reshard_of(shape, dtype, src, Sharding.of(self.mesh, len(shape), {}))
            pieces = next((delivery.pieces for delivery in reshard.deliveries if 0 in delivery.ranks), ())
            types = TileTypes(src.tile_shape(shape), shape, dtype)
            return Exchange([Delivery((0,), pieces, False)], self.rank, self.everybody(), types, reshard.combine, 0)

        return self._made.made(("gather", shape, dtype, src), make)

    def leave(self) -> None:
        """Close the connections: who waits for this worker fails at once instead of when its time is up."""
        for backend in self._backends:
            backend.abort()
        self._backends.clear()
        self._groups.clear()
        self._made = Recent(_MOST_KEPT)

    def _connect(self, members: tuple[int, ...]) -> dist.ProcessGroup:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = timedelta(seconds=self._timeout)
        store = dist.PrefixStore(f"group/{members}", self._store)
        at, count = members.index(self.rank), len(members)
        backend = dist.ProcessGroupGloo(store, at, count, options)
        self._backends.append(backend)
        group, gloo = dist.ProcessGroup(store, at, count), dist.ProcessGroup.BackendType.GLOO
        group._set_default_backend(gloo)
        group._register_backend(torch.device("cpu"), gloo, backend)
        return group


def _from_first(shape: Shape, dst: Sharding, rank: int) -> Delivery:
    """What worker `rank` gets of a tensor that worker 0 has."""
    at = dst.mesh.coordinate(rank)
    extent = dst.valid_extent(shape, rank)
    if any(at[axis] for axis, _ in dst.partial):
        return Delivery((rank,), (), True)
    if 0 in extent:
        return Delivery((rank,), (), False)
    return Delivery((rank,), (Piece(tuple(slice(0, e) for e in extent), ((0, dst.box(shape, rank)),)),), False)


def as_torch(tensor: Any) -> torch.Tensor:
    """A torch tensor on the memory of a TVM tensor on the CPU."""
    return torch.from_dlpack(tensor)


def as_tvm(tensor: torch.Tensor) -> Any:
    """A TVM tensor on the memory of a torch tensor, which stays alive with it."""
    tensor = tensor.detach().contiguous()
    if not tensor.numel():  # TVM has strides of its own for these, and takes others for gaps
        strides = [math.prod(tensor.shape[dim + 1 :]) for dim in range(tensor.ndim)]
        tensor = tensor.as_strided(tensor.shape, strides)
    return tvm_ffi.from_dlpack(tensor)


def apart(results: tuple[torch.Tensor, ...], operands: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The results, none in the memory of an operand: the virtual machine uses that again as soon as nobody reads it."""
    taken = set(map(memory_of, operands))
    return tuple(r.clone() if memory_of(r) in taken else r for r in results)


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
