"""Ranks that are about to run different things, at the first call and at later ones: each body returns the messages
that its rank raised."""

from __future__ import annotations

import os
import time

import tilelang.language as T
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import mesh_tensor as mt
from kernels.matmul import matmul
from mesh_tensor.runtime.ranks import faults
from mesh_tensor.runtime.ranks.ranks import ranks_of
from tests.refusals import refusal

from .fault_bodies import assert_usable, k_split, nobody_speaks
from .support import all_come, say, wait_for

K_SPLIT = {"A": {"x": 1}, "B": {"x": 0}, "C": {}}


def different_dtypes(rank):
    """Rank 1 compiled for float16."""
    dtype = ("float32", "float16")[rank]
    return first_call(matmul_kernel(dtype=dtype), dtype=getattr(torch, dtype))


def different_versions(rank):
    """Rank 1 runs another mesh_tensor."""
    if rank == 1:
        faults.__version__ = "99.0"
    return first_call(matmul_kernel())


def different_targets(rank):
    """Rank 1 compiled for another target."""
    return first_call(matmul_kernel(target=("c", "interpret")[rank]))


def different_options(rank):
    """Rank 1 lets collectives run beside kernels."""
    return first_call(matmul_kernel(overlap=("off", 2)[rank]))


def different_layouts(rank):
    """Rank 1 wants its result split."""
    return first_call(matmul_kernel(layouts={**K_SPLIT, "C": {"x": rank}} if rank else K_SPLIT))


def different_blocks(rank):
    """Rank 1 has the same kernel with other blocks: only the steps differ."""
    return first_call(matmul_kernel(block=(16, 32)[rank]))


def different_axes(rank):
    """Rank 1 calls its axis otherwise."""
    axis = "xy"[rank]
    return first_call(matmul_kernel(axes={axis: 2}, layouts={"A": {axis: 1}, "B": {axis: 0}, "C": {}}))


def sizes_that_differ(rank):
    """Each rank goes from the last size to another one: to known ones, and to new ones. Both are right again later."""
    kern, mesh = symbolic_sum(), init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    small, middle, large = (distribute_tensor(torch.ones(n, 4), mesh, [Shard(0)]) for n in (6, 8, 10))
    kern(small), kern(large), kern(middle)
    texts = [refusal(lambda: kern((small, large)[rank]))]
    kern(middle)
    texts.append(refusal(lambda: kern(distribute_tensor(torch.ones((14, 18)[rank], 4), mesh, [Shard(0)]))))
    assert_usable()
    for tensor, total in ((small, 6.0), (large, 10.0), (large, 10.0), (small, 6.0)):
        assert kern(tensor).to_local().eq(total).all()
    return texts


def layouts_that_differ(rank):
    """DTensors that lie differently on each rank, at a later call."""
    kern, mesh = symbolic_sum(), init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    rows, columns, whole = (distribute_tensor(torch.ones(6, 4), mesh, [p]) for p in (Shard(0), Shard(1), Replicate()))
    kern(rows)
    text = refusal(lambda: kern((columns, whole)[rank]))
    assert kern(whole).to_local().eq(6).all()
    assert_usable()
    return text


def new_size_on_one_rank(rank):
    """Rank 0 comes with a new size, rank 1 with the last one: both wait in vain, and say for what."""
    kern, mesh = symbolic_sum(), init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    small = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    large = distribute_tensor(torch.ones(64, 4), mesh, [Shard(0)])
    kern(small)
    begin = time.monotonic()
    text = refusal(lambda: kern((large, small)[rank]))
    assert time.monotonic() - begin < 30  # the group's timeout is twice that
    assert large.to_local().eq(1).all()
    return text


def new_size_after_a_rank_has_ended(rank):
    """Rank 1 ends after the first call; rank 0 comes with a new size."""
    kern, mesh = symbolic_sum(), init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    large = distribute_tensor(torch.ones(64, 4), mesh, [Shard(0)])
    kern(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
    if rank == 1:
        os._exit(1)
    nobody_speaks()
    return refusal(lambda: kern(large))


def hangs_on_two_axes(rank):
    """Rank 3 of a 2 x 2 mesh that the kernel made hangs: the collective over one axis ends in time."""
    axes, layouts = {"x": 2, "y": 2}, {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}}
    a = torch.ones(4, 4)
    kern = matmul_kernel(axes=axes, layouts=layouts)
    all_come("the first call")
    assert kern.local(a, torch.ones(4, 8)).eq(8).all()
    all_come("the second call")
    if rank in (2, 3):
        if rank == 3:
            wait_for("enough")
            os._exit(1)
        begin = time.monotonic()
        nobody_speaks()
        text = refusal(lambda: kern.local(a, torch.ones(4, 8)))
        assert time.monotonic() - begin < 60  # torch's own timeout is half an hour
        say("enough")
        return text
    return kern.local(a, torch.ones(4, 8)).sum().item()


def others_go_on(rank):
    """Rank 3 dies in a kernel of all ranks; ranks 0 and 1 go on in groups of their own, with what they have."""
    kern, small = k_split(4), matmul_kernel()
    pair = DeviceMesh("cpu", [0, 1], mesh_dim_names=("x",))
    group = dist.new_group([0, 1])
    a, b = torch.ones(4, 2), torch.ones(2, 4)
    assert kern.local(a, b).eq(8).all()
    if rank == 3:
        os._exit(1)
    text = refusal(lambda: kern.local(a, b))
    assert a.eq(1).all()
    assert b.eq(1).all()
    if rank < 2:
        assert small.local(torch.ones(8, 4), torch.ones(4, 8), device_mesh=pair).eq(8).all()
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == 2
    return text


def group_of_another_device(rank):
    """A kernel for GPUs on a group that moves CPU tensors only."""
    return refusal(lambda: ranks_of(mt.Mesh({"x": 2}), None, "cuda"))


def matmul_kernel(*, dtype="float32", block=16, axes=None, layouts=K_SPLIT, **options):
    """C = A @ B of (8, 8) tensors."""
    func = matmul(8, 8, 8, block, block, 16, dtype=dtype)
    return mt.compile(mt.annotate(func, axes or {"x": 2}, layouts), **{"target": "interpret", **options})


def different_orders(rank):
    """Rank 1 has the ranks of its DeviceMesh the other way round."""
    places = DeviceMesh("cpu", [[0, 1], [1, 0]][rank], mesh_dim_names=("x",))
    return first_call(matmul_kernel(), device_mesh=places)


def first_call(kern, dtype=torch.float32, **options):
    """What the first call of a kernel on an (8, 8) matmul with the contracted dim split says; then the group works."""
    text = refusal(lambda: kern.local(torch.ones(8, 4, dtype=dtype), torch.ones(4, 8, dtype=dtype), **options))
    assert_usable()
    return text


def symbolic_sum():
    """B = the sum of A's rows; they are split."""
    rows = T.dynamic("rows")

    @T.prim_func
    def total(A: T.Tensor((rows, 4), "float32"), B: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            sums = T.alloc_fragment((4,), "float32")
            T.clear(sums)
            for i in T.serial(rows):
                for j in T.Parallel(4):
                    sums[j] += A[i, j]
            T.copy(sums, B)

    return mt.compile(mt.annotate(total, {"x": 2}, {"A": {"x": 0}, "B": {}}), target="interpret")
