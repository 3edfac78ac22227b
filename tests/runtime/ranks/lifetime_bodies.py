"""What outlives what: kernels and modules while process groups come and go, and ranks that are newer than others."""

from __future__ import annotations

import gc
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mesh_tensor as mt
from kernels.matmul import matmul
from tests.api.pipeline.models import chain
from tests.refusals import refusal

M, N, K = 6, 4, 8


def _join(folder, name, rank, count, timeout=60):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{name}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=timeout),
    )


def _kernel(mesh, layouts):
    return mt.compile(mt.annotate(matmul(M, N, K, 16, 16, 16), mesh, layouts), target="interpret")


def _held():
    """File descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def kept_across_groups(rank, folder):
    """A kernel that is called in one process group after the other holds connections of the last one only."""
    kern = _kernel({"x": 2, "y": 2}, {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}})
    here = kern.mesh.coordinate(rank)
    held = (0, 0)
    for cycle in range(5):
        _join(folder, cycle, rank, 4)
        a, b = torch.randn(M, K), torch.randn(K, N)
        dist.broadcast(a, 0)
        dist.broadcast(b, 0)
        mine, part = a[here["x"] * 3 :][:3, here["y"] * 4 :][:, :4].contiguous(), b[here["y"] * 4 :][:4].contiguous()
        wanted = (a @ b)[here["x"] * 3 :][:3]
        torch.testing.assert_close(kern.local(mine, part), wanted, rtol=1e-4, atol=1e-4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
        da, db = distribute_tensor(a, mesh, [Shard(0), Shard(1)]), distribute_tensor(b, mesh, [Shard(0), Shard(0)])
        torch.testing.assert_close(kern(da, db).to_local(), wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(mt.redistribute(da, {"y": 0}).full_tensor(), a)
        dist.barrier()
        dist.destroy_process_group()
        if cycle == 1:
            held = _settled((0, 0), 2)
    last = _settled(held, 30)
    assert all(now <= second for now, second in zip(last, held, strict=True)), (held, last)


def _settled(wanted, seconds):
    """What is held when threads that are about to end have done so: as soon as it is no more than what is wanted."""
    gc.collect()
    end = time.monotonic() + seconds
    while any(now > most for now, most in zip(_held(), wanted, strict=True)) and time.monotonic() < end:
        time.sleep(0.05)
    return _held()


def modules_across_groups(rank, folder):
    """A module for no DeviceMesh in particular goes on, too."""
    from tvm import relax

    from tests.plan.modules import function

    mod = function(lambda emit, x, w: emit(relax.op.matmul(x, w)), x=(M, K), w=(K, N))
    weight = torch.ones(K, N)
    module = mt.distribute_module(mod, {"x": 2}, {"x": {"x": 1}}, weights={"w": weight})
    for cycle in range(3):
        _join(folder, cycle, rank, 2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        a = torch.full((M, K), float(cycle))
        assert module(distribute_tensor(a, mesh, [Shard(1)])).full_tensor().eq(K * cycle).all()
        dist.barrier()
        dist.destroy_process_group()


def a_new_process(index, folder):
    """Ranks 0 and 1 work; 1 leaves, and a process that never worked takes its place."""
    kern = _kernel({"x": 2}, {"A": {"x": 1}, "B": {"x": 0}, "C": {}})
    for generation, members in enumerate([(0, 1), (0, 2), (0, 1)]):
        if index not in members:
            continue
        rank = members.index(index)
        _join(folder, generation, rank, 2)
        for _ in range(2):
            result = kern.local(torch.full((M, K // 2), 2.0), torch.ones(K // 2, N))
            assert result.eq(2 * K).all()
        dist.barrier()
        dist.destroy_process_group()


def meshes_of_other_groups(rank, folder):
    """DTensors and DeviceMeshes of a process group that is gone are refused."""
    kern = _kernel({"x": 2}, {"A": {"x": 1}, "B": {"x": 0}, "C": {}})
    _join(folder, 0, rank, 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    a, b = distribute_tensor(torch.ones(M, K), mesh, [Shard(1)]), distribute_tensor(torch.ones(K, N), mesh, [Shard(0)])
    assert kern(a, b).to_local().eq(K).all()
    meshes = {"m0": {"d": 1}, "m1": {"d": 1}}
    piped = mt.pipeline(chain()[0], meshes, ["layer1"], {}, ranks=True, microbatches=2, schedule="1f1b", train=True)
    batch = torch.randn(6, 6), torch.randn(6, 6)
    piped(*batch)
    dist.barrier()
    dist.destroy_process_group()
    gone = refusal(lambda: kern(a, b))
    assert "there is no process group" in gone
    _join(folder, 1, rank, 2)
    for call in (lambda: kern(a, b), lambda: mt.redistribute(a, {}), lambda: kern.local(a, b, device_mesh=mesh)):
        text = refusal(call)
        assert "the DeviceMesh is of a process group that was destroyed" in text
        assert "make it, and what lies on it, anew" in text
    for call in (lambda: piped(*batch), piped.weights, lambda: piped.load_state_dict({})):
        text = refusal(call)
        assert "the process group that this was made in was destroyed" in text
        assert "make the pipeline anew" in text
    dist.barrier()
    dist.destroy_process_group()


def forked_processes(rank, folder):
    """What is forked from a rank has its connections: it took what the rank is sent, and others what it sent."""
    kern, later = (_kernel({"x": 2}, {"A": {"x": 1}, "B": {"x": 0}, "C": {}}) for _ in range(2))
    _join(folder, 0, rank, 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    whole = distribute_tensor(torch.ones(M, K), mesh, [Shard(1)])
    a, b = torch.ones(M, K // 2), torch.ones(K // 2, N)
    texts = _in_a_fork(lambda: kern.local(a, b))  # before the ranks have met
    assert kern.local(a, b).eq(K).all()
    calls = lambda: kern.local(2 * a, b), lambda: later.local(a, b), lambda: mt.redistribute(whole, {})
    texts += _in_a_fork(*calls, lambda: mt.resume({"x": 2})) if rank == 0 else []
    dist.barrier()
    for text in texts:
        assert "this process was forked from one that is a rank" in text
        assert "multiprocessing.get_context('spawn')" in text
    assert len(texts) == (5, 1)[rank]
    assert kern.local(a, b).eq(K).all()
    dist.barrier()
    dist.destroy_process_group()


def _in_a_fork(*calls):
    """What they are refused with in a forked process."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(sender, "|".join(map(refusal, calls)).encode())
        finally:
            os._exit(0)
    os.close(sender)
    with open(receiver, "rb") as words:
        text = words.read().decode()
    os.waitpid(pid, 0)
    return text.split("|")
