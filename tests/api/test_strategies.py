"""Strategies give the layouts that people state by hand, and the collectives that they are known for."""

import cProfile
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from kernels.models import gpt2, llama
from mesh_tensor import strategies
from mesh_tensor.program.steps import CollectiveStep
from tests.refusals import refusal

CONFIG = gpt2.Config()
PARAMETERS = 37


def _loss(logits, target):
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1))


def _step(models, **options):
    torch.manual_seed(0)
    config = models.Config()
    model, (ids,) = models.build(config), models.example_inputs(config)
    target = torch.randint(config.vocabulary, ids.shape)
    step = mt.training_step(model, _loss, (ids, target), check=False, lr=0.02, **options)
    return model, (ids, target), step


@pytest.fixture(scope="module")
def gpt():
    return _step(gpt2)


def _collectives(step, mesh, layouts, overlap="off"):
    run = mt.distribute_module(step, mesh, layouts, overlap=overlap)
    steps = [s for s in run.program.steps if isinstance(s, CollectiveStep) and s.kind != "slice"]
    return Counter((s.kind, *s.axes) for s in steps)


def test_tensor_parallel_finds_what_is_stated_by_hand(gpt):
    assert strategies.tensor_parallel(gpt[2]) == gpt2.tensor_parallel(CONFIG, "model")


def test_tensor_parallel_of_gated_layers():
    _, _, step = _step(llama)
    found = strategies.tensor_parallel(step, "x")
    assert found["layers.1.mlp.gate_proj.weight"] == {"x": 0} == found["layers.1.mlp.up_proj.weight"]
    assert found["layers.1.mlp.down_proj.weight"] == {"x": 1} == found["layers.0.attn.o_proj.weight"]
    assert _collectives(step, {"x": 2}, found) == {("all_reduce", "x"): 8}


@pytest.mark.parametrize(
    ("mesh", "make", "expected"),
    [
        ({"data": 2}, ["data"], {("all_reduce", "data"): PARAMETERS + 2}),  # and the loss, and its number of targets
        ({"model": 2}, ["tensor"], {("all_reduce", "model"): 8}),
        (
            {"data": 2, "model": 2},
            ["data", "tensor"],
            {("all_reduce", "model"): 8, ("all_reduce", "data"): PARAMETERS + 2},
        ),
        (
            {"model": 2},
            # Norms and biases see a part of the positions only: their gradients are summed. That of the table of
            # positions is gathered.
            ["tensor", "sequence"],
            {("all_gather", "model"): 8 + 1, ("reduce_scatter", "model"): 8, ("all_reduce", "model"): 10 + 5 + 1 + 2},
        ),
    ],
    ids=["data", "tensor", "data x tensor", "sequence"],
)
def test_collectives_of_two_layers(gpt, mesh, make, expected):
    layouts = {
        "data": strategies.data_parallel(gpt[2]),
        "tensor": strategies.tensor_parallel(gpt[2]),
        "sequence": strategies.sequence_parallel(gpt[2]),
    }
    assert _collectives(gpt[2], mesh, strategies.combine(*(layouts[name] for name in make))) == expected


def test_zero_on_top(gpt):
    data = strategies.data_parallel(gpt[2])
    # Of the table of positions, what was looked up is summed, before each device adds it to its rows.
    sums = {("reduce_scatter", "data"): PARAMETERS - 1, ("all_reduce", "data"): 2 + 1}
    expected = sums | {("all_gather", "data"): PARAMETERS}
    for level in (1, 2):
        assert _collectives(strategies.zero(gpt[2], level), {"data": 2}, data) == expected
    third = _collectives(strategies.zero(gpt[2], 3), {"data": 2}, data)
    assert third.pop(("all_gather", "data")) <= PARAMETERS + 17  # weights once more on the way back
    assert third == sums


def test_gradients_go_together(gpt):
    data = strategies.data_parallel(gpt[2])
    assert _collectives(gpt[2], {"data": 2}, data, "auto") == {("all_reduce", "data"): 2}
    first = {("reduce_scatter", "data"): 1, ("all_gather", "data"): 1, ("all_reduce", "data"): 2}
    assert _collectives(strategies.zero(gpt[2], 1), {"data": 2}, data, "auto") == first


