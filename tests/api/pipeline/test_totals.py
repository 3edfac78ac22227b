"""Gradients of weights that backwards add to those of earlier microbatches as they make them."""

from typing import Any

import pytest
import torch
from torch import nn

import mesh_tensor as mt
from mesh_tensor.api.pipeline.carriers import Mailbox
from tests.api.pipeline.test_training import check


class Odd(nn.Module):
    """Gradients of all kinds: of products both ways round, a sum, a norm, one value for two weights, one that every
    element shares, one of a weight with two users, and one that is a transposed view."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4, bias=False)
        weights = {"left": (8,), "right": (8,), "matrix": (8, 8), "scale": (8,), "twice": (8, 8)}
        for name, shape in weights.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) / 3))

    def forward(self, x, y):
        """(n, 5, 6), (n, 5, 4) -> the loss, over all of them."""
        x = self.norm(self.fc(x)) + (self.left + self.right)
        x = torch.tanh(x @ self.matrix) @ self.twice
        x = torch.tanh(x) @ self.twice + x @ self.matrix.t()
        return (self.out(x) - y).square().mean() + self.scale.sum()


def odd() -> tuple[Odd, Any]:
    torch.manual_seed(0)
    model = Odd()
    example = torch.randn(2, 5, 6), torch.randn(2, 5, 4)
    return model, mt.from_torch(torch.export.export(model, example))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (1, 2)])
def test_gradients_of_all_kinds_are_added_up(schedule, sizes, monkeypatch):
    outside: list[int] = []
    accumulate = Mailbox.accumulate

    def noting(self, totals, values):
        outside.append(len(totals))
        return accumulate(self, totals, values)

    monkeypatch.setattr(Mailbox, "accumulate", noting)
    model, module = odd()
    topology = {f"m{number}": {"d": size} for number, size in enumerate(sizes)}
    layouts = {"x": {"d": 0}, "y": {"d": 0}}
    run = mt.pipeline(module, topology, ["norm"], layouts, microbatches=5, schedule=schedule, train=True)
    for _ in range(2):
        check(run, module, model, torch.randn(10, 5, 6), torch.randn(10, 5, 4))
    weights = len(list(model.parameters()))
    assert sum(outside) <= 2 * 4 * weights // 2, "most are added by the steps that make them"


def test_long_sums_have_the_same_bits_on_one_device_and_on_several():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 8))

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            """(n, 24) -> a number."""
            return self.model(x).square().mean()

    module = mt.from_torch(torch.export.export(Step(), (torch.randn(3000, 24),)))
    x, found = torch.randn(9000, 24), []
    for size in (1, 2):
        topology = {f"m{number}": {"d": size} for number in range(2)}
        run = mt.pipeline(module, topology, ["model.1"], {"x": {}}, microbatches=3, train=True)
        check(run, module, Step(), x)
        found.append(run.gradients())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
