"""Runs a benchmark on real ranks: processes with a gloo process group on this machine, one thread and one core each."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def on_ranks(body: Callable[..., Any], *arguments: Any, count: int = 2, timeout: float = 600) -> Any:
    """What `body(*arguments)` returns on rank 0. `body` is a module's function; arguments and result can be pickled.
    A rank that raises ends the others and shows its traceback; after `timeout` seconds all end with a TimeoutError."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(_rank, (count, folder, timeout, body, arguments), count, join=False)
        end = time.monotonic() + timeout
        try:
            while not ranks.join(timeout=1):
                if time.monotonic() > end:
                    raise TimeoutError(f"{body.__qualname__} on {count} ranks has not ended after {timeout} s")
        finally:
            for process in ranks.processes:
                process.kill()
        return pickle.loads(Path(folder, "result").read_bytes())


def alone(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` by rank 0 alone, on all cores, while the other ranks, where it gives None, wait for it."""

    def run_alone(*arguments: Any, **options: Any) -> Any:
        result = None
        if dist.get_rank() == 0:
            _use(_CORES)
            try:
                result = run(*arguments, **options)
            finally:
                _use(_core_of(0))
        dist.barrier()
        return result

    return run_alone


def _rank(rank: int, count: int, folder: str, timeout: float, body: Callable[..., Any], arguments: tuple) -> None:
    _use(_core_of(rank))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=timedelta(seconds=timeout))
    result = body(*arguments)
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _use(cores: list[int]) -> None:
    """The calling thread and those that it starts run on these cores, where the system can do that."""
    if cores:
        os.sched_setaffinity(0, cores)


def _core_of(rank: int) -> list[int]:
    """Ranks share cores where there are fewer of them."""
    return [_CORES[rank % len(_CORES)]] if _CORES else []
