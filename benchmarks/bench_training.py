"""A step of training of a GPT-2-like model (forward, backward, AdamW) beside torch's: on one device, and on 2 gloo
ranks beside DistributedDataParallel, parallelize_module and fully_shard.

python -m benchmarks.bench_training [cpu]

`cpu`: not seconds, but CPU time of a rank with all of its threads, which other work on the machine changes less. Peaks
are of the process, each in ranks of its own, above what it has once a step was taken and nothing is left of it but the
parameters: what is kept for them, gradients, activations, and what is sent.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from kernels.models import gpt2
from mesh_tensor import strategies
from mesh_tensor.api.training_run import TrainingRun
from mesh_tensor.targets.tile_memory import _left

from ._ranks import on_ranks
from ._timing import Row, Run, header, interleaved, row, seconds, table, verdicts

CONFIG = gpt2.Config(vocabulary=1024, width=256, heads=8, layers=2, batch=4, positions=128)
ROUNDS = 7
Clock = Callable[[Run, int], float]
OURS = "step"


def cpu_time(run: Run, calls: int = 1) -> float:
    """That of this process per call, of all its threads."""
    start = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - start) / calls


def _loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1))


def _case(zero: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor, mt.TrainingStep]:
    torch.manual_seed(0)
    model, (tokens,) = gpt2.build(CONFIG), gpt2.example_inputs(CONFIG)
    target = torch.randint(CONFIG.vocabulary, tokens.shape)
    return model, tokens, target, mt.training_step(model, _loss, (tokens, target), check=False, zero=zero)


# Forgets what is left of steps but the parameters; what it can't forget it gives as a number of MB, below 0.
Forget = Callable[[], float]


def _eager(model: nn.Module, tokens: torch.Tensor, target: torch.Tensor) -> tuple[Run, Forget]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        _loss(model(tokens), target).backward()
        optimizer.step()

    def forget() -> float:
        optimizer.zero_grad()
        optimizer.state.clear()
        return 0.0

    return step, forget


def _forgetting(run: TrainingRun) -> Forget:
    """What the optimizer keeps stays, and is not counted. Its size is asked for now: the step after `state_dict`, whose
    memory the caller may have, overwrites nothing, and takes memory that no other does."""
    kept = [tensor for name, tensor in run.state_dict().items() if name.startswith("opt.") and tensor.ndim]
    nbytes = sum(tensor.to_local().nbytes for tensor in kept)

    def forget() -> float:
        _left.clear()
        return -nbytes / 2**20

    return forget


def one_device(clock: Clock) -> dict[str, list[float]]:
    """Seconds of a step per round."""
    model, tokens, target, step = _case()
    run = mt.distribute_module(step, {"data": 1})
    runs = {OURS: lambda: run(tokens, target), "eager": _eager(copy.deepcopy(model).train(), tokens, target)[0]}
    return interleaved(runs, rounds=ROUNDS, clock=clock)


def _replicated(model: nn.Module) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def _parallelized(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ranks = init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    by_columns, by_rows = ("attn.q", "attn.k", "attn.v", "fc"), ("attn.proj", "proj")
    for block in model.blocks:
        block.attn.heads //= 2  # of this rank
        plan = {name: ColwiseParallel() for name in by_columns} | {name: RowwiseParallel() for name in by_rows}
        parallelize_module(block, ranks, plan)
    return model


def _sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    for block in model.blocks:
        fully_shard(block, mesh=ranks)
    return fully_shard(model, mesh=ranks)


# The peer -> how it lays a model out, the axis, what ZeRO splits, what is asked of the ratio.
PEERS: dict[str, tuple[Callable[[nn.Module], nn.Module], str, int, float]] = {
    "DistributedDataParallel": (_replicated, "data", 0, 0.95),
    "parallelize_module": (_parallelized, "model", 0, 0.95),
    "fully_shard": (_sharded, "data", 3, 1.0),
}


def _runs(peer: str, which: tuple[str, ...]) -> dict[str, tuple[Run, Forget]]:
    """A step of ours, and the peer's, on this rank."""
    from torch.distributed.device_mesh import init_device_mesh

    lay_out, axis, zero, _ = PEERS[peer]
    model, tokens, target, step = _case(zero)
    runs: dict[str, tuple[Run, Forget]] = {}
    if peer in which:
        size = CONFIG.batch // (2 if axis == "data" else 1)
        part = slice(dist.get_rank() * size if axis == "data" else 0, None)
        laid_out = lay_out(copy.deepcopy(model).train())
        runs[peer] = _eager(laid_out, tokens[part][:size], target[part][:size])
    if OURS in which:
        layout = strategies.data_parallel(step) if axis == "data" else gpt2.tensor_parallel(CONFIG, axis)
        run = mt.distribute_module(step, init_device_mesh("cpu", (2,), mesh_dim_names=(axis,)), layout)
        runs[OURS] = lambda: run(tokens, target), _forgetting(run)
    return runs


def two_ranks(peer: str, clock: Clock) -> dict[str, list[float]]:
    """Seconds of a step per round, on this rank."""

    def timed(run: Run, calls: int) -> float:
        dist.barrier()
        return clock(run, calls)

    runs = {name: run for name, (run, _) in _runs(peer, (OURS, peer)).items()}
    return interleaved(runs, rounds=ROUNDS, clock=timed)


def peak(peer: str, who: str) -> float:
    """MB that this rank's process has at most in a step beyond its parameters."""
    ((run, forget),) = _runs(peer, (who,)).values()
    run()
    left = forget()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _memory("VmRSS") + left
    for _ in range(3):
        run()
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    run()
    return _memory("VmHWM") - before


def _memory(what: str) -> float:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def rows(clock: Clock = seconds) -> list[Row]:
    """One device, and two."""
    what = f"GPT-2, {CONFIG.layers} layers of width {CONFIG.width}, {CONFIG.batch} x {CONFIG.positions} tokens, AdamW"
    two = [
        row(f"{what}: 2 ranks, {axis}", on_ranks(two_ranks, peer, clock), OURS, peer, must=must)
        for peer, (_, axis, _, must) in PEERS.items()
    ]
    return [row(f"{what}: one device", one_device(clock), OURS, "eager", must=1.05), *two]


def peaks() -> str:
    """A table of peaks on 2 ranks."""
    lines = [[peer, *(f"{on_ranks(peak, peer, who):.0f}" for who in (OURS, peer))] for peer in PEERS]
    return table(["peer", "a step's peak, MB", "the peer's, MB"], lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(header("Steps of training"))
    print(verdicts(rows(cpu_time if sys.argv[1:] == ["cpu"] else seconds)))
    print(peaks())
