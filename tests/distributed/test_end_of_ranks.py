"""Ranks that end in an orderly way: what was made ready for them does not abort the process."""

import torch
import torch.distributed as dist
from torch import multiprocessing

from . import fault_bodies as bodies


def test_kernels_that_outlive_the_process_group(tmp_path):
    for turn in range(3):  # it was a matter of luck
        multiprocessing.start_processes(call_and_end, (f"file://{tmp_path}/{turn}",), 2)  # raises if a rank aborts


def call_and_end(rank, store):
    """Many calls, the end of torch.distributed, and then that of Python, with the kernel still there."""
    global kern
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    kern = bodies.k_split()
    for _ in range(100):
        kern.local(torch.ones(4, 4), torch.ones(4, 4))
    dist.barrier()
    dist.destroy_process_group()
