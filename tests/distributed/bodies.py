"""What ranks do in tests: every function runs on all ranks of a launch, `rank` is which one it is."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import mesh_tensor as mt
from kernels.matmul import matmul


def k_split_matmul(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    func = mt.annotate(matmul(96, 64, 128), {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}, "C": {}})
    kern = mt.compile(func)
    a, b = torch.randn(96, 128), torch.randn(128, 64)
    da, db = distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(b, mesh, [Shard(0)])
    c = kern(da, db)
    assert c.placements == (Replicate(),)
    assert torch.equal(c.to_local(), kern(a, b))
    torch.testing.assert_close(c.full_tensor(), a @ b, rtol=1e-4, atol=1e-4)
