"""What ranks export of models with `torch.distributed`'s own calls in them, beside what these compute by themselves."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import mesh_tensor as mt
from tests.refusals import refusal


class Megatron(nn.Module):
    """Columns, then rows, and a softmax over split features."""

    def __init__(self, ranks):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16 // ranks), nn.Linear(16 // ranks, 8, bias=False)

    def forward(self, x):
        hidden = self.up(x)
        most = hidden.amax(-1, keepdim=True)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        powers = (hidden - most).exp()
        total = powers.sum(-1, keepdim=True)
        dist.all_reduce(total)
        made = self.down(powers / total)
        dist.all_reduce(made)
        return made


class Vocabulary(nn.Module):
    """A table split by rows, of which a rank knows where its own begin."""

    def __init__(self, ranks, start):
        super().__init__()
        self.rows, self.table = 16 // ranks, nn.Parameter(torch.randn(16 // ranks, 4))
        self.start = start

    def forward(self, ids):
        there = (ids >= self.start) & (ids < self.start + self.rows)
        made = F.embedding((ids - self.start).where(there, 0), self.table) * there.unsqueeze(-1)
        dist.all_reduce(made)
        return made


def exported(rank):
    """Megatron's layers are as on ranks, exported either way; what a rank has in its program alone is refused."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("t",))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(rank)
    model, dims = Megatron(ranks), {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    run = distributed(model, x, dims, mesh)
    torch.testing.assert_close(run(x), model(x).detach(), rtol=1e-5, atol=1e-6)
    assert [step.kind for step in run.program.collectives] == ["all_reduce"] * 3
    ids = torch.randint(0, 16, (4, 3), generator=torch.Generator().manual_seed(0))
    alone = Vocabulary(ranks, 16 // ranks * rank)
    return refusal(lambda: distributed(alone, ids, {"table": 0}, mesh)(ids))


def distributed(model, x, dims, mesh):
    """The program of this rank as a module, with the weights of all."""
    group, weights = dist.group.WORLD, {}
    for name, parameter in model.named_parameters():
        tiles = [torch.empty_like(parameter.detach()) for _ in range(mesh.size())]
        dist.all_gather(tiles, parameter.detach())
        weights[name] = torch.cat(tiles, dims[name])
    layouts = {name: {"t": dim} for name, dim in dims.items()}
    program = torch.export.export(model.eval(), (x,))
    module = mt.from_torch_rank(program, {"t": mesh.size()}, {group.group_name: "t"}, layouts, {}, weights=weights)
    return mt.distribute_module(module, mesh, layouts)
