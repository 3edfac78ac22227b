"""Searches: how fast they are, and whether what they choose is really fastest here.

- ways to train a GPT of 12 layers on 8 devices: how many are looked at per second, and in how long
- every way to train an MLP and a small GPT on 4 virtual devices in 2 microbatches: simulated, on the machine as it was
  measured, beside the CPU time that it takes, which is that of all devices; and how well their ranks agree
- auto-sharding of GPTs of different depths

python -m benchmarks.bench_search
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from kernels.models import gpt2

from ._timing import header, table
from .bench_simulator import cpu_seconds, spearman


class Loss(nn.Module):
    """A model's cross entropy, or its squared distance from targets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """One number."""
        y = self.model(x)
        if wanted.dtype.is_floating_point:
            return ((y - wanted) ** 2).mean()
        return F.cross_entropy(y.reshape(-1, y.shape[-1]), wanted.reshape(-1))


class Perceptron(nn.Module):
    """Blocks of two linear layers, added to what they take."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(blocks))
        self.first = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, width) -> the same."""
        x = self.first(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)))
        return x


def imported(model: nn.Module, *example: torch.Tensor) -> Any:
    """The loss of a model, for any number of rows."""
    rows = torch.export.Dim("rows", min=1, max=4096)
    program = torch.export.export(Loss(model), example, dynamic_shapes={"x": {0: rows}, "wanted": {0: rows}})
    return mt.from_torch(program, check=False)


def gpt(layers: int, width: int, rows: int, positions: int) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A GPT's loss, and a batch."""
    model = gpt2.build(gpt2.Config(512, width, 4, layers, rows, positions))
    batch = torch.randint(512, (rows, positions)), torch.randint(512, (rows, positions))
    return imported(model, *batch), batch


def speed() -> None:
    """Ways to train per second."""
    module, _ = gpt(12, 768, 4, 64)
    search = mt.search  # imports what it needs
    start, work = time.perf_counter(), time.process_time()
    found = search(module, 8, "h100x8", batch=64)
    took, work = time.perf_counter() - start, time.process_time() - work
    print(f"GPT of 12 layers, 8 devices: {found.considered} ways in {took:.1f} s, {work:.1f} s of CPU time: ", end="")
    print(f"{found.considered / work:.0f} per second of CPU time; {found.pieces.planned} sizes of pieces planned\n")
    print(found, end="\n\n")


def measured(name: str, module: Any, batch: Sequence[torch.Tensor], machine: mt.Machine) -> None:
    """Every way beside what it takes here."""
    few = {"microbatches": [2], "schedules": ["1f1b"], "zero": [0, 3], "recompute": [False], "sequence": [False]}
    found = mt.search(module, 4, machine, batch=batch[0].shape[0], finalists=100, states=0, **few)
    runs = [found.pipeline(plan, target="c") for plan in found.plans]
    real = [math.inf] * len(runs)
    for _ in range(4):  # others disturb: each is run in every round
        for number, run in enumerate(runs):
            real[number] = min(real[number], cpu_seconds(lambda run=run: run(*batch), 0.25))
    simulated = [mt.simulate(run, machine).time for run in runs]
    rows = [
        [str(plan.choice), f"{took * 1e3:.2f}", f"{made * 1e3:.2f}", f"{made / took:.2f}"]
        for plan, took, made in zip(found.plans, real, simulated, strict=True)
    ]
    print(table([name, "measured, ms of CPU", "simulated, ms", "ratio"], rows))
    chosen = real[min(range(len(simulated)), key=simulated.__getitem__)]
    print(f"{len(rows)} ways: Spearman {spearman(real, simulated):.3f}, chosen / fastest {chosen / min(real):.2f}\n")


def sharding() -> None:
    """Auto-sharding by depth."""
    for layers in (2, 12, 48):
        model = gpt2.build(gpt2.Config(512, 64, 4, layers, 8, 16))
        module = mt.from_torch(torch.export.export(model, (torch.zeros(8, 16, dtype=torch.int64),)), check=False)
        work = time.process_time()
        found = mt.search(module, 8, "h100x8", meshes=[{"x": 2, "y": 2, "z": 2}], width=2, seconds=600)
        print(f"auto-sharding, {layers} layers on 2 x 2 x 2: {time.process_time() - work:.1f} s of CPU time, ", end="")
        print(f"{found.planned} strategies")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("speed", "measured", "sharding"))
    only = parser.parse_args().only
    print(header("Searches"))
    torch.set_num_threads(1)
    if only in (None, "speed"):
        speed()
    if only in (None, "measured"):
        here = replace(mt.Machine.measure(), processors=1)
        x = torch.randn(256, 128)
        measured("MLP", imported(Perceptron(128, 4), x, torch.randn(256, 128)), (x, torch.randn(256, 128)), here)
        measured("GPT", *gpt(4, 128, 16, 32), here)
    if only in (None, "sharding"):
        sharding()
