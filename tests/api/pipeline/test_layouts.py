"""One plan per stage: what goes from fragment to fragment stays as it lies; stages that are alike are planned once."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor.api import fragments
from tests.api.pipeline.models import Block, Net, batch, imported

LAYOUTS = {
    "plain": {},
    "rows": {"tokens": {"d": 0}, "labels": {"d": 0}},
    "tensor parallel": {"*.fc.weight": {"m": 0}, "*.proj.weight": {"m": 1}},
    "both": {"tokens": {"d": 0}, "labels": {"d": 0}, "*.fc.weight": {"m": 0}, "*.proj.weight": {"m": 1}},
    "zero": {"tokens": {"d": 0}, "labels": {"d": 0}, "*.weight": {"d": 0}},
}
TOPOLOGY = {"m0": {"d": 2, "m": 2}, "m1": {"d": 3, "m": 1}}
MOVES = ("all_gather", "all_to_all", "permute", "broadcast")  # what moves a value as it is; a slice is local


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return imported(Net(), 3)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("layouts", list(LAYOUTS))
def test_what_a_forward_leaves_is_taken_as_it_lies(module, layouts, schedule):
    """Per value that goes from one of a stage's fragments to another: one layout, and no collective on its way."""
    run = mt.pipeline(module, TOPOLOGY, ["blocks.0"], LAYOUTS[layouts], microbatches=2, schedule=schedule, train=True)
    passed = 0
    for here in run.fragments:
        made = {}
        for kind in [kind for kind in "FIWB" if kind in here.fragments]:
            fragment = here.fragments[kind]
            program = fragment.module.program
            taken = dict(zip(fragment.takes, fragment.module.plan.made.inputs, strict=True))
            for name in [name for name in fragment.takes if name in made]:
                passed += 1
                assert fragment.layouts[name] == made[name], (here.stage.index, kind, name)
                moved = [step.kind for step in program.collectives if step.src == taken[name] and step.kind in MOVES]
                assert not moved, (here.stage.index, kind, name, moved)
            made |= {name: fragment.layouts[name] for name in fragment.gives}
    assert passed >= 10


class Stack(nn.Module):
    """Blocks that are alike, and a loss."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(blocks))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return ((x - y) ** 2).mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stages_that_are_alike_are_planned_once(schedule, monkeypatch):
    planned = []
    training_fragments = fragments.training_fragments

    def counted(stage, *options, **others):
        planned.append(stage.index)
        return training_fragments(stage, *options, **others)

    monkeypatch.setattr("mesh_tensor.api.pipeline.planned.training_fragments", counted)
    model = Stack(6)
    module = mt.from_torch(torch.export.export(model, (torch.randn(2, 4, 8), torch.randn(2, 4, 8))))
    topology = {f"m{i}": {"x": 2} if i != 3 else {"x": 1} for i in range(6)}
    cuts = [f"blocks.{i}" for i in range(5)]
    layouts = {"x": {"x": 0}, "*.fc.weight": {"x": 0}, "blocks.4.fc.weight": {"x": 1}}
    run = mt.pipeline(module, topology, cuts, layouts, microbatches=6, schedule=schedule, train=True)
    assert planned == [0, 1, 3, 4, 5]  # 2 is as 1; 3 has another mesh, 4 another layout, 5 the loss
    plans = [{kind: id(fragment.module.plan) for kind, fragment in here.fragments.items()} for here in run.fragments]
    assert plans[1] == plans[2]
    x, y = torch.randn(12, 4, 8), torch.randn(12, 4, 8)
    loss = model(x, y)
    torch.testing.assert_close(run(x, y), loss.detach())
    found = run.gradients()
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    for (name, _), gradient in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(found[module.names[name]], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_other_sizes_lie_as_the_first(module):
    """The last microbatch is smaller: its plans are its own, its weights lie as those of the others."""
    run = mt.pipeline(imported(Net(), 4, open_size=True), TOPOLOGY, ["blocks.0"], microbatches=3, train=True)
    run(*batch(10))
    first, last = run._planned._plans
    for here, there in zip(first, last, strict=True):
        weights = set(here.stage.params) - set(here.inputs)
        assert weights
        assert all(here.layouts[name] == there.layouts[name] for name in weights)


class Grouped(nn.Module):
    """Attention of eight heads, of which two each share a head of keys."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o = (nn.Linear(16, size, bias=False) for size in (16, 8, 16))

    def forward(self, x):
        """(rows, positions, 16) -> the same."""
        q, kv = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.kv))
        return x + self.o(F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True).transpose(1, 2).flatten(2))


class Pair(nn.Module):
    """Two of them, and a loss."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Grouped(), Grouped()

    def forward(self, x, y):
        return F.mse_loss(self.b(self.a(x)), y)


def test_more_devices_than_key_heads():
    """Of a mesh with an axis for the heads of keys and one for those that share them, nothing is gathered."""
    torch.manual_seed(0)
    model, (x, y) = Pair(), torch.randn(2, 8, 4, 16)
    module = mt.from_torch(torch.export.export(model, (x[:2], y[:2].clone())))
    heads = {"*.q.weight": {("keys", "shared"): 0}, "*.o.weight": {("keys", "shared"): 1}}
    topology = {f"m{number}": {"keys": 4, "shared": 2} for number in range(2)}
    run = mt.pipeline(module, topology, ["a"], {**heads, "*.kv.weight": {"keys": 0}}, microbatches=4, train=True)
    kinds = [step.kind for here in run.fragments for f in here.fragments.values() for step in f.module.program.steps
             if hasattr(step, "kind")]  # fmt: skip
    assert set(kinds) == {"all_reduce"}
    loss = model(x, y)
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(run(x, y), loss.detach())
    got = run.gradients()
    for (name, _), gradient in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(got[module.names[name]], gradient)
