"""Layers of functions: found where they repeat, and not where they don't."""

import pytest
import torch
from torch import nn

import mesh_tensor as mt
from kernels.models import gpt2, mlp
from mesh_tensor.pipelining.flow import Flow, find_layers


def flow_of(model, *example):
    return Flow(mt.from_torch(torch.export.export(model, example), check=False).mod, "main")


class Stack(nn.Module):
    """Linear layers; `every`: the result is of all of them; `odd`: one of them is another."""

    def __init__(self, layers, every=False, odd=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.every, self.odd = every, odd

    def forward(self, x):
        x, values = torch.exp(x), []
        for number, layer in enumerate(self.layers):
            y = layer(x)
            x = torch.tanh(y) if self.odd and number == 2 else torch.sigmoid(y)
            values.append(x)
        return (sum(values) if self.every else x).sum()


@pytest.mark.parametrize("layers", [2, 5])
def test_a_models_blocks(layers):
    flow = flow_of(gpt2.build(gpt2.Config(layers=layers)), torch.zeros(4, 8, dtype=torch.int64))
    found = find_layers(flow, ["x"] if "x" in flow.params else [next(iter(flow.params))])
    assert found.count == layers
    assert len({len(layer) for layer in found.layers}) == 1
    varying = {*found.before, *found.after, *(name for layer in found.layers for name in layer)}
    assert varying == flow.below([next(iter(flow.params))])


def test_each_layer_takes_what_the_one_before_leaves():
    flow = flow_of(Stack(4), torch.ones(2, 8))
    found = find_layers(flow, ["x"])
    assert found.count == 4
    for layer, leaving in zip(found.layers[1:], found.leaving, strict=False):
        assert leaving in {value for name in layer for value in flow.operands[name]}


def test_a_layer_that_is_another_ends_them():
    found = find_layers(flow_of(Stack(5, odd=True), torch.ones(2, 8)), ["x"])
    assert found is None or found.count == 2


def test_values_of_all_layers_in_the_result_are_no_layers():
    found = find_layers(flow_of(Stack(4, every=True), torch.ones(2, 8)), ["x"])
    assert found is None


def test_nothing_repeats():
    assert find_layers(flow_of(mlp.build(), *mlp.example_inputs()), ["x"]) is None


class Sides(nn.Module):
    """Layers that put two values side by side, one of them twice: the first, or where it is `odd` the second."""

    def __init__(self, odd):
        super().__init__()
        self.layers, self.odd = nn.ModuleList(nn.Linear(8, 8) for _ in odd), odd

    def forward(self, x):
        x = torch.exp(x)
        for layer, odd in zip(self.layers, self.odd, strict=True):
            y = layer(x)
            z = torch.tanh(y)
            x = torch.cat([y, z, z if odd else y], 1)[:, 16:]
        return x.sum()


@pytest.mark.parametrize(("odd", "count"), [([0] * 4, 4), ([0, 1, 0, 1], 2), ([0, 0, 0, 1], 3), ([1, 0], None)])
def test_layers_that_take_a_value_twice(odd, count):
    """Which of two values a layer takes twice is part of what it computes."""
    found = find_layers(flow_of(Sides(odd), torch.ones(2, 8)), ["x"])
    assert (found and found.count) == count
