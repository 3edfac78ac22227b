"""Steps of a model that enters autocast: parameters in float32, products in 16 bits, beside torch's own."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor.api import training_checks
from mesh_tensor.program.steps import CollectiveStep


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, 20), nn.LayerNorm(20), nn.Linear(20, 8)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.down(F.gelu(self.norm(self.up(x)))).float()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("asked", [{}, {"accumulate": 3, "loss_scale": 64.0}])
def test_trains_as_torch_does(asked):
    torch.manual_seed(0)
    model, x, y = Mixed(), torch.randn(12, 12), torch.randint(0, 8, (12,))
    step = mt.training_step(model, F.cross_entropy, (x, y), optimizer="sgd", lr=0.5, **asked)
    run = mt.distribute_module(step, {"data": 2}, {"x": {"data": 0}, "target": {"data": 0}})
    found = [run(x, y).item() for _ in range(3)]
    theirs = copy.deepcopy(model)
    optimizer, losses = torch.optim.SGD(theirs.parameters(), lr=0.5), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(F.cross_entropy(theirs(x), y))
        losses[-1].backward()
        optimizer.step()
    assert found == pytest.approx([loss.item() for loss in losses], rel=5e-3)
    for name, parameter in theirs.named_parameters():
        assert run.state_dict()[name].dtype == torch.float32
        torch.testing.assert_close(run.state_dict()[name], parameter.detach(), rtol=2e-2, atol=5e-3)
    kinds = {step.kind for step in run.program.steps if isinstance(step, CollectiveStep)}
    assert kinds == {"all_reduce"}  # of gradients: activations stay where they are


def test_recorded_under_autocast():
    torch.manual_seed(0)
    model, x, y = (
        nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 8)),
        torch.randn(12, 12),
        torch.arange(12) % 8,
    )
    theirs = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = mt.training_step(model, F.cross_entropy, (x, y), optimizer="sgd", lr=0.5)
    run = mt.distribute_module(step, {"data": 2}, {step.mod["main"].params[0].name_hint: {"data": 0}})
    found = [run(x, y).item() for _ in range(3)]
    optimizer, losses = torch.optim.SGD(theirs.parameters(), lr=0.5), []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(F.cross_entropy(theirs(x), y))
        losses[-1].backward()
        optimizer.step()
    exact = F.cross_entropy(copy.deepcopy(model)(x), y).item()
    assert found == pytest.approx([loss.item() for loss in losses], rel=1e-3)
    assert found[0] != pytest.approx(exact, rel=1e-6)  # it is in 16 bits


class Beside(nn.Module):
    """Of its loss, a small part alone is computed in 16 bits."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            beside = self.narrow(x).float()
        return self.wide(x) + beside * 1e-3


def test_what_16_bits_have_no_part_in_is_compared_as_ever(monkeypatch):
    torch.manual_seed(0)
    example = torch.randn(4, 12), torch.randint(0, 8, (4,))
    mt.training_step(Beside(), F.cross_entropy, example, optimizer="sgd")
    made = training_checks.run_sequential
    monkeypatch.setattr(
        training_checks, "run_sequential", lambda *given: (made(*given)[0], [g * 1.02 for g in made(*given)[1]])
    )
    with pytest.raises(mt.MeshTensorError, match="the gradient of 'wide_weight' differs by"):
        mt.training_step(Beside(), F.cross_entropy, example, optimizer="sgd")


def test_another_gradient_is_refused_all_the_same(monkeypatch):
    made = training_checks.run_sequential
    monkeypatch.setattr(
        training_checks, "run_sequential", lambda *given: (made(*given)[0], [g * 1.2 for g in made(*given)[1]])
    )
    example = torch.randn(4, 12), torch.randint(0, 8, (4,))
    with pytest.raises(mt.MeshTensorError, match="the gradient of 'up_weight' differs by"):
        mt.training_step(Mixed(), F.cross_entropy, example, optimizer="sgd")
