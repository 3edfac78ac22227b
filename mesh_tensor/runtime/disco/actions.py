"""What a session asks of its workers. No error leaves a worker, for that would end its process: it is told to the
session through a store, and who waits for the worker is let go."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import tvm
import tvm_ffi

from mesh_tensor.base.mesh import Mesh

from . import collectives
from .peers import HOST, WorkerPeers, as_tvm

ACT = "mesh_tensor.api.disco.act"

_stores: dict[int, dist.Store] = {}  # by thread, as in collectives


def answer_key(number: int, worker: int) -> str:
    """Where a worker says how its action of that number ended."""
    return f"answer/{number}/{worker}"


def connect(mesh: str, port: int, timeout: float) -> None:
    """Become a worker of the session whose store listens on `port`; `mesh` is its axes and sizes as JSON."""
    store = dist.TCPStore(HOST, int(port), is_master=False, timeout=timedelta(seconds=timeout))
    _stores[threading.get_ident()] = store
    rank = int(tvm_ffi.get_global_func("runtime.disco.worker_rank")())
    collectives.become(WorkerPeers(Mesh(dict(json.loads(str(mesh)))), rank, store, timeout))


def meet() -> None:
    """Connect to the other workers, all of which are there by now."""
    collectives.here().everybody()


def load(path: str) -> Any:
    """The virtual machine of a library that `relax.build` made."""
    return tvm_ffi.get_global_func("runtime.disco.load_vm_module")(str(path), tvm.cpu())


def run(module: Any, function: str, *args: Any) -> Any:
    """What a function of the module returns on this worker."""
    return module[str(function)](*args)


def gather(value: Any, ports: str) -> Any:
    """The whole tensors of results on worker 0. `ports`, as JSON, has for each where it is in the value (which field of
    which field), its shape as its layout knows it, and the layout."""
    made = []
    for path, shape, layout in json.loads(str(ports)):
        tile = value
        for index in path:
            tile = tile[index]
        made.append(collectives.gather(tile, tuple(shape), layout))
    return [as_tvm(tensor) for tensor in made if tensor is not None]


def leave() -> None:
    """Be a worker no more."""
    collectives.retire()


_ACTIONS: dict[str, Callable[..., Any]] = {
    "connect": connect,
    "meet": meet,
    "load": load,
    "run": run,
    "gather": gather,
    "leave": leave,
}


def act(number: int, action: str, *args: Any) -> Any:
    """Do it, and say how it ended."""
    result, words = None, {}
    try:
        result = _ACTIONS[str(action)](*args)
    except BaseException as error:
        words = {"raised": f"{type(error).__name__}: {str(error).strip()}", "waited": _waited(error)}
        _let_go()
    thread = threading.get_ident()
    if thread in _stores:
        try:
            rank = int(tvm_ffi.get_global_func("runtime.disco.worker_rank")())
            _stores[thread].set(answer_key(int(number), rank), json.dumps(words))
        except RuntimeError:
            return None  # the session is gone
    return result


def _waited(error: BaseException) -> bool:
    """Whether it only says that another worker did not do its part."""
    return "gloo" in str(error).lower() or "Connection" in str(error)


def _let_go() -> None:
    try:
        collectives.here().leave()
    except Exception:
        return  # it had no connections yet, or they are gone


tvm_ffi.register_global_func(ACT, act, override=True)
