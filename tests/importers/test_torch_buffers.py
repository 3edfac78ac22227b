"""Buffers as parameters: laid out by name, read, replaced; never trained."""

import pytest
import torch
from torch import nn

import mesh_tensor as mt


class Model(nn.Module):
    """A batch norm, a table of positions, a count that nothing uses, and a buffer that `state_dict()` has not."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8)
        self.register_buffer("table", torch.randn(10, 8))
        self.register_buffer("places", torch.randint(10, (6,)))
        self.register_buffer("scale", torch.rand(1), persistent=False)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        return self.norm(self.conv(x)).transpose(1, 2) * self.scale + self.table[self.places]


X = torch.randn(4, 4, 8)
LAYOUT = {"norm.running_*": {"x": 0}, "table": {"x": 1}, "conv.weight": {"x": 0}}


@pytest.fixture(scope="module")
def made():
    model = Model().eval()
    return model, mt.from_torch(torch.export.export(model, (X,)), buffers=True)


def test_they_are_laid_out_and_read(made):
    model, module = made
    run = mt.distribute_module(module, {"x": 2}, LAYOUT)
    for _ in range(2):
        torch.testing.assert_close(run.state_dict(), dict(model.state_dict()))
        torch.testing.assert_close(run(X), model(X).detach(), rtol=1e-5, atol=1e-5)
    held = run.state_dict(full=False)
    assert {name: str(held[name].sharding) for name in ("table", "norm.running_var")} == {
        "table": "S[1]",
        "norm.running_var": "S[0]",
    }


def test_they_are_replaced(made):
    other = Model().eval()
    run = mt.distribute_module(made[1], {"x": 2}, LAYOUT)
    run(X)
    run.load_state_dict(other.state_dict())
    other.scale.copy_(made[0].scale)
    torch.testing.assert_close(run(X), other(X).detach(), rtol=1e-5, atol=1e-5)
    run.load_state_dict({"places": torch.full((6,), 10)}, strict=False)
    with pytest.raises(mt.MeshTensorError, match="'places' has elements from 10 to 10"):
        run(X)


def test_weights_may_be_a_state_dict(made):
    model, module = made
    run = mt.distribute_module(module.mod, {"x": 3}, LAYOUT, weights=model.state_dict())
    torch.testing.assert_close(run(X), model(X).detach(), rtol=1e-5, atol=1e-5)


def test_they_are_constants_unless_asked_for(made):
    module = mt.from_torch(torch.export.export(made[0], (X,)))
    assert sorted(module.params) == ["conv_bias", "conv_weight", "norm_bias", "norm_weight"]
    assert not module.buffers


def test_a_state_dict_with_what_became_constants():
    """Buffers that are as they were are passed over; weights of others come with other buffers."""
    model, other = Model().eval(), Model().eval()
    module = mt.from_torch(torch.export.export(model, (X,)))
    state = model.state_dict()
    run = mt.distribute_module(module, {"x": 2}, {"conv.weight": {"x": 0}}, weights=state, donate=True)
    assert not state
    torch.testing.assert_close(run(X), model(X).detach(), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        model.conv.weight.mul_(2)
    run.load_state_dict({f"module.{name}": tensor for name, tensor in model.state_dict().items()})
    torch.testing.assert_close(run(X), model(X).detach(), rtol=1e-5, atol=1e-5)
    message = (
        "'table', 'places', 'norm.running_mean', 'norm.running_var' have other values than the module's constants\n"
        "  where: weights of an imported module\n"
        "  why: buffers that nothing writes became constants when the model was imported\n"
        "  fix: import the model again, or its buffers as weights: mt.from_torch(program, buffers=True)"
    )
    for refused in (run.load_state_dict, lambda weights: mt.distribute_module(module, {"x": 2}, weights=weights)):
        with pytest.raises(mt.MeshTensorError) as raised:
            refused(other.state_dict())
        assert str(raised.value) == message
    torch.testing.assert_close(run(X), model(X).detach(), rtol=1e-5, atol=1e-5)


def test_they_are_not_trained():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)
            self.register_buffer("center", torch.randn(3))

        def forward(self, x):
            return (self.inner(x) - self.center).square().mean()

    model, x = Loss(), torch.randn(6, 4)
    module = mt.from_torch(torch.export.export(model, (x,)), buffers=True)
    run = mt.distribute_module(mt.training_step(module, None, (x,), optimizer="sgd", lr=0.5), {"x": 2})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(4):
        loss = model(x)
        torch.testing.assert_close(run(x), loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with pytest.raises(mt.MeshTensorError, match="train=True would train the buffers 'center'"):
        mt.pipeline(module, {"m": {"x": 1}}, ["inner"], microbatches=2, train=True)


def test_statistics_that_are_zero_but_for_rounding():
    """The mean of what comes after a batch norm: torch and TVM round it differently."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(8), nn.BatchNorm1d(16)]
    model = nn.Sequential(nn.Linear(8, 8), norms[0], nn.Linear(8, 16, bias=False), norms[1])
    x, y = torch.randn(8, 8), torch.randn(8, 16)
    run = mt.distribute_module(mt.training_step(model, nn.functional.mse_loss, (x, y), optimizer="sgd"), {"x": 2})
    torch.testing.assert_close(run(x, y), nn.functional.mse_loss(model(x), y).detach())
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(run.state_dict()[f"3.{name}"], getattr(norms[1], name), rtol=1e-5, atol=1e-7)
