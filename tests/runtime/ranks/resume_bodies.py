"""What one rank catches and goes on from: each body returns what its rank was told."""

from __future__ import annotations

import os
import threading
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import mesh_tensor as mt
from tests.refusals import refusal
from tests.runtime.programs import kernel_of, matmul_k_split, matmul_kernel

from .fault_bodies import assert_usable, k_split, nobody_speaks
from .support import say, wait_for


def refused_on_one_rank(rank):
    """Rank 1 passes float64, catches that, and goes on; then all resume."""
    kern, a = k_split(), torch.ones(4, 4)
    kern.local(a, a)
    begin = time.monotonic()
    texts = [refusal(lambda: kern.local(a.double() if rank == 1 else a, a))]
    texts += [refusal(lambda: kern.local(a, a)), refusal(lambda: kern.local(a, a))]
    assert time.monotonic() - begin < 30  # the timeout is a minute
    assert_usable()
    mt.resume({"x": 2})
    for number in range(20):
        assert kern.local(a * number, a).eq(8 * number).all()
    return texts


def refused_alike(rank):
    """All ranks pass float64, catch that, and go on."""
    kern, a = k_split(), torch.ones(4, 4)
    kern.local(a, a)
    for number in range(5):
        refusal(lambda: kern.local(a.double(), a))
        assert kern.local(a, a * number).eq(8 * number).all()


def other_calls(rank):
    """Rank 1 refuses a redistribution, or its kernel gets too many tensors; rank 0 goes on. Then all resume."""
    mesh, kern = init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), k_split()
    a, b = (distribute_tensor(torch.ones(s), mesh, [Shard(d)]) for s, d in (((4, 8), 1), ((8, 4), 0)))
    texts = []
    for call in (
        lambda wrong: mt.redistribute(a, {"x": 5} if wrong else {"x": 0}),
        lambda wrong: kern(*(a, b, b, b) if wrong else (a, b)),
    ):
        call(False)
        texts.append(refusal(lambda call=call: call(rank == 1)))
        mt.resume(mesh)
        assert kern(a, b).to_local().eq(8).all()
    return texts


def other_sizes(rank):
    """Rank 1 calls a kernel on larger tensors than rank 0, after both were agreed on."""
    kernels = k_split(), kernel_of(matmul_kernel(64, 4, 8), matmul_k_split(64, 4, 8))
    b, parts = torch.ones(4, 4), (torch.ones(4, 4), torch.ones(64, 4))
    for kern, part in zip(kernels, parts, strict=True):
        kern.local(part, b)
    text = refusal(lambda: kernels[rank].local(parts[rank], b))
    mt.resume({"x": 2})
    assert kernels[1].local(parts[1], b).eq(8).all()
    return text


def two_threads(rank):
    """Two kernels of one mesh, each called by a thread of its own."""
    kernels, a, wrong = [k_split(), k_split()], torch.ones(4, 4), []

    def work(which):
        for number in range(100):
            if not kernels[which].local(a * number, a * (which + 1)).eq(8 * number * (which + 1)).all():
                wrong.append((which, number))

    threads = [threading.Thread(target=work, args=(which,), name=f"worker {which}") for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def first_calls_of_two_threads(rank):
    """Two threads make the first call on a mesh at the same time, one of them on one rank a bit later; again and again,
    each time in a new process group."""
    wrong, a, store = [], torch.ones(4, 4), dist.distributed_c10d._get_default_store()

    def work(kern, which, cycle, begin):
        begin.wait()
        if which == (rank + cycle) % 2:
            time.sleep(0.004 * (cycle % 3))
        try:
            assert kern.local(a * cycle, a * (which + 1)).eq(8 * cycle * (which + 1)).all()
        except Exception as error:
            wrong.append(f"cycle {cycle}, thread {which}: {error}")

    for cycle in range(8):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore(str(cycle), store), rank=rank, world_size=2)
        begin = threading.Barrier(2)
        each = [(k_split(), which, cycle, begin) for which in (0, 1)]
        threads = [threading.Thread(target=work, args=args, name=f"worker {args[1]}") for args in each]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        dist.barrier()  # nobody leaves while another one connects
    return wrong


def late_at_the_first_call(rank):
    """Rank 1 comes to the first call when rank 0 waits no longer. Then both begin again with a new process group."""
    os.environ["MESH_TENSOR_TIMEOUT"] = "1"
    kern, a, store, times = k_split(), torch.ones(4, 4), dist.distributed_c10d._get_default_store(), []
    if rank == 1:
        wait_for("gave up")
    texts = [refusal(lambda: kern.local(a, a))]
    for _ in range(5):  # one of them is not held up by what else the machine does
        begin = time.monotonic()
        again = [refusal(lambda: kern.local(a, a)), refusal(lambda: mt.resume({"x": 2}))]
        times.append(time.monotonic() - begin)
    texts += again
    assert min(times) < 0.5
    say("gave up")
    del os.environ["MESH_TENSOR_TIMEOUT"]
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    assert kern.local(a, a).eq(8).all()
    assert_usable()
    return texts


def threads_of_one_name(rank):
    """Two threads named alike."""
    kern, a, texts = k_split(), torch.ones(4, 4), []
    kern.local(a, a)
    for work in (lambda: kern.local(a, a), lambda: texts.append(refusal(lambda: kern.local(a, a)))):
        thread = threading.Thread(target=work, name="worker")
        thread.start()
        thread.join()
    return texts[0]


def resumes_without_a_rank(rank):
    """Rank 1 ends; rank 0 can't resume."""
    os.environ["MESH_TENSOR_TIMEOUT"] = "2"
    kern, a = k_split(), torch.ones(4, 4)
    kern.local(a, a)
    if rank == 1:
        os._exit(1)
    nobody_speaks()
    refusal(lambda: kern.local(a, a))
    begin = time.monotonic()
    text = refusal(lambda: mt.resume({"x": 2}))
    assert time.monotonic() - begin < 30  # the group's timeout is twice that
    return text


def hangs_on_a_device_mesh(rank):
    """A DeviceMesh of two axes has groups that wait half an hour; the environment says two seconds."""
    os.environ["MESH_TENSOR_TIMEOUT"] = "2"
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("x", "y"))
    tensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()])
    mt.redistribute(tensor, {"x": 1})
    if rank == 1:
        wait_for("enough")
        os._exit(1)
    begin = time.monotonic()
    nobody_speaks()
    text = refusal(lambda: mt.redistribute(tensor, {"x": 1}))
    assert time.monotonic() - begin < 60
    say("enough")
    return text


def nothing_to_resume(rank):
    """No call ran, and the environment says nonsense."""
    texts = [refusal(lambda: mt.resume({"x": 2}))]
    os.environ["MESH_TENSOR_TIMEOUT"] = "soon"
    return [*texts, refusal(lambda: k_split().local(torch.ones(4, 4), torch.ones(4, 4)))]
