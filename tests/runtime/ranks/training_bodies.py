"""Training on real ranks: the bits of the virtual mesh; state that is saved by some ranks and loaded by others."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import mesh_tensor as mt
from tests.other_machines import WORK_COUNTS
from tests.refusals import refusal

from .support import pure

DATA = {"x": {"data": 0}, "target": {"data": 0}}


class MLP(nn.Module):
    """Whose weights are not all split evenly."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, 20), nn.LayerNorm(20), nn.Linear(20, 8)

    def forward(self, x):
        return self.down(F.dropout(F.gelu(self.norm(self.up(x))), 0.1, self.training))


class Rooted(nn.Module):
    """The gradient of `root` is not finite where it is 0, though the loss is."""

    def __init__(self):
        super().__init__()
        self.layer, self.root = nn.Linear(12, 8), nn.Parameter(torch.tensor([0.0, 1.0, 1.0, 1.0]))

    def forward(self, x, target):
        return F.cross_entropy(self.layer(x), target) + torch.sqrt(self.root.abs()).mean()


def not_finite_on_one_rank(rank, size):
    """Only one rank's part of one gradient is not finite; all refuse, keep their state, and can go on."""
    torch.manual_seed(2)
    x, y = torch.randn(12, 12), torch.randint(0, 8, (12,))
    step = mt.training_step(Rooted(), None, (x, y), optimizer="sgd", check=False)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    run = mt.distribute_module(step, mesh, DATA | {"root": {"data": 0}})
    before = run.state_dict()
    message = refusal(lambda: run(x, y))
    assert "those of 'root'" in message
    after = run.state_dict()
    assert all(torch.equal(pure(after[name]), pure(before[name])) for name in before)
    whole = run.state_dict(full=True)
    run.load_state_dict(whole | {"root": torch.ones(4)})
    assert run(x, y).isfinite()


def _step(zero):
    torch.manual_seed(2)
    model, x, y = MLP(), torch.randn(12, 12), torch.randint(0, 8, (12,))
    return mt.training_step(model, F.cross_entropy, (x, y), zero=zero, lr=0.05, check=False), x, y


def as_on_the_virtual_mesh(rank, size, zero, layout):
    """Losses and state, bit for bit; the state as DTensors and whole."""
    step, x, y = _step(zero)
    expected = mt.distribute_module(step, {"data": size}, DATA | layout)
    run = mt.distribute_module(step, init_device_mesh("cpu", (size,), mesh_dim_names=("data",)), DATA | layout)
    for _ in range(3):
        assert torch.equal(run(x, y), expected(x, y))
    whole, parts = expected.state_dict(), run.state_dict()
    for name, tensor in run.state_dict(full=True).items():
        assert torch.equal(pure(tensor), pure(whole[name])), name
    for name, part in parts.items():
        assert isinstance(part, DTensor) == (name != "opt.step"), name
        if isinstance(part, DTensor):
            assert torch.equal(part.full_tensor(), whole[name]), name
    message = refusal(lambda: run.load_state_dict({**parts, "wait": parts["up.bias"]}))
    assert "there is no 'wait'" in message


class Grouped(nn.Module):
    """Attention of four heads, of which two each share a head of keys."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        q, kv = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.kv))
        return self.o(F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True).transpose(1, 2).flatten(2))


def parts_of_an_axis(rank, size):
    """Two heads of keys on four ranks, in pairs: losses and state as on the virtual mesh."""
    torch.manual_seed(2)
    x, y = torch.randn(2, 2, 4, 8)
    step = mt.training_step(Grouped(), F.mse_loss, (x, y), optimizer="sgd", lr=0.1, check=False)
    layouts = {"q.weight": {"m": 0}, "kv.weight": {"m": 0}, "o.weight": {"m": 1}}
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("m",))
    expected, run = (mt.distribute_module(step, on, layouts, machine=WORK_COUNTS) for on in ({"m": size}, mesh))
    for _ in range(2):
        assert torch.equal(run(x, y), expected(x, y))
    assert list(run.plan.graph.mesh) == ["m:(1)2", "m:(2)2"]
    whole, parts = expected.state_dict(), run.state_dict()
    for name, layout in layouts.items():
        assert parts[name].placements == (Shard(layout["m"]),)
        assert torch.equal(parts[name].full_tensor(), whole[name])
    run.load_state_dict(parts)
    assert torch.equal(run(x, y), expected(x, y))


def save(rank, size, folder):
    """Three steps; the state is saved by all ranks; the fourth step's loss comes back."""
    step, x, y = _step(1)
    run = mt.distribute_module(step, init_device_mesh("cpu", (size,), mesh_dim_names=("data",)), DATA)
    for _ in range(3):
        run(x, y)
    checkpoint.save(run.state_dict(), checkpoint_id=folder)
    return run(x, y).item()


def load(rank, size, folder):
    """The fourth step's loss, from the state that other ranks saved."""
    step, x, y = _step(1)
    run = mt.distribute_module(step, init_device_mesh("cpu", (size,), mesh_dim_names=("data",)), DATA)
    state = run.state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    run.load_state_dict(state)
    assert run.steps == 3
    kept = {name: tensor.to_local().clone() for name, tensor in state.items() if isinstance(tensor, DTensor)}
    losses = [run(x, y).item() for _ in range(3)]
    for name, local in kept.items():
        assert torch.equal(state[name].to_local(), local), name  # which is not overwritten
    run.load_state_dict(state)
    assert [run(x, y).item() for _ in range(3)] == losses
    return losses[0]
