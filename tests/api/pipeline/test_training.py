"""Pipelines that train: loss and gradients of the whole model, whatever the schedule, the cut and the meshes."""

import pytest
import torch
from torch import nn

import mesh_tensor as mt
from tests.api.pipeline.models import Net, batch, chain, chain_loss, imported

TOPOLOGY = {"m0": {"d": 2, "m": 2}, "m1": {"d": 3}}
LAYOUTS = {"tokens": {"d": 0}, "labels": {"d": 0}, "*.fc.weight": {"m": 0}}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def module(model):
    return imported(model, 3)


def check(run, module, model, *inputs):
    """The pipeline's loss and gradients against the model's by torch."""
    loss = run(*inputs)
    wanted = model(*inputs)
    named = dict(model.named_parameters())
    by_torch = dict(zip(named, torch.autograd.grad(wanted, list(named.values())), strict=True))
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=1e-6)
    got = run.gradients()
    assert got.keys() == {module.names[name] for name in named}
    scale = max(gradient.abs().max() for gradient in by_torch.values())
    for name, gradient in by_torch.items():
        torch.testing.assert_close(got[module.names[name]] / scale, gradient / scale, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize(
    ("schedule", "cuts", "live"),
    [
        ("gpipe", ["blocks.0"], [4, 4]),
        ("1f1b", ["blocks.0"], [2, 1]),
        ("zb-h1", ["blocks.0"], [2, 2]),
        ("zb-h2", ["blocks.0"], [3, 3]),
        ("interleaved", ["embed", "blocks.0", "blocks.1"], [5, 3]),
        ("looped-bfs", ["embed", "blocks.0", "blocks.1"], [8, 8]),
        ("zbv", ["embed", "blocks.0", "blocks.1"], [4, 4]),
        ("dualpipev", ["embed", "blocks.0", "blocks.1"], [5, 5]),
        (
            mt.Schedule.of(["0F0 0F1 0F2 0B0 0B2 0F3 0B3 0B1", "1F0 1I0 1F1 1F2 1B2 1W0 1F3 1I3 1W3 1B1"]),
            ["blocks.1"],
            [3, 3],
        ),
    ],
)
def test_every_schedule(model, module, schedule, cuts, live):
    run = mt.pipeline(module, TOPOLOGY, cuts, LAYOUTS, microbatches=4, schedule=schedule, train=True)
    check(run, module, model, *batch(12))
    assert list(run.peak_microbatches.values()) == live


def test_what_is_held_is_freed_as_the_schedule_says(model, module):
    """1F1B holds 2 and 1 microbatches of what GPipe holds 4 of; recomputing, next to nothing."""
    made = {}
    for name, options in (("gpipe", {}), ("1f1b", {}), ("recompute", {"schedule": "1f1b", "recompute": True})):
        run = mt.pipeline(
            module, TOPOLOGY, ["blocks.0"], LAYOUTS, microbatches=4, train=True, **{"schedule": name, **options}
        )
        check(run, module, model, *batch(12))
        made[name] = run.peak_bytes
    assert made["1f1b"]["m0"] == made["gpipe"]["m0"] / 2
    assert made["1f1b"]["m1"] < made["gpipe"]["m1"] / 3.9
    assert made["recompute"]["m0"] < made["1f1b"]["m0"] / 10


@pytest.mark.parametrize(("schedule", "live"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [6] * 4), ("zb-h1", [4] * 4)])
def test_four_meshes_hold_as_many_microbatches_as_the_schedule_says(schedule, live):
    module, weights = chain(layers=5)
    topology = {f"m{i}": {"d": 1} for i in range(4)}
    cuts = ["layer0", "layer1", "layer2"]
    run = mt.pipeline(module, topology, cuts, microbatches=6, schedule=schedule, train=True)
    x, y = torch.randn(18, 6), torch.randn(18, 6)
    torch.testing.assert_close(run(x, y), chain_loss(weights, x, y))
    assert list(run.peak_microbatches.values()) == live
    one = mt.pipeline(module, topology, cuts, microbatches=1, schedule=schedule, train=True)
    one(x[:3], y[:3])
    sizes = [run.peak_bytes[mesh] / one.peak_bytes[mesh] for mesh in topology]
    assert all(size <= count for size, count in zip(sizes, live, strict=True))
    assert sizes[0] > live[0] - 1


