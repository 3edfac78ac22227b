"""What goes wrong on ranks: each body returns the message that its rank raised, or leaves without a word."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mesh_tensor as mt
from mesh_tensor.runtime.ranks import faults
from mesh_tensor.runtime.ranks.ranks import check_backend
from mesh_tensor.targets.kernels import Target
from tests.refusals import refusal
from tests.runtime.programs import add_one_split, kernel_of, matmul_k_split, matmul_kernel

from .support import all_come, say, wait_for


def no_process_group(rank):
    """A call on ranks where torch.distributed was never started."""
    kern = k_split()
    return refusal(lambda: kern.local(torch.ones(4, 4), torch.ones(4, 4)))


def mesh_larger_than_the_world(rank):
    """More devices than ranks; then the group still works."""
    kern = k_split(4)
    text = refusal(lambda: kern.local(torch.ones(4, 2), torch.ones(2, 4)))
    assert_usable()
    return text


def other_device_meshes(rank):
    """DeviceMeshes whose axes or sizes are not the kernel's."""
    kern = k_split()
    wrong_name = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    wrong_size = init_device_mesh("cpu", (2, 1), mesh_dim_names=("x", "y"))
    a = torch.ones(4, 8)
    texts = [
        refusal(
            lambda: kern(distribute_tensor(a, wrong_name, [Shard(1)]), distribute_tensor(a.t(), wrong_name, [Shard(0)]))
        ),
        refusal(lambda: kern.local(torch.ones(4, 4), torch.ones(4, 4), device_mesh=wrong_size)),
        refusal(lambda: kern.local(torch.ones(4, 4), torch.ones(4, 4), device_mesh="x")),
    ]
    assert_usable()
    return texts


def not_a_member(rank):
    """A rank outside the DeviceMesh calls, too."""
    kern = k_split()
    mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1], mesh_dim_names=("x",))
    text = ""
    if rank == 2:
        text = refusal(lambda: kern.local(torch.ones(4, 4), torch.ones(4, 4), device_mesh=mesh))
    else:
        assert torch.equal(kern.local(torch.ones(4, 4), torch.ones(4, 4), device_mesh=mesh), torch.full((4, 4), 8.0))
    assert_usable()
    return text


def wrong_backend(rank):
    """Tensors on a device that the group can't move."""
    return [
        refusal(lambda: check_backend("cuda", dist.get_backend_config(), "here")),
        refusal(lambda: check_backend("cpu", "cuda:nccl", "here")),
    ]


def different_kernels(rank):
    """Rank 1 has another kernel; afterwards both run the same one."""
    kern = k_split() if rank == 0 else add_one_split(8, 2)
    args = [torch.ones(4, 4), torch.ones(4, 4)] if rank == 0 else [torch.ones(4)]
    text = refusal(lambda: kern.local(*args))
    assert_usable()
    return text


def different_shapes(rank):
    """Rank 2 compiled for another size."""
    size = 12 if rank == 2 else 8
    kern = kernel_of(matmul_kernel(4, 4, size), matmul_k_split(4, 4, size, 4))
    text = refusal(lambda: kern.local(torch.ones(4, size // 4), torch.ones(size // 4, 4)))
    assert_usable()
    return text


def refused_on_one_rank(rank):
    """Rank 1 passes float64 at the first call: all ranks refuse it. The second call is right, and works."""
    kern, a = k_split(), torch.ones(4, 4)
    text = refusal(lambda: kern.local(a.double() if rank == 1 else a, a))
    assert torch.equal(kern.local(a, a), torch.full((4, 4), 8.0))
    return text


def refused_on_one_rank_later(rank):
    """Rank 1 passes float64 at a later call, when nothing is agreed on any more: rank 0 hears of it in time."""
    kern, a = k_split(), torch.ones(4, 4)
    kern.local(a, a)
    return refusal(lambda: kern.local(a.double() if rank == 1 else a, a))


def raises_before_any_collective(rank):
    """A kernel step that raises on every rank: the error comes as it is, and the group can be used."""
    kern = k_split(failing={0, 1}, rank=rank)
    a = torch.ones(4, 4)
    try:
        kern.local(a, a)
    except ArithmeticError as error:
        text = str(error)
    assert_usable()
    assert torch.equal(k_split().local(a, a), torch.full((4, 4), 8.0))
    return text


def raises_in_the_middle(rank):
    """Rank 1's kernel raises; rank 0 waits in the collective."""
    kern, a = k_split(failing={1}, rank=rank), torch.ones(4, 4)
    begin = time.monotonic()
    try:
        kern.local(a, a)
    except ArithmeticError as error:
        wait_for("it was heard")
        return str(error)
    except mt.MeshTensorError as error:
        assert torch.equal(a, torch.ones(4, 4))
        assert time.monotonic() - begin < 30  # the group's timeout is twice that
        say("it was heard")
        return str(error)


def raises_after_a_refusal(rank):
    """Rank 1 calls another kernel first, so that the ranks have not made the same calls; then its kernel raises."""
    kern, a = k_split(failing={1}, rank=rank), torch.ones(4, 4)
    other = add_one_split(8, 2)
    refusal(lambda: kern.local(a, a) if rank == 0 else other.local(torch.ones(4)))
    try:
        kern.local(a, a)
    except ArithmeticError as error:
        wait_for("it was heard")
        return str(error)
    except mt.MeshTensorError as error:
        say("it was heard")
        return str(error)


def dies(rank):
    """Rank 2 ends in its kernel, without a word."""
    kern, a = k_split(4, failing={2}, rank=rank, how=lambda: os._exit(1)), torch.ones(4, 2)
    return refusal(lambda: kern.local(a, a.t().contiguous()))


def hangs(rank):
    """Rank 1 hangs in its kernel, longer than the group's timeout."""
    kern, a = k_split(failing={1}, rank=rank, how=lambda: (wait_for("enough"), os._exit(1))), torch.ones(4, 4)
    all_come("the call")
    nobody_speaks()
    text = refusal(lambda: kern.local(a, a))
    say("enough")
    return text


def dies_before_the_first_call(rank):
    """Rank 1 never comes to the call."""
    if rank == 1:
        os._exit(1)
    kern, a = k_split(), torch.ones(4, 4)
    return refusal(lambda: kern.local(a, a))


def dies_in_a_change_of_layout(rank):
    """Rank 1 ends after the first call; in the second, a DTensor has to be redistributed."""
    kern = kernel_of(matmul_kernel(4, 4, 8), matmul_k_split(4, 4, 8))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    a = distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)])
    b = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    assert kern(a, b).to_local().eq(8).all()
    if rank == 1:
        os._exit(1)
    nobody_speaks()
    return refusal(lambda: kern(a, b))


def k_split(devices=2, failing=(), rank=0, how=None):
    """C = A @ B over (4, 8) and (8, 4), k split; on the ranks `failing` the kernel does `how` instead of computing."""
    kern = kernel_of(matmul_kernel(4, 4, 8), matmul_k_split(4, 4, 8, devices))
    if rank in failing:
        target = Target("interpret", "cpu", False, lambda func, poison: lambda *args: (how or fail)())
        kern._compiled = replace(kern._compiled, target=target)
    return kern


def nobody_speaks():
    """The only other rank says nothing any more, and need not be listened to for seconds."""
    faults._GRACE = 0.1


def fail():
    """What a kernel that raises does."""
    raise ArithmeticError("bad numbers")


def assert_usable():
    """The process group still works."""
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
