"""Calls that one rank refuses before it begins, or takes where others don't: each body returns the messages that its
rank raised, and goes on afterwards."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mesh_tensor as mt
from tests.api.models import Counted
from tests.api.pipeline.models import chain
from tests.refusals import refusal


def steps(rank):
    """The batch, the schedule, the state, and what torch is told, on rank 1."""
    mesh, x, y = init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), torch.randn(6, 8), torch.randn(6, 4)
    rows = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(y, mesh, [Shard(0)])
    fails = []

    def schedule(step):
        if rank and fails:
            raise ValueError(f"no rate at step {step}")
        return 1.0

    step = mt.training_step(nn.Linear(8, 4), F.mse_loss, (x, y), optimizer="sgd", schedule=schedule)
    run, virtual = mt.distribute_module(step, mesh, {}), mt.distribute_module(step, {"x": 2}, {})
    texts = [_on_one(rank, lambda: run(*rows), lambda: run(rows[0]))]
    losses = [run(*rows)]  # those of the first call, on both
    state = run.state_dict(full=True)
    del state["bias"]
    fails.append("now")
    texts.append(_on_one(rank, lambda: run(*rows), lambda: run(*rows)))
    fails.clear()
    mt.resume(mesh)
    whole = run.state_dict(full=True)
    texts.append(_on_one(rank, lambda: run.load_state_dict(whole), lambda: run.load_state_dict(state)))
    mt.resume(mesh)
    texts.append(_on_one(rank, lambda: run(x, y), lambda: torch.func.vmap(run)(x[None], y[None])))
    mt.resume(mesh)
    losses.append(run(*rows))
    assert losses == [virtual(x, y), virtual(x, y)]
    assert "to a step on a virtual mesh" in refusal(lambda: virtual(*rows))
    return texts


@torch.no_grad()
def states(rank):
    """A state that rank 1 resets, or while another thread of its has a turn, asks for."""
    mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), torch.randn(6, 4)
    model = Counted()
    imported = mt.from_torch(torch.export.export(model, (x,)))
    run = mt.distribute_module(imported, mesh, {"x": {"x": 0}})
    anywhere = mt.distribute_module(imported, {"x": 2}, {"x": {"x": 0}})
    torch.testing.assert_close(run(x), model(x))
    texts = [_on_one(rank, lambda: run(x), run.reset_state)]
    mt.resume(mesh)
    with _other_thread(run.turns, rank):
        texts.append(refusal(lambda: run(x)))
    mt.resume(mesh)
    torch.testing.assert_close(run(x), model(x))
    anywhere(distribute_tensor(x, mesh, [Shard(0)]))
    assert "parameter 'count': a DTensor, which lies on ranks" in refusal(lambda: anywhere(x))
    module, _ = chain()
    meshes, batch = {"m0": {"d": 1}, "m1": {"d": 1}}, (torch.randn(6, 6), torch.randn(6, 6))
    piped = mt.pipeline(module, meshes, ["layer1"], {}, ranks=True, microbatches=2, schedule="1f1b", train=True)
    with _other_thread(piped._turns, rank):
        texts.append(refusal(lambda: piped(*batch)))
    loss = piped(*batch)
    with _other_thread(piped._turns, rank):
        texts.append(refusal(piped.weights))
    mt.resume(piped.topology)
    assert piped(*batch) == loss
    return texts


def backwards(rank):
    """Gradients of gradients, on rank 1."""
    mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), torch.randn(6, 8)
    model = nn.Linear(8, 4)
    given = dict(model.named_parameters())
    run = mt.distribute_module(mt.from_torch(torch.export.export(model, (x,))), mesh, {"input": {"x": 0}}, weights={})
    weights, texts = list(given.values()), []
    expected = torch.autograd.grad(model(x).square().sum(), weights)
    for _ in range(2):
        losses = [run(x, **given).square().sum() for _ in range(2)]
        again = partial(torch.autograd.grad, losses[0], weights, create_graph=bool(rank))
        texts.append(_on_one(rank, again, again))
        mt.resume(mesh)
        torch.testing.assert_close(torch.autograd.grad(losses[1], weights), expected)
    return texts


def _on_one(rank, right, wrong):
    """What both ranks raise, where rank 1 makes the wrong call."""
    try:
        (wrong if rank else right)()
    except (mt.MeshTensorError, ValueError) as error:
        return str(error)
    raise AssertionError("nothing was raised")


@contextmanager
def _other_thread(turns, rank):
    """On rank 1, another thread has a turn within."""
    has, may_end = threading.Event(), threading.Event()

    def hold():
        with turns.one("a call"):
            has.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    if rank:
        thread.start()
        has.wait()
    try:
        yield
    finally:
        may_end.set()
        if rank:
            thread.join()
