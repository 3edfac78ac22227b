"""What strategies take: of deep models by shallow ones, as layers that are alike are left out of what is planned."""

import pytest
import torch
from torch import nn

import mesh_tensor as mt
from kernels.models import gpt2
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.searching.evaluate import Evaluator
from mesh_tensor.searching.named_dims import named_dims

MESH = Mesh({"x": 2, "y": 2})
H100 = mt.Machine.preset("h100")


def evaluator_of(model, *example):
    module = mt.from_torch(torch.export.export(model.eval(), example), check=False)
    return Evaluator(module.mod, "main", H100)


def gpt(layers):
    return gpt2.build(gpt2.Config(64, 32, 4, layers, 4, 8)), torch.zeros(4, 8, dtype=torch.int64)


def test_what_few_layers_say_is_what_all_of_them_take():
    """Every named dim on either axis, and pairs of them: as planned with all layers."""
    evaluator = evaluator_of(*gpt(7))
    dims = named_dims(evaluator.graph, evaluator.atoms)
    for number, dim in enumerate(dims[:6]):
        other = dims[(number + 1) % len(dims)]
        layouts = {name: {"x": d} for name, d in dim.dims}
        for name, d in other.dims:
            layouts.setdefault(name, {}).setdefault("y", d)
        guess = evaluator.strategy(MESH, layouts)
        assert not guess.in_full
        whole = evaluator.in_full(guess)
        assert whole.in_full
        assert guess.time == pytest.approx(whole.time, rel=0.02)
        assert guess.memory == pytest.approx(whole.memory, rel=0.02)
        assert guess.received == pytest.approx(whole.received, rel=0.02)


def test_the_best_one_is_planned_with_all_layers():
    model, tokens = gpt(6)
    module = mt.from_torch(torch.export.export(model.eval(), (tokens,)), check=False)
    found = mt.search(module, 2, "h100x2", meshes=[{"x": 2}], width=1)
    assert found.best.in_full
    assert mt.simulate(found.distribute(), "h100x2").time == pytest.approx(found.best.time)
    assert found.best == min(found.strategies, key=lambda strategy: strategy.time)


class Reaching(nn.Module):
    """Layers of which each takes what the first one made."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x):
        first = y = self.layers[0](x)
        for layer in self.layers[1:]:
            y = torch.relu(layer(y)) + first
        return y


class Collecting(Reaching):
    """Layers that all give results."""

    def forward(self, x):
        made = []
        for layer in self.layers:
            x = torch.relu(layer(x))
            made.append(x)
        return tuple(made)


@pytest.mark.parametrize("model", [Reaching, Collecting])
def test_layers_that_are_no_chain(model):
    """What every layer takes of the first one, or gives as a result, is as much for each of them."""
    evaluator = evaluator_of(model(), torch.zeros(4, 8))
    for layouts in ({}, {"x": {"x": 0}}):
        guess = evaluator.strategy(MESH, layouts)
        whole = evaluator.in_full(guess)
        assert (guess.time, guess.memory, guess.received) == pytest.approx((whole.time, whole.memory, whole.received))


def test_few_layers_are_planned_as_they_are():
    assert evaluator_of(*gpt(2)).strategy(MESH, {}).in_full