def test_a_pipeline_trains_again_and_again(model, module):
    """What is left of one call has no influence on the next."""
    run = mt.pipeline(module, TOPOLOGY, ["blocks.0"], LAYOUTS, microbatches=4, schedule="zb-h1", train=True)
    for _ in range(3):
        check(run, module, model, *batch(12))


def test_tied_weights_get_the_sum_of_their_gradients():
    model = Net(tied=True)
    module = imported(model, 3)
    run = mt.pipeline(module, TOPOLOGY, ["blocks.0"], {"tokens": {"d": 0}}, microbatches=2, train=True)
    check(run, module, model, *batch(6))


def test_the_last_microbatch_may_be_smaller(model):
    module = imported(model, 4, open_size=True)
    run = mt.pipeline(module, TOPOLOGY, ["blocks.0"], LAYOUTS, microbatches=3, train=True)
    check(run, module, model, *batch(10))
    check(run, module, model, *batch(9))


class Skips(nn.Module):
    """A value goes over two stages, and one is used by two."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, y):
        one = self.a(x)
        two = torch.tanh(self.b(one))
        return ((self.c(two) + one * two - y) ** 2).mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_gradients_of_values_that_several_stages_take_are_added(schedule):
    model, inputs = Skips(), (torch.randn(8, 6), torch.randn(8, 6))
    module = mt.from_torch(torch.export.export(model, (torch.randn(2, 6), torch.randn(2, 6))))
    topology = {"m0": {"x": 2}, "m1": {"x": 1}, "m2": {"y": 2}}
    stages = {"m0": ["a"], "m1": ["b"], "m2": ["c"]}
    run = mt.pipeline(module, topology, stages, {"x": {"x": 0}}, microbatches=4, schedule=schedule, train=True)
    assert sorted(run.stages[2].takes.values()) == [0, 1]
    check(run, module, model, *inputs)


def test_some_weights_only(model, module):
    """Stages before the first that is trained have no backward."""
    run = mt.pipeline(module, TOPOLOGY, ["blocks.0"], microbatches=2, train=["head.weight", "blocks.2.*"])
    tokens, labels = batch(6)
    loss = model(tokens, labels)
    wanted = torch.autograd.grad(loss, [model.head.weight, model.blocks[2].fc.bias])
    torch.testing.assert_close(run(tokens, labels), loss.detach())
    got = run.gradients()
    assert len(got) == 7
    torch.testing.assert_close(got[module.names["head.weight"]], wanted[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[module.names["blocks.2.fc.bias"]], wanted[1], rtol=1e-5, atol=1e-6)
    assert run.peak_microbatches["m0"] == 0


def adam(weight, gradient, state):
    """Adam's rule, element by element."""
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = 0.9 * state["m"] + 0.1 * gradient if t > 1 else 0.1 * gradient
    v = state["v"] = 0.999 * state["v"] + 0.001 * gradient * gradient if t > 1 else 0.001 * gradient * gradient
    return weight - 0.01 * (m / (1 - 0.9**t)) / (torch.sqrt(v / (1 - 0.999**t)) + 1e-8)


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_steps_of_an_optimizer_are_those_of_the_whole_model(max_norm):
    """Three steps of Adam with a clipped global norm, tied weights over both meshes, against torch's."""
    model = Net(tied=True)
    module = imported(model, 3)
    run = mt.pipeline(
        module, TOPOLOGY, ["blocks.0"], {"tokens": {"d": 0}}, microbatches=4, schedule="zb-h1", train=True
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        inputs = batch(12)
        loss = model(*inputs)
        optimizer.zero_grad()
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        torch.testing.assert_close(run(*inputs), loss.detach(), rtol=1e-5, atol=1e-5)
        run.update(adam, max_norm=max_norm)
    got = run.weights()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(got[module.names[name]], weight.detach(), rtol=1e-3, atol=1e-4, msg=name)


def test_a_rule_that_makes_no_weight_is_refused(model, module):
    run = mt.pipeline(module, TOPOLOGY, ["blocks.0"], microbatches=2, train=True)
    with pytest.raises(mt.MeshTensorError, match="there are no gradients yet"):
        run.update(lambda weight, gradient, state: weight)
    run(*batch(6))
    with pytest.raises(mt.MeshTensorError, match=r"the rule makes 3 of the weight '.*', which is MeshTensor"):
        run.update(lambda weight, gradient, state: 3)
    with pytest.raises(mt.MeshTensorError, match="rule=None"):
        run.update(None)


def test_explain_says_what_each_mesh_does_holds_and_gets(model, module):
    run = mt.pipeline(module, TOPOLOGY, ["blocks.0"], LAYOUTS, microbatches=4, schedule="zb-h1", train=True)
    text = run.explain()
    lines = text.splitlines()
    assert lines[0].startswith("pipeline of 2 stages on Topology({")
    assert lines[3].split()[:5] == ["stage", "mesh", "weights", "F", "(us)"]
    assert [line.split()[:3] for line in lines[4:6]] == [["0", "m0", "7"], ["1", "m1", "13"]]
    assert "d_lv9  1 (m1)  0 (m0)" in text
    assert "schedule zb-h1: 4 microbatches" in text
    assert "m0 holds at most 2 microbatches for backwards" in text
    run(*batch(12))
    held = {line.split()[0]: int(line.split()[-2].replace(",", "")) for line in lines if "holds at most" in line}
    assert all(run.peak_bytes[mesh] <= held[mesh] for mesh in held)  # replicas may share memory here


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradients_are_reduced_once_per_batch(schedule):
    """Replicated weights, rows that are split: backwards leave parts of sums, whose sums are reduced in the end."""
    module, weights = chain()
    layouts = {"x": {"d": 0}, "y": {"d": 0}}
    run = mt.pipeline(module, TOPOLOGY, ["layer1"], layouts, microbatches=4, schedule=schedule, train=True)
    for here in run.fragments:
        later = [fragment for kind, fragment in here.fragments.items() if kind != "F"]
        assert [step.kind for fragment in later for step in fragment.module.program.collectives] == []
        found = {layout.partial for f in later for name, layout in f.layouts.items() if name.startswith("d_w")}
        assert found == {(("d", "sum"),)}
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    for _ in range(2):
        inputs = torch.randn(12, 6), torch.randn(12, 6)
        loss = chain_loss(leaves, *inputs)
        torch.testing.assert_close(run(*inputs), loss.detach())
        wanted = torch.autograd.grad(loss, list(leaves.values()))
        for (name, got), gradient in zip(run.gradients().items(), wanted, strict=True):
            torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-6, msg=name)
    run.update(lambda weight, gradient, state: weight - 0.1 * gradient, max_norm=0.01)
    assert not torch.equal(run.weights()["w0"], weights["w0"])


