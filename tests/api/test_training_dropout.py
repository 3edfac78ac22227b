"""Dropout: what is dropped follows from seed, step, layer and place: the same on any mesh, forwards and backwards."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor import strategies
from mesh_tensor.importers.torch_dropout import counted_dropout
from mesh_tensor.program.steps import CollectiveStep


class Block(nn.Module):
    """Attention whose weights are dropped, and dropout of elements and of channels."""

    def __init__(self, p=0.2):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, p, batch_first=True)
        self.drop, self.channels, self.out = nn.Dropout(p, inplace=True), nn.Dropout1d(p), nn.Linear(8, 5)

    def forward(self, x):
        x = self.layer(x)
        y = x * 1
        self.drop(y)
        return self.out(self.channels(y) + x).mean(1)


def _batch(rows=6):
    torch.manual_seed(1)
    return torch.randn(rows, 5, 8), torch.randint(0, 5, (rows,))


def _step(p=0.2, **options):
    torch.manual_seed(0)
    return mt.training_step(Block(p), F.cross_entropy, _batch(), optimizer="adamw", lr=1e-2, **options)


def _losses(step, mesh, layout, steps=3):
    run = mt.distribute_module(step, mesh, layout, poison=True)
    return [float(run(*_batch())) for _ in range(steps)]


DATA = {"x": {"data": 0}, "target": {"data": 0}}
LAYOUTS = [
    ({"data": 2}, DATA),
    ({"data": 4}, {"x": {"data": 1}}),
    ({"data": 3, "model": 2}, DATA | {"layer.linear1.weight": {"model": 0}, "layer.linear2.weight": {"model": 1}}),
]


@pytest.fixture(scope="module")
def steps():
    """The gradients of each are compared with torch's, with the same elements dropped."""
    return {"at once": _step(), "in parts": _step(accumulate=3)}


@pytest.mark.parametrize("kind", ["at once", "in parts"])
def test_the_same_on_any_mesh(steps, kind):
    expected = _losses(steps[kind], {"one": 1}, {})
    for mesh, layout in LAYOUTS[: 3 if kind == "at once" else 1]:
        assert _losses(steps[kind], mesh, layout) == pytest.approx(expected, abs=1e-5)


def test_zero(steps):
    expected = _losses(steps["at once"], {"one": 1}, {})
    assert _losses(_step(zero=3, check=False), {"data": 2}, DATA) == pytest.approx(expected, abs=1e-5)


def test_heads_in_parallel(steps):
    step = steps["at once"]
    layout = strategies.tensor_parallel(step)
    assert layout
    assert _losses(step, {"model": 2}, layout) == pytest.approx(_losses(step, {"one": 1}, {}), abs=1e-5)


def test_nothing_is_sent_for_it(steps):
    def collectives(step):
        made = mt.distribute_module(step, {"data": 2}, DATA).program.steps
        return Counter(step.kind for step in made if isinstance(step, CollectiveStep) and step.kind != "slice")

    assert collectives(steps["at once"]) == collectives(_step(0.0, check=False))


def test_steps_and_seeds_differ_and_a_state_goes_on(steps):
    still = _step(check=False, schedule=lambda step: 0.0)  # parameters stay as they are
    first = _losses(still, {"data": 2}, DATA)
    assert len(set(first)) == 3
    assert _losses(_step(check=False, schedule=lambda step: 0.0, seed=1), {"data": 2}, DATA)[0] not in first
    run = mt.distribute_module(still, {"data": 2}, DATA)
    run(*_batch())
    other = mt.distribute_module(still, {"data": 3}, DATA)
    other.load_state_dict(run.state_dict())
    assert float(other(*_batch())) == pytest.approx(first[1], abs=1e-6)


class Twice(nn.Module):
    """A step's loss shows what two layers drop of the same."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return F.dropout(x, 0.5, True) * F.dropout(x, 0.5, True) * self.scale


def test_layers_and_microbatches_differ():
    x = torch.ones(64, 64)
    for count in (1, 2):
        step = mt.training_step(Twice(), lambda y, _: y.mean(), (x, x), optimizer="sgd", accumulate=count)
        loss = float(mt.distribute_module(step, {"data": 2}, {"x": {"data": 0}})(x, x))
        assert loss == pytest.approx(1.0, abs=0.1)  # 2.0 if layers were alike


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_as_many_are_dropped_as_was_said(p):
    x = torch.full((256, 300), 2.0, dtype=torch.float64, requires_grad=True)
    made = [counted_dropout(x, torch.tensor(seed), p, stream) for seed, stream in ((0, 0), (1, 0), (0, 1))]
    for dropped in made:
        assert float((dropped == 0).double().mean()) == pytest.approx(p, abs=0.01)
        for dim in (0, 1):  # along rows and columns, too
            assert float((dropped == 0).double().mean(dim).std()) < 0.05
        if p < 1:
            assert torch.equal(dropped.unique(), torch.tensor([0.0, 2 / (1 - p)][p == 0 :], dtype=torch.float64))
        (gradient,) = torch.autograd.grad(dropped.sum(), [x])
        assert torch.equal(gradient * 2, dropped)
    if 0 < p < 1:
        pairs = [(a == 0) & (b == 0) for a, b in ((made[0], made[1]), (made[0], made[2]))]
        assert all(float(both.double().mean()) == pytest.approx(p * p, abs=0.01) for both in pairs)


@pytest.mark.parametrize("p", [0.5, 1.0])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(p, wrong):
    """Dropping is multiplying with 0, as in torch."""
    x = torch.full((64,), wrong)
    ours, theirs = counted_dropout(x, torch.tensor(1), p, 0), F.dropout(x, p, True)
    assert set(map(str, ours.tolist())) == set(map(str, theirs.tolist()))


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, None if "is_causal" in self.options else mask, **self.options)


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({"is_causal": True}, torch.zeros(4, 6)),
        ({"scale": 0.3}, torch.randn(4, 6)),
        ({"enable_gqa": True}, torch.arange(24).reshape(4, 6) % 3 > 0),
    ],
    ids=["causal", "scaled", "heads that share"],
)
def test_attention_is_torchs_but_for_what_is_dropped(options, mask):
    torch.manual_seed(0)
    heads = 2 if "enable_gqa" in options else 4
    given = torch.randn(2, 4, 4, 8), torch.randn(2, heads, 6, 8), torch.randn(2, heads, 6, 8), mask
    imported = [mt.from_torch(torch.export.export(Attention(dropout_p=p, **options), given)) for p in (1e-9, 0.5)]
    layout = {"q": {"data": 0}, "k": {"data": 0}, "v": {"data": 0}}
    kept, dropped = (mt.distribute_module(module, {"data": 2}, layout, poison=True) for module in imported)
    torch.testing.assert_close(kept(*given, torch.tensor(3)), Attention(**options)(*given))
    several = torch.stack([dropped(*given, torch.tensor(seed)) for seed in range(4)])
    assert (several.std(0) > 0).float().mean() > 0.9
    assert torch.equal(dropped(*given, torch.tensor(2)), several[2])


def test_what_is_refused():
    x = torch.randn(4, 8)
    with pytest.raises(mt.MeshTensorError, match="bernoulli.p is random"):
        mt.from_torch(torch.export.export(nn.AlphaDropout(0.1).train(), (x,)))
    with pytest.raises(mt.MeshTensorError, match="seed=-1"):
        _step(seed=-1)
