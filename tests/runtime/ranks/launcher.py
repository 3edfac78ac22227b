"""Starts real ranks: processes with a gloo process group on this machine, each of which runs one function.

Processes come from a fork server that has imported everything, so a launch takes a fraction of a second."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch

LIMIT = 120  # seconds until all ranks of a launch have to have ended
TIMEOUT = 60  # of the process group, unless a body is about timeouts

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "tests.runtime.ranks.uncollected",
        "mesh_tensor.api.compile",
        "mesh_tensor.api.custom_op",
        "mesh_tensor.api.module",
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
        "torch._dynamo",  # DTensors and exports bring it: half a second, once for all ranks
        "torch.export._trace",
        "tests.runtime.ranks.kernel_bodies",
        "tests.runtime.ranks.exchange_bodies",
        "tests.runtime.ranks.module_bodies",  # the modules that it parses, once for all ranks
        "tests.runtime.ranks.training_bodies",
        "tests.runtime.ranks.warm",
    ]
)


def run(
    body: Callable[..., Any],
    count: int,
    *,
    timeout: float = TIMEOUT,
    group: bool = True,
    before: Callable[[], Any] | None = None,
) -> list[Any]:
    """What `body(rank)` returns on each of `count` ranks. Fails with the tracebacks of the ranks that raise, and if any
    rank does not end. A rank that leaves without a word counts as None. `before` makes what is the same on all ranks,
    in a process that they are forked from: it may not start threads, and `body(rank, made)` takes what it returns."""
    with tempfile.TemporaryDirectory() as folder:
        world = _World(count, str(Path(folder, "store")), timeout, group)
        pipes = [_context.Pipe() for _ in range(count)]
        senders = [sender for _, sender in pipes]
        calls = [(_rank, (body, rank, world, sender)) for rank, sender in enumerate(senders)]
        if before is not None:
            calls = [(_ranks, (body, before, world, senders))]
        processes = [_context.Process(target=target, args=args, daemon=True) for target, args in calls]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            outcomes = _collect([receiver for receiver, _ in pipes])
        finally:
            for receiver, _ in pipes:
                receiver.close()  # lets the ranks end
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill() if before is None else os.killpg(process.pid, signal.SIGKILL)
    failures = [f"--- rank {rank} ---\n{text}" for rank, (kind, text) in enumerate(outcomes) if kind == "failed"]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    return [value for _, value in outcomes]


def _collect(receivers: list[Connection]) -> list[tuple[str, Any]]:
    """What each rank said; after the first failure the others have a few seconds left."""
    outcomes: dict[int, tuple[str, Any]] = {}
    end = time.monotonic() + LIMIT
    while len(outcomes) < len(receivers):
        left = [receiver for rank, receiver in enumerate(receivers) if rank not in outcomes]
        ready = wait(left, max(0.0, end - time.monotonic()))
        if not ready:
            silent = [rank for rank in range(len(receivers)) if rank not in outcomes]
            return [outcomes.get(rank, ("failed", f"does not end ({silent})")) for rank in range(len(receivers))]
        for receiver in ready:
            rank = receivers.index(receiver)
            try:
                outcomes[rank] = receiver.recv()
            except EOFError:
                outcomes[rank] = ("ended", None)
            if outcomes[rank][0] == "failed":
                end = min(end, time.monotonic() + 10)
    return [outcomes[rank] for rank in range(len(receivers))]


@dataclass(frozen=True)
class _World:
    """How many ranks there are, the file where they meet, and the process group's timeout, if there is to be one."""

    count: int
    store: str
    timeout: float
    group: bool


def _ranks(body: Callable[..., Any], before: Callable[[], Any], world: _World, senders: list[Connection]) -> None:
    """Fork the ranks when what they share is made."""
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        made = before()
    except BaseException:
        for sender in senders:
            sender.send(("failed", traceback.format_exc()))
        return
    for rank, sender in enumerate(senders):
        if os.fork() == 0:
            for other in senders:
                if other is not sender:
                    other.close()
            _rank(partial(body, made=made), rank, world, sender)
    for sender in senders:
        sender.close()
    for _ in senders:
        os.wait()


def _rank(body: Callable[[int], Any], rank: int, world: _World, sender: Connection) -> None:
    gc.freeze()  # what the fork server has imported
    gc.enable()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist = torch.distributed
    try:
        if world.group:
            meet = {"init_method": f"file://{world.store}", "timeout": timedelta(seconds=TIMEOUT)}
            dist.init_process_group("gloo", rank=rank, world_size=world.count, **meet)
            dist.barrier()  # ranks may start seconds apart
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=world.timeout))
        outcome = ("done", body(rank))
    except BaseException:
        outcome = ("failed", traceback.format_exc())
    sender.send(outcome)
    with contextlib.suppress(EOFError, OSError):
        sender.recv()  # never sent: it ends when all have said how they ended, as others may still connect to this one
    os._exit(0)  # a group whose ranks failed can't be torn down in an orderly way
