"""Gradients of modules on ranks: of DTensors, of whole tensors, and refused on all ranks if on one."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import mesh_tensor as mt
from tests.refusals import refusal


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, 10), nn.LayerNorm(10), nn.Linear(10, 8)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.norm(self.up(x))))


LAYOUTS = {
    "data": {"x": {"x": 0}},
    "model": {"up.weight": {"x": 0}, "down.weight": {"x": 1}},
}


def gradients(rank, size):
    """As torch's, lying as the DTensors that they are gradients of; whole for whole tensors; an optimizer goes on."""
    torch.manual_seed(0)
    model, x, seed = MLP(), torch.randn(7, 12), torch.randn(7, 8)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    imported = mt.from_torch(torch.export.export(model, (x,)))
    x.requires_grad_()
    wanted = torch.autograd.grad(model(x), [x, *model.parameters()], seed)
    for layout in LAYOUTS.values():
        run = mt.distribute_module(imported, mesh, layout, weights={})
        params = dict(model.named_parameters())
        whole = torch.autograd.grad(run(x, **params), [x, *params.values()], seed)
        torch.testing.assert_close(whole, wanted)
        for placements in ([Shard(0)], [Replicate()]):
            parts = [distribute_tensor(tensor.detach(), mesh, placements) for tensor in (x, *params.values())]
            for part in parts:
                part.requires_grad_()
            out = run(parts[0], **dict(zip(params, parts[1:], strict=True)))
            (out * distribute_tensor(seed, mesh, [Replicate()])).sum().backward()
            assert all(part.grad.placements == part.placements for part in parts)
            torch.testing.assert_close(tuple(part.grad.full_tensor() for part in parts), wanted)
    return [float(gradient.sum()) for gradient in whole]


def refused_on_one(rank, size):
    """A call that is refused on one rank is refused on all, and they can go on."""
    torch.manual_seed(0)
    x = torch.randn(7, 12)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    run = mt.distribute_module(mt.from_torch(torch.export.export(MLP(), (x,))), mesh, LAYOUTS["data"])
    for _ in range(2):
        given = torch.randn(7, 12 if rank else 13).requires_grad_()
        assert "(7, 13)" in refusal(lambda: run(given))  # noqa: B023
        mt.resume(mesh)
        good = x.clone().requires_grad_()
        run(good).sum().backward()
        assert good.grad.abs().sum() > 0
    lone = x.clone().requires_grad_() if rank else x
    assert "rank" in refusal(lambda: run(lone))
