"""Gradients of kernels on ranks: DTensors, through the kernel itself and through an operation of torch's."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import mesh_tensor as mt
from kernels.matmul import matmul, matmul_backward
from kernels.rms_norm import rms_norm, rms_norm_backward
from tests.refusals import refusal

LAYOUTS = {
    "rows": {"A": {"x": 0}, "B": {}, "C": {"x": 0}},
    "columns": {"A": {}, "B": {"x": 1}, "C": {"x": 1}},
    "sum": {"A": {"x": 1}, "B": {"x": 0}, "C": {}},
}


def matmuls(rank, size):
    """A (5, 7) @ (7, 6): gradients as torch's, lying as the tensors that they are gradients of."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    generator = torch.Generator().manual_seed(0)
    a, b, weights = (torch.randn(shape, generator=generator) for shape in [(5, 7), (7, 6), (5, 6)])
    wanted = (weights @ b.T, a.T @ weights)
    for name, layout in LAYOUTS.items():
        func = mt.annotate(matmul(5, 6, 7, 4, 4, 4), {"x": size}, layout)
        kernel = mt.compile(func, target="interpret", poison=True, backward=matmul_backward(5, 6, 7, 4, 4, 4))
        op = mt.as_custom_op(kernel, f"matmul_{name}_{size}", device_mesh=mesh)
        for run in (kernel, op):
            for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
                da = distribute_tensor(a, mesh, placements).requires_grad_()
                db = distribute_tensor(b, mesh, [Shard(0)]).requires_grad_()
                (run(da, db) * distribute_tensor(weights, mesh, [Shard(1)])).sum().backward()
                assert da.grad.placements == da.placements
                assert db.grad.placements == db.placements
                for grad, right in zip((da.grad, db.grad), wanted, strict=True):
                    torch.testing.assert_close(grad.full_tensor(), right)


def added_by_atomics(rank, size):
    """The gradient of a weight that lies whole, to which the rows of every rank add."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    x, weight = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)), torch.linspace(1, 2, 6)
    func = mt.annotate(rms_norm(5, 6, 1e-6, 2), {"x": size}, {"X": {"x": 0}, "weight": {}, "Y": {"x": 0}})
    kernel = mt.compile(func, target="interpret", poison=True, backward=rms_norm_backward(5, 6, 1e-6, 2))
    dx = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    dw = distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()
    kernel(dx, dw).square().sum().backward()
    x.requires_grad_()
    weight.requires_grad_()
    torch.nn.functional.rms_norm(x, (6,), weight, 1e-6).square().sum().backward()
    torch.testing.assert_close(dx.grad.full_tensor(), x.grad)
    torch.testing.assert_close(dw.grad.full_tensor(), weight.grad)


def local_tensors(rank, size):
    """Parts of tensors have no gradient: every rank says so, and the ranks can go on."""
    func = mt.annotate(matmul(4, 6, 8, 4, 4, 4), {"x": size}, LAYOUTS["sum"])
    kernel = mt.compile(func, target="interpret", backward=matmul_backward(4, 6, 8, 4, 4, 4))
    a, b = torch.ones(4, 8 // size), torch.ones(8 // size, 6)
    text = refusal(lambda: kernel.local(a.clone().requires_grad_(), b))
    assert "parameter 'A'" in text
    assert "requires a gradient, which would be lost" in text
    assert kernel.local(a, b).eq(8).all()
