"""Kernels inside torch.compile'd models, on ranks."""

from __future__ import annotations

import torch
from torch._inductor import config as inductor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import mesh_tensor as mt
from kernels.matmul import matmul
from tests.refusals import refusal


def compiled_model(rank):
    """A graph without breaks, on DTensors and on local tensors, with a kernel in the middle."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    kern = mt.compile(
        mt.annotate(matmul(6, 4, 8), {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}, "C": {}}), target="interpret"
    )
    op = mt.as_custom_op(kern, "ranked_matmul", device_mesh=mesh)

    def model(x, w):
        return torch.relu(op(x + 1, w)) * 2

    a, b = torch.randn(6, 8), torch.randn(8, 4)
    expected = torch.relu((a + 1) @ b) * 2
    local = torch.compile(model, fullgraph=True, backend="aot_eager")
    part = slice(rank * 4, rank * 4 + 4)
    torch.testing.assert_close(local(a[:, part].contiguous(), b[part]), expected, rtol=1e-4, atol=1e-4)
    for placements in ([Shard(1)], [Replicate()], [Shard(0)]):
        da, db = distribute_tensor(a, mesh, placements), distribute_tensor(b, mesh, [Shard(0)])
        torch.testing.assert_close(model(da, db).full_tensor(), expected, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            made = torch.compile(model, fullgraph=True, backend="aot_eager")(da, db)
        assert made.placements == (Replicate(),)
        torch.testing.assert_close(made.full_tensor(), expected, rtol=1e-4, atol=1e-4)


def compiled_around(rank):
    """A kernel that is no operation: the graph ends at its call, with DTensors and with local tensors."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    func = mt.annotate(matmul(6, 4, 8), {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}, "C": {}})
    kern = mt.compile(func, target="interpret")
    a, b = torch.randn(6, 8), torch.randn(8, 4)
    da, db = distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(b, mesh, [Shard(0)])
    for run, x, w in (kern, da, db), (kern.local, da.to_local(), db.to_local()):
        made = torch.compile(lambda x, w, run=run: torch.relu(run(x, w)) * 2, backend="eager")(x, w)
        whole = made.full_tensor() if isinstance(made, DTensor) else made
        torch.testing.assert_close(whole, torch.relu(a @ b) * 2, rtol=1e-4, atol=1e-4)


def uneven_columns(rank):
    """Results that are a part of a tile come out as the graph expects them: contiguous."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    op, mine = columns_op("uneven_columns", mesh), slice(rank * 4, rank * 4 + 4)
    a, b = torch.randn(7, 7), torch.randn(7, 7)
    part = b[:, mine].contiguous()
    torch.library.opcheck(torch.ops.mesh_tensor.uneven_columns.default, (a, part))
    inductor.compile_threads = 1  # each is a process, which takes longer to start than there is to compile
    model = torch.compile(lambda x, w: torch.relu(op(x + 1, w)) * 2, fullgraph=True)
    expected = torch.relu((a + 1) @ b) * 2
    torch.testing.assert_close(model(a, part), expected[:, mine], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        made = model(distribute_tensor(a, mesh, [Replicate()]), distribute_tensor(b, mesh, [Shard(1)]))
    torch.testing.assert_close(made.full_tensor(), expected, rtol=1e-4, atol=1e-4)


def wrong_arguments(rank):
    """DTensors of another mesh or shape, and DTensors beside plain tensors: every rank refuses."""
    mesh, other = (DeviceMesh("cpu", ranks, mesh_dim_names=("x",)) for ranks in ([0, 1], [1, 0]))
    op = columns_op("wrong_arguments", mesh)
    a, b = (
        distribute_tensor(torch.ones(7, 7), mesh, [Replicate()]),
        distribute_tensor(torch.ones(7, 7), mesh, [Shard(1)]),
    )
    elsewhere = DTensor.from_local(torch.ones(7, 7), other, [Replicate()], run_check=False)
    texts = [
        refusal(lambda: op(elsewhere, b)),
        refusal(lambda: op(a, distribute_tensor(torch.ones(7, 8), mesh, [Shard(1)]))),
        refusal(lambda: op(a, b.to_local())),
    ]
    assert op(a, b).full_tensor().eq(7).all()
    return texts


def columns_op(name, mesh):
    """C = A @ B of (7, 7) tensors as an operation, the columns split."""
    func = mt.annotate(matmul(7, 7, 7), {"x": 2}, {"A": {}, "B": {"x": 1}, "C": {"x": 1}})
    return mt.as_custom_op(mt.compile(func, target="interpret"), name, device_mesh=mesh)
