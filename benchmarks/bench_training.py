"""A step of training of a GPT-2-like model (forward, backward, AdamW) beside eager torch: on one device, and on 2 gloo
ranks beside DistributedDataParallel.

python -m benchmarks.bench_training
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.nn import functional as F

import mesh_tensor as mt
from kernels.models import gpt2
from mesh_tensor import strategies

from ._ranks import on_ranks
from ._timing import Row, Run, header, interleaved, row, verdicts

CONFIG = gpt2.Config(vocabulary=1024, width=256, heads=8, layers=2, batch=4, positions=128)
ROUNDS = 7


def _loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1))


def _case() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor, mt.TrainingStep]:
    torch.manual_seed(0)
    model, (tokens,) = gpt2.build(CONFIG), gpt2.example_inputs(CONFIG)
    target = torch.randint(CONFIG.vocabulary, tokens.shape)
    return model, tokens, target, mt.training_step(model, _loss, (tokens, target), check=False)


def _eager(model: torch.nn.Module, tokens: torch.Tensor, target: torch.Tensor) -> Run:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        _loss(model(tokens), target).backward()
        optimizer.step()

    return step


def one_device() -> dict[str, list[float]]:
    """Seconds of a step per round."""
    model, tokens, target, step = _case()
    run = mt.distribute_module(step, {"data": 1})
    runs = {"step": lambda: run(tokens, target), "eager": _eager(copy.deepcopy(model).train(), tokens, target)}
    return interleaved(runs, rounds=ROUNDS)


def data_parallel() -> dict[str, list[float]]:
    """Seconds of a step per round, on this rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    model, tokens, target, step = _case()
    run = mt.distribute_module(
        step, init_device_mesh("cpu", (2,), mesh_dim_names=("data",)), strategies.data_parallel(step)
    )
    half = slice(dist.get_rank() * CONFIG.batch // 2, (dist.get_rank() + 1) * CONFIG.batch // 2)
    theirs = _eager(DistributedDataParallel(copy.deepcopy(model).train()), tokens[half], target[half])

    def together(call: Run) -> Run:
        def both() -> None:
            dist.barrier()
            call()

        return both

    runs = {"step": lambda: run(tokens, target), "DistributedDataParallel": theirs}
    return interleaved({name: together(call) for name, call in runs.items()}, rounds=ROUNDS)


def rows() -> list[Row]:
    """One device, and two."""
    what = f"GPT-2, {CONFIG.layers} layers of width {CONFIG.width}, {CONFIG.batch} x {CONFIG.positions} tokens, AdamW"
    return [
        row(f"{what}: one device", one_device(), "step", "eager", must=1.05),
        row(f"{what}: 2 ranks", on_ranks(data_parallel), "step", "DistributedDataParallel", must=0.95),
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(header("Steps of training"))
    print(verdicts(rows()))
