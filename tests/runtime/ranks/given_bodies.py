"""Numbers and whole tensors that are not the same on all ranks: each body returns the messages that its rank raised,
and goes on afterwards."""

from __future__ import annotations

import tilelang.language as T
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import mesh_tensor as mt
from tests.api.pipeline.models import chain
from tests.refusals import refusal

from .fault_bodies import assert_usable


def numbers(rank):
    """Of a kernel whose result is reduced, by DTensors and by local tensors."""

    @T.prim_func
    def scaled(A: T.Tensor((12, 8), "float32"), alpha: T.float32, B: T.Tensor((12,), "float32")):
        with T.Kernel(3, threads=32) as bx:
            rows, total = T.alloc_fragment((4, 8), "float32"), T.alloc_fragment((4,), "float32")
            T.copy(A[bx * 4, 0], rows)
            for i, j in T.Parallel(4, 8):
                rows[i, j] = rows[i, j] * alpha
            T.reduce_sum(rows, total, dim=1)
            T.copy(total, B[bx * 4])

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    kern = mt.compile(mt.annotate(scaled, {"x": 2}, {"A": {"x": 1}, "B": {}}), target="interpret")
    whole = torch.randn(12, 8)
    given = distribute_tensor(whole, mesh, [Shard(1)])
    texts = []
    for call in (lambda alpha: kern(given, alpha).to_local(), lambda alpha: kern.local(given.to_local(), alpha)):
        torch.testing.assert_close(call(2.0), 2 * whole.sum(1))
        torch.testing.assert_close(call(-0.5), -0.5 * whole.sum(1))
        texts.append(refusal(lambda call=call: call(2.0 + rank)))
        mt.resume({"x": 2})
        torch.testing.assert_close(call(3.0), 3 * whole.sum(1))
    return texts


def inputs(rank):
    """Of a module: with something to exchange, and with nothing, where one of its inputs is a DTensor."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    x, scale = torch.randn(6, 8), torch.tensor(3.0)

    class Scaled(nn.Module):
        def forward(self, x, scale):
            return x * scale

    model, texts = _model(0), []
    split = mt.distribute_module(_imported(model, x), mesh, {"0.weight": {"x": 0}, "2.weight": {"x": 1}})
    alone = mt.distribute_module(_imported(Scaled(), x, scale), mesh, {"x": {"x": 0}})
    rows = distribute_tensor(x, mesh, [Shard(0)])
    others = x.clone()
    others[3, 3] += rank * 2e-6  # one element on one rank
    for right, wrong, expected in (
        (lambda: split(x), lambda: split(others), model(x)),
        (lambda: alone(rows, scale).full_tensor(), lambda: alone(rows, scale + rank), x * scale),
    ):
        torch.testing.assert_close(right(), expected)
        texts.append(refusal(wrong))
        mt.resume(mesh)
        torch.testing.assert_close(right(), expected)
    return texts


def weights(rank):
    """Of models that were made without a seed: at the first call, and in a state that is loaded."""
    mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), torch.randn(6, 8)
    run = mt.distribute_module(_imported(_model(rank), x), mesh, {"0.weight": {"x": 0}})
    texts = [refusal(lambda: run(x))]
    run.load_state_dict(_model(0).state_dict())
    torch.testing.assert_close(run(x), _model(0)(x))
    texts.append(refusal(lambda: run.load_state_dict(_model(rank).state_dict())))
    torch.testing.assert_close(run(x), _model(0)(x))
    return texts


def another_mesh(rank):
    """DTensors on the same ranks in another order: of a call, of weights, and of a state."""
    mesh, turned = (DeviceMesh("cpu", ranks, mesh_dim_names=("x",)) for ranks in ([0, 1], [1, 0]))
    model, x = _model(0), torch.randn(6, 8)
    imported = _imported(model, x)

    def rows(whole, on):
        return DTensor.from_local(whole.detach().chunk(2)[on.get_coordinate()[0]], on, [Shard(0)], run_check=False)

    layouts = {"input": {"x": 0}, "0.weight": {"x": 0}, "2.weight": {"x": 0}}
    state = {on: {name: rows(weight, on) for name, weight in model.named_parameters()} for on in (mesh, turned)}
    run = mt.distribute_module(imported, mesh, layouts, weights=state[mesh])
    torch.testing.assert_close(run(rows(x, mesh)).full_tensor(), model(x))
    texts = [
        refusal(lambda: run(rows(x, turned))),
        refusal(lambda: mt.distribute_module(imported, mesh, layouts, weights=state[turned])(x)),
        refusal(lambda: run.load_state_dict(state[turned])),
    ]
    assert_usable()
    anywhere = mt.distribute_module(imported, {"x": 2}, layouts)
    for on in (mesh, turned):
        made = mt.redistribute(anywhere(rows(x, on)), {"x": 0}).to_local()
        torch.testing.assert_close(made, model(x).detach().chunk(2)[on.get_coordinate()[0]])
    return texts


def training(rank):
    """The batch, the model and a loaded state of a training step; the batch of a pipeline."""
    mesh, x, y = init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), torch.randn(6, 8), torch.randn(6, 4)
    step = mt.training_step(_model(rank), F.mse_loss, (x, y))
    texts = [refusal(lambda: mt.distribute_module(step, mesh, {})(x, y))]
    run = mt.distribute_module(mt.training_step(_model(0), F.mse_loss, (x, y)), mesh, {"0.weight": {"x": 0}})
    run(x, y)
    texts.append(refusal(lambda: run(x + rank, y)))
    mt.resume(mesh)
    state = {name: tensor.clone() for name, tensor in run.state_dict(full=True).items()}
    state["2.bias"] += rank
    texts.append(refusal(lambda: run.load_state_dict(state)))
    loss = run(x, y)
    virtual = mt.distribute_module(mt.training_step(_model(0), F.mse_loss, (x, y)), {"x": 2}, {"0.weight": {"x": 0}})
    assert [virtual(x, y), virtual(x, y)][1] == loss
    module, _ = chain()
    piped = mt.pipeline(
        module,
        {"m0": {"d": 1}, "m1": {"d": 1}},
        ["layer1"],
        {},
        ranks=True,
        microbatches=2,
        schedule="1f1b",
        train=True,
    )
    batch = torch.randn(6, 6), torch.randn(6, 6)
    loss = piped(*batch)
    texts.append(refusal(lambda: piped(batch[0], batch[1] + rank)))
    mt.resume(piped.topology)
    assert piped(*batch) == loss
    return texts


def _model(seed):
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    torch.manual_seed(9)
    return made


def _imported(model, *inputs):
    return mt.from_torch(torch.export.export(model.eval(), inputs))