class Shifted(nn.Module):
    """Weights that are added to rows: their gradients are those of the rows."""

    def __init__(self):
        super().__init__()
        self.below, self.above, self.end = nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.shift, self.other = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.randn(3, 6))

    def forward(self, x, y):
        x = self.below(x) + self.shift + self.other
        return ((self.end(self.above(x).sin()) - y) ** 2).mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradients_that_are_given_to_other_stages_too_are_whole(schedule):
    torch.manual_seed(0)
    model, inputs = Shifted(), (torch.randn(3, 6), torch.randn(3, 6))
    module = mt.from_torch(torch.export.export(model, inputs))
    layouts = {"above.weight": {"d": 0}, "end.weight": {"d": 1}}
    topology = {"m0": {"d": 2}, "m1": {"d": 2}}
    run = mt.pipeline(module, topology, ["below"], layouts, microbatches=1, schedule=schedule, train=True)
    check(run, module, model, *inputs)
    made = run.fragments[1].fragments["I" if schedule == "zb-h1" else "B"]
    assert [name for name in made.gives if made.layouts[name].partial] == []


def test_an_update_that_is_not_finite_changes_nothing():
    """Neither weights nor what the rule keeps: the next update goes on from there."""
    module, weights = chain()
    run = mt.pipeline(module, TOPOLOGY, ["layer1"], {"x": {"d": 0}}, microbatches=2, schedule="1f1b", train=True)
    run(torch.randn(6, 6), torch.randn(6, 6))
    counts = []

    def momentum(weight, gradient, state, factor=1.0):
        state["sum"] = gradient + state["sum"] if "sum" in state else gradient
        state["steps"] = state.get("steps", 0) + 1
        counts.append(state["steps"])
        return weight - state["sum"] * factor

    run.update(momentum)
    before = run.weights()
    with pytest.raises(mt.MeshTensorError) as error:
        run.update(lambda weight, gradient, state: momentum(weight, gradient, state, float("inf")))
    assert "gradients that are not finite, or too large for what is kept: those of 'w0'" in str(error.value)
    assert "they stay as they were" in str(error.value)
    assert all(torch.equal(before[name], now) for name, now in run.weights().items())
    counts.clear()
    run.update(momentum)
    assert set(counts) == {2}
