"""Rules of updates: torch's optimizers, written out, are torch's; a weight is updated once; no weight is refused."""

import math

import pytest
import torch
from torch import nn

import mesh_tensor as mt
from mesh_tensor import MeshTensorError
from tests.api.pipeline.models import chain, chain_loss

TOPOLOGY = {"m0": {"d": 2, "m": 2}, "m1": {"d": 3}}
LAYOUTS = {"x": {"d": 0}, "w0": {"d": 0}, "w1": {"m": 1}, "w2": {"d": 1}}


def moments(gradient, state):
    step = state["step"] = state.get("step", 0) + 1
    mean = state["mean"] = torch.lerp(state.get("mean", torch.zeros_like(gradient)), gradient, 0.1)
    square = state["square"] = 0.999 * state.get("square", 0.0) + 0.001 * gradient * gradient
    return step, mean, square / (1 - 0.999**step)


def adamw(weight, gradient, state):
    step, mean, square = moments(gradient, state)
    kept = weight * (1 - 0.01 * 0.1) if weight.ndim > 1 else weight
    return kept - 0.01 / (1 - 0.9**step) * mean / (square.sqrt() + 1e-8)


def amsgrad(weight, gradient, state):
    step, mean, _ = moments(gradient, state)
    most = state["most"] = torch.maximum(state["most"], state["square"]) if "most" in state else state["square"]
    return weight - 0.01 / (1 - 0.9**step) * mean / (most.sqrt() / math.sqrt(1 - 0.999**step) + 1e-8)


def nadam(weight, gradient, state):
    step, mean, square = moments(gradient, state)
    now, later = (0.9 * (1 - 0.5 * 0.96 ** (at * 4e-3)) for at in (step, step + 1))
    product = state["product"] = state.get("product", 1.0) * now
    both = gradient * (1 - now) / (1 - product) + mean * later / (1 - product * later)
    return weight - 0.01 * both / (square.sqrt() + 1e-8)


def rmsprop(weight, gradient, state):
    square = state["square"] = 0.99 * state.get("square", 0.0) + 0.01 * gradient * gradient
    return weight - 0.01 * gradient / (square.sqrt() + 1e-8)


def adagrad(weight, gradient, state):
    total = state["total"] = state.get("total", 0.0) + gradient * gradient
    return weight - 0.01 * gradient / (total.sqrt() + 1e-10)


def nesterov(weight, gradient, state):
    momentum = state["momentum"] = 0.9 * state.get("momentum", 0.0) + gradient
    return weight - 0.1 * (gradient + 0.9 * momentum)


def rprop(weight, gradient, state):
    sign = torch.sign(gradient * state.get("before", torch.zeros_like(gradient)))
    factor = torch.where(sign > 0, 1.2, torch.where(sign < 0, 0.5, 1.0))
    size = state["size"] = torch.clamp(state.get("size", torch.zeros_like(gradient) + 0.01) * factor, 1e-6, 50)
    state["before"] = gradient = torch.where(sign < 0, torch.zeros_like(gradient), gradient)
    return weight - size * gradient.sign()


OPTIMIZERS = {
    adamw: lambda weights: torch.optim.AdamW(weights, 0.01, weight_decay=0.1),
    amsgrad: lambda weights: torch.optim.Adam(weights, 0.01, amsgrad=True),
    nadam: lambda weights: torch.optim.NAdam(weights, 0.01),
    rmsprop: lambda weights: torch.optim.RMSprop(weights, 0.01),
    adagrad: lambda weights: torch.optim.Adagrad(weights, 0.01),
    nesterov: lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9, nesterov=True),
    rprop: lambda weights: torch.optim.Rprop(weights, 0.01),
}


@pytest.fixture(scope="module")
def made():
    """Weights, and a pipeline that has these again for each test."""
    torch.manual_seed(0)
    module, weights = chain()
    return weights, mt.pipeline(module, TOPOLOGY, ["layer1"], LAYOUTS, microbatches=4, schedule="zb-h1", train=True)


@pytest.fixture
def fresh(made):
    made[1].load_state_dict(made[0])
    return made


@pytest.mark.parametrize("rule", OPTIMIZERS, ids=[rule.__name__ for rule in OPTIMIZERS])
def test_optimizers(fresh, rule):
    """Three steps; two stages have one of the weights, in other layouts."""
    weights, run = fresh
    leaves = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
    optimizer = OPTIMIZERS[rule](leaves.values())
    for _ in range(3):
        x, y = torch.randn(12, 6), torch.randn(12, 6)
        optimizer.zero_grad()
        loss = chain_loss(leaves, x, y)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(run(x, y), loss.detach(), rtol=1e-5, atol=1e-6)
        run.update(rule)
    for name, weight in run.weights().items():
        torch.testing.assert_close(weight, leaves[name].detach(), rtol=1e-4, atol=2e-5, msg=name)


def test_a_weight_of_several_stages_is_updated_once(fresh):
    """A rule that makes another number each time, and counts: all stages have what it made of the weight, and go on
    with what it keeps after loading."""
    _, run = fresh
    calls = []

    def noisy(weight, gradient, state):
        calls.append(1)
        state["noise"] = gradient * float(torch.rand(()))
        return weight - state["noise"]

    x, y = torch.randn(12, 6), torch.randn(12, 6)
    for again in range(2):
        run(x, y)
        run.update(noisy)
        assert len(calls) == 3 * (again + 1)
        now = run.weights()
        torch.testing.assert_close(run(x, y), chain_loss(now, x, y))
        run.load_state_dict(run.state_dict())
    assert {name for name in run.state_dict() if name.startswith("update.")} == {f"update.noise.{name}" for name in now}


@pytest.mark.parametrize(
    "rule",
    [
        lambda weight, gradient, state: weight * 1j,
        lambda weight, gradient, state: weight > gradient,
        lambda weight, gradient, state: weight.full(),
        lambda weight, gradient, state: None,
    ],
    ids=["complex", "bool", "whole", "nothing"],
)
def test_what_is_no_weight_is_refused(fresh, rule):
    _, run = fresh
    run(torch.randn(12, 6), torch.randn(12, 6))
    before = run.weights()
    with pytest.raises(MeshTensorError, match=r"the rule makes .* of the weight '.*', which is MeshTensor"):
        run.update(rule)
    assert all(torch.equal(before[name], now) for name, now in run.weights().items())
