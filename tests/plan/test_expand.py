"""Norms over split features, and attention whose mask looks at split positions, are taken apart: nothing large is
gathered, and gradients take what the norm has."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from tests.other_machines import machine

from . import modules

SPLIT = {"up.weight": {"m": 0}, "up.bias": {"m": 0}, "down.weight": {"m": 1}}


def kinds(plan):
    return [kind for kind in modules.kinds(plan) if kind != "slice"]


class SubNorm(nn.Module):
    """A norm between the layers of a pair."""

    def __init__(self, norm, hidden=24):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, hidden), nn.Linear(hidden, 4), norm(hidden)

    def forward(self, x):
        return self.down(self.norm(self.up(x) + 3))


def stepped(model, inputs, mesh, stated):
    """One step beside torch's; the run."""
    step = mt.training_step(copy.deepcopy(model), F.mse_loss, inputs, optimizer="sgd", lr=0.1, check=False)
    with machine(1):
        run = mt.distribute_module(step, mesh, stated, poison=True)
    loss = F.mse_loss(model(*inputs[:-1]), inputs[-1])
    loss.backward()
    torch.testing.assert_close(run(*inputs), loss.detach(), rtol=1e-4, atol=1e-4)
    state = run.state_dict()
    for name, value in model.named_parameters():
        wanted = (value - 0.1 * value.grad).detach()
        torch.testing.assert_close(state[name], wanted, rtol=1e-4, atol=1e-4)
    return run


@pytest.mark.parametrize(("norm", "sums"), [(nn.LayerNorm, 2), (nn.RMSNorm, 1)])
@pytest.mark.parametrize("devices", [2, 5])
def test_norms_over_split_features(norm, sums, devices):
    torch.manual_seed(0)
    model, x = SubNorm(norm), torch.randn(6, 4)
    nn.init.normal_(model.norm.weight)
    module = mt.from_torch(torch.export.export(model.eval(), (x,)), check=False)
    with machine(1):
        run = mt.distribute_module(module.mod, {"m": devices}, SPLIT, weights=module.params, poison=True)
    assert kinds(run.plan) == ["all_reduce"] * (sums + 1)
    torch.testing.assert_close(run(x), model(x).detach(), rtol=1e-4, atol=1e-4)
    run = stepped(model, (x, torch.randn(6, 4)), {"m": devices}, SPLIT)
    assert kinds(run.plan) == ["all_reduce"] * (2 * sums + 1)  # what the norm knows of its rows is not summed again


def test_norms_in_low_precision():
    torch.manual_seed(0)
    model, x = SubNorm(nn.LayerNorm, 64).to(torch.bfloat16), torch.randn(8, 4, dtype=torch.bfloat16)
    module = mt.from_torch(torch.export.export(model.eval(), (x,)), check=False)
    with machine(1):
        run = mt.distribute_module(module.mod, {"m": 2}, SPLIT, weights=module.params)
    assert kinds(run.plan) == ["all_reduce"] * 3
    exact = copy.deepcopy(model).double()(x.double()).detach()
    own = (model(x).detach() - exact).abs().max()
    assert (run(x) - exact).abs().max() <= 2 * own


class OneRow(nn.Module):
    """A norm of one dim: the gradient of what is added is the result's."""

    def __init__(self):
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.randn(64)), nn.LayerNorm(64)

    def forward(self, x):
        return self.norm(self.scale * x)


def test_norm_of_one_dim():
    torch.manual_seed(0)
    layouts = {name: {"m": 0} for name in ("scale", "norm.weight", "norm.bias", "x")}
    stepped(OneRow(), (torch.randn(64), torch.randn(64)), {"m": 3}, layouts)


class Attention(nn.Module):
    """Queries see keys up to their own position; fewer heads of keys than of queries."""

    def __init__(self, heads=4, key_heads=2):
        super().__init__()
        self.q, self.kv = nn.Linear(8, heads * 4), nn.Linear(8, 2 * key_heads * 4)
        self.last, self.each = nn.Linear(heads * 4, 8), heads // key_heads

    def forward(self, x):
        q, (k, v) = self.q(x), self.kv(x).chunk(2, -1)
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (q, k, v))
        k, v = (part.repeat_interleave(self.each, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.last(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("positions", "devices"), [(12, 4), (11, 3), (3, 4)])
def test_positions_of_causal_attention(positions, devices):
    """Keys and values are gathered as they are, not as often as heads of queries share them; queries stay."""
    torch.manual_seed(0)
    model, x, mesh = Attention(), torch.randn(2, positions, 8), {"c": devices}
    module = mt.from_torch(torch.export.export(model.eval(), (x,)), check=False)
    run = mt.distribute_module(module.mod, mesh, {"x": {"c": 1}}, weights=module.params, poison=True)
    torch.testing.assert_close(run(x), model(x).detach(), rtol=1e-4, atol=1e-5)
    gathered = 2 * positions * 8 * 4 * (devices - 1) // devices  # of the keys; values are as many
    if positions % devices == 0:
        assert kinds(run.plan) == ["all_gather"] * 2
        assert sum(getattr(step, "bytes", 0) for step in run.program.steps) == 2 * gathered
    run = stepped(model, (x, torch.randn(2, positions, 8)), mesh, {"x": {"c": 1}, "target": {"c": 1}})
    if positions % devices == 0:
        assert kinds(run.plan).count("all_gather") == 2
        moved = [step.bytes for step in run.program.steps if getattr(step, "kind", "") == "reduce_scatter"]
        assert sum(moved) == 2 * gathered  # gradients of what heads share are summed on each device first


def test_gathered_before_it_is_made_wider():
    """What is in fewer bits is sent."""

    class Wide(nn.Module):
        def forward(self, x, w):
            return x.float() @ w.float()

    x, w = torch.randn(64, 8, dtype=torch.bfloat16), torch.randn(8, 512, dtype=torch.bfloat16)
    module = mt.from_torch(torch.export.export(Wide(), (x, w)), check=False)
    run = mt.distribute_module(module.mod, {"d": 2}, {"x": {"d": 0}, "w": {"d": 1}}, poison=True)
    (moved,) = [step for step in run.program.steps if getattr(step, "kind", "") == "all_gather"]
    assert moved.bytes == x.nbytes // 2
    torch.testing.assert_close(run(x, w), x.float() @ w.float())
