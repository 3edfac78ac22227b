"""Kernels inside torch.compile'd models, on ranks."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import mesh_tensor as mt
from kernels.matmul import matmul


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
    for placements in ([Shard(1)], [Replicate()]):
        da, db = distribute_tensor(a, mesh, placements), distribute_tensor(b, mesh, [Shard(0)])
        torch.testing.assert_close(model(da, db).full_tensor(), expected, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            made = torch.compile(model, fullgraph=True, backend="aot_eager")(da, db)
        assert made.placements == (Replicate(),)
        torch.testing.assert_close(made.full_tensor(), expected, rtol=1e-4, atol=1e-4)