def _layouts(step, name):
    data, tensor = strategies.data_parallel(step), strategies.tensor_parallel(step, vocabulary=True)
    return {
        "data, sequence": strategies.combine(data, tensor, strategies.sequence_parallel(step, also={"data": 0})),
        "data, tensor, context": strategies.combine(data, tensor, strategies.context_parallel(step)),
        "data, zero 3": data,
    }[name]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("data, sequence", {"data": 2, "model": 2}),
        ("data, tensor, context", {"data": 2, "model": 2, "context": 2}),
        ("data, zero 3", {"data": 3}),
    ],
)
def test_steps_on_several_axes(gpt, name, mesh):
    model, batch, step = gpt
    step = strategies.zero(step, 3 if "zero" in name else 0)
    run = mt.distribute_module(step, mesh, _layouts(step, name), poison=True)
    theirs = gpt2.build(CONFIG)
    theirs.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.02)
    for _ in range(3):
        optimizer.zero_grad()
        loss = _loss(theirs(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(run(*batch), loss.detach(), rtol=0, atol=1e-5)
    state = run.state_dict()
    for key, parameter in theirs.named_parameters():
        if not key.endswith("attn.k.bias"):  # its gradient is 0 but for rounding, which AdamW makes large
            torch.testing.assert_close(state[key], parameter.detach(), rtol=0, atol=1e-4)


def test_experts():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(4, 6, 8)), nn.Parameter(torch.randn(4, 8, 6))

        def forward(self, x):
            return (torch.bmm(torch.relu(torch.bmm(x.expand(4, -1, -1), self.up)), self.down)).square().mean()

    x = torch.randn(5, 6)
    step = mt.training_step(Experts(), None, (x,), optimizer="sgd")
    layouts = strategies.expert_parallel(step, ["up", "down"])
    assert layouts == {"up": {"expert": 0}, "down": {"expert": 0}}
    assert _collectives(step, {"expert": 2}, layouts) == {("all_reduce", "expert"): 1}
    with pytest.raises(mt.MeshTensorError, match="'upp'"):
        strategies.expert_parallel(step, ["upp"])


def test_refused():
    x = torch.randn(4, 3)
    module = mt.from_torch(torch.export.export(nn.Linear(3, 2), (x,)))
    with pytest.raises(mt.MeshTensorError, match="no linear layers meet again"):
        strategies.tensor_parallel(module)
    with pytest.raises(mt.MeshTensorError, match="no input has a dim 4"):
        strategies.data_parallel(module, dim=4)
    with pytest.raises(mt.MeshTensorError, match="axis 'x' splits dims 0 and 1"):
        strategies.combine({"w": {"x": 0}}, {"w": {"x": 1}})
    with pytest.raises(mt.MeshTensorError, match="a strategy takes an IRModule"):
        strategies.data_parallel(nn.Linear(2, 2))


def _calls_of_plan(layers):
    """How many functions are called to distribute a step of so many layers."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    x = torch.randn(4, 8)
    step = mt.training_step(model, F.mse_loss, (x, x), check=False)
    profile = cProfile.Profile()
    profile.runcall(mt.distribute_module, step, {"data": 2}, strategies.data_parallel(step))
    return sum(entry.callcount for entry in profile.getstats())


def test_planning_is_linear_in_layers():
    few, some, many = (_calls_of_plan(layers) for layers in (20, 40, 80))
    assert many - some < 2.2 * (some - few)


def test_what_is_no_layouts_is_not_combined():
    with pytest.raises(mt.MeshTensorError, match="None is no layouts"):
        strategies.combine({"x": {"data": 0}}, None)


def test_a_step_is_no_layouts():
    """That is what zero gives, beside strategies that give layouts."""
    x = torch.randn(4, 3)
    step = mt.training_step(nn.Linear(3, 3), F.mse_loss, (x, x), check=False)
    data = strategies.data_parallel(step)
    message = refusal(lambda: strategies.combine(data, strategies.zero(step, 1)))
    assert "TrainingStep(input, target; 2 parameters) is no layouts" in message
    assert "fix: distribute the step that zero gives, with these layouts" in message
    message = refusal(lambda: mt.distribute_module(step, {"data": 2}, strategies.zero(step, 1)))
    assert "a training step where layouts are expected" in message
    assert "distribute_module(strategies.zero(step, level), mesh, strategies.data_parallel(step))" in message
    with pytest.raises(mt.MeshTensorError, match="the shardings are 'data', which is no dict from names"):
        mt.distribute_module(step, {"data": 2}, "data")
