"""Deep models by shallow ones: layers that repeat are found, and left out of what is planned."""

import pytest
import torch
from torch import nn

import mesh_tensor as mt
from kernels.models import gpt2
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.program.plan_module import PlanOptions, read_module
from mesh_tensor.searching.evaluate import Evaluator, repeated, shortened
from mesh_tensor.searching.named_dims import named_dims

MESH = Mesh({"x": 2, "y": 2})
H100 = mt.Machine.preset("h100")


def read(model, *example):
    module = mt.from_torch(torch.export.export(model.eval(), example), check=False)
    return read_module(module.mod, "main", Mesh({"x": 1}), {}, PlanOptions(machine=H100))


@pytest.fixture(scope="module")
def deep():
    return read(gpt2.build(gpt2.Config(64, 32, 4, 7, 4, 8)), torch.zeros(4, 8, dtype=torch.int64))


def test_the_layers_are_found_and_shortened(deep):
    graph, _ = deep
    layers = repeated(graph)
    assert layers.count in (6, 7)  # the first one's entry may be its own
    short = shortened(graph, layers, 2)
    assert len(graph.nodes) - len(short.nodes) == (layers.count - 2) * layers.length
    given = {*short.params, *(value for node in short.nodes for value in node.outputs)}
    assert all(v in given or v.data is not None for node in short.nodes for v in node.inputs)
    assert set(short.params) < set(graph.params)


def test_what_few_layers_say_is_what_all_of_them_take(deep):
    """Every named dim on either axis, and pairs of them: as planned with all layers."""
    graph, atoms = deep
    evaluator, dims = Evaluator(graph, atoms, H100), named_dims(graph, atoms)
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


def test_the_best_one_is_planned_with_all_layers(deep):
    model = gpt2.build(gpt2.Config(64, 32, 4, 6, 4, 8)).eval()
    module = mt.from_torch(torch.export.export(model, (torch.zeros(4, 8, dtype=torch.int64),)), check=False)
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


def test_layers_that_are_no_chain_are_left_alone():
    """What every layer gives is a result: none can be left out. What all take of before the layers is no hindrance."""
    assert repeated(read(Collecting(), torch.zeros(4, 8))[0]) is None
    graph, atoms = read(Reaching(), torch.zeros(4, 8))
    evaluator = Evaluator(graph, atoms, H100)
    guess = evaluator.strategy(MESH, {})
    assert guess.time == pytest.approx(evaluator.in_full(guess).time)


def test_few_layers_are_planned_as_they_are():
    graph, atoms = read(gpt2.build(gpt2.Config(64, 32, 4, 2, 4, 8)), torch.zeros(4, 8, dtype=torch.int64))
    assert repeated(graph) is None or repeated(graph).count >= 4
    assert Evaluator(graph, atoms, H100).strategy(MESH, {}).in_full
