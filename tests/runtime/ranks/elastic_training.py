"""Work that survives the loss of a rank: torchrun starts it again, and it goes on from what it saved.

A rank kills itself the first time."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mesh_tensor as mt
from kernels.matmul import matmul

STEPS, LOST_AT = 4, 2


def start() -> tuple[torch.Tensor, torch.Tensor]:
    """The state to begin with, and what every step multiplies it with."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator) / 4


def restarted(checkpoint: Path) -> str:
    """Which generation of ranks this is, and the steps that it made."""
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    layouts = {"A": {"x": 1}, "B": {"x": 0}, "C": {}}
    kernel = mt.compile(mt.annotate(matmul(8, 8, 8, 16, 16, 16), {"x": size}, layouts), target="interpret")
    first, (state, weight) = 0, start()
    if checkpoint.exists():
        first, state = torch.load(checkpoint)
    for step in range(first, STEPS):
        if step == LOST_AT and rank == size - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        state = kernel(
            distribute_tensor(state, mesh, [Shard(1)]), distribute_tensor(weight, mesh, [Shard(0)])
        ).full_tensor()
        if rank == 0:
            torch.save((step + 1, state), checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").rename(checkpoint)
    torch.distributed.destroy_process_group()
    return f"generation {os.environ['TORCHELASTIC_RESTART_COUNT']}: from step {first} to {STEPS}"
