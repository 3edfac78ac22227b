"""Plans for sizes between others: as those that are made anew, and found without planning."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.export import Dim

import mesh_tensor as mt
from kernels.models import llama
from mesh_tensor.program import region
from mesh_tensor.program.families import outline
from mesh_tensor.program.size_terms import Box, Terms

from .test_families import same_as_new

LLAMA = llama.Config(layers=2, positions=256)


@pytest.fixture
def found(monkeypatch):
    """Sizes for which a region had a plan, and those for which it had none."""
    sizes = {True: [], False: []}
    sized = region.Region.sized

    def noted(self, asked):
        made = sized(self, asked)
        sizes[made is not None].append(asked)
        return made

    monkeypatch.setattr(region.Region, "sized", noted)
    return sizes


def llama_of_any_length(batch=False):
    model = llama.build(LLAMA)
    dims = {1: Dim("places", min=2, max=256)} | ({0: Dim("batch", min=1, max=64)} if batch else {})
    return model, mt.from_torch(torch.export.export(model, (torch.randint(48, (4, 100)),), dynamic_shapes=(dims,)))


@pytest.mark.parametrize(("mesh", "layout"), [({"x": 2}, {}), ({"x": 3}, {"tokens": {"x": 0}})], ids=["2", "3"])
def test_one_size(found, mesh, layout):
    model, module = llama_of_any_length()
    run = mt.distribute_module(module, mesh, layout or llama.tensor_parallel(LLAMA, "x"), poison=True)
    for length in (100, 101, 102, 103, 104, 105, 106, 107, 109, 111, 115, 121, 64, 65, 77):
        tokens = torch.randint(48, (4, length))
        torch.testing.assert_close(run(tokens), model(tokens), rtol=2e-4, atol=2e-5)
        same_as_new(run)
    assert found[True][:2] == [(103,), (104,)]  # any remainder, as devices have no parts of it
    assert (64,) in found[True]  # as large as other dims


def test_two_sizes(found):
    model, module = llama_of_any_length(batch=True)
    run = mt.distribute_module(module, {"x": 2}, {"tokens": {"x": 0}}, poison=True)
    draw = random.Random(0).randint
    for size in [(2 * draw(3, 9), 2 * draw(30, 60)) for _ in range(16)]:
        tokens = torch.randint(48, size)
        torch.testing.assert_close(run(tokens), model(tokens), rtol=2e-4, atol=2e-5)
        same_as_new(run)
    assert len(found[True]) >= 4


def test_what_costs_decide_of_two_sizes(found):
    """Where costs gather weights for many tokens, and sum results of few, most sizes have a range none the less."""
    model, module = llama_of_any_length(batch=True)
    run = mt.distribute_module(module, {"x": 2}, llama.tensor_parallel(LLAMA, "x"), poison=True)
    draw = random.Random(0).randint
    for size in [(draw(1, 16), draw(5, 120)) for _ in range(16)]:
        tokens = torch.randint(48, size)
        torch.testing.assert_close(run(tokens), model(tokens), rtol=2e-4, atol=2e-5)
        assert outline(run.plan) == outline(replace(run.plan, made=run.plan.stages().made))
    assert len(found[True]) >= 8


@pytest.mark.parametrize("devices", [1, 2])
def test_what_is_ready_to_run_is_shared(devices):
    """Sizes of a region have one list of actions, and each its own numbers in it, whatever order they come in."""
    model, module = llama_of_any_length(batch=True)
    layout = {**llama.tensor_parallel(LLAMA, "x"), "tokens": {}} if devices == 1 else {"tokens": {"x": 0}}
    run = mt.distribute_module(module, {"x": devices}, layout)
    lengths = (100, 102, 104, 106, 90, 120, 84, 122, 100, 120, 84, 106, 122)
    for length in lengths:
        tokens = torch.randint(48, (4, length))
        torch.testing.assert_close(run(tokens), model(tokens), rtol=2e-4, atol=2e-5)
        lies = mt.distribute(tokens, run.mesh, {"x": 0})
        torch.testing.assert_close(run(lies).full(), model(tokens), rtol=2e-4, atol=2e-5)
    shared = Counter(id(launch._run._mesh._first) for launch in run._launches)
    assert max(shared.values()) >= 3
    new = llama.build(LLAMA)
    run.load_state_dict(new.state_dict())
    for length in (104, 90, 104):
        tokens = torch.randint(48, (4, length))
        torch.testing.assert_close(run(tokens), new(tokens), rtol=2e-4, atol=2e-5)


class Outer(torch.nn.Module):
    """Sums over devices of two shapes, which are one where its sizes are equal."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x, y):
        return self.one(x).relu() @ self.other(y).relu().mT


def test_equal_sizes_come_first():
    """What is made ready for sizes that are equal by chance is not taken for others."""
    model, example = Outer(), (torch.randn(5, 8), torch.randn(7, 8))
    dims = {"x": {0: Dim("rows", min=2, max=256)}, "y": {0: Dim("columns", min=2, max=256)}}
    module = mt.from_torch(torch.export.export(model, example, dynamic_shapes=dims))
    run = mt.distribute_module(module, {"x": 2}, {f"{name}.weight": {"x": 1} for name in ("one", "other")}, poison=True)
    for sizes in ((20, 31), (22, 35), (24, 39), (30, 30), (25, 36), (36, 25), (28, 28), (21, 44)):
        x, y = (torch.randn(size, 8) for size in sizes)
        torch.testing.assert_close(run(x, y), model(x, y))
    shared = Counter(id(launch._run._mesh._numbers) for launch in run._launches)
    assert max(shared.values()) >= 3


class Mean(torch.nn.Module):
    """Writes a running mean of what it is called with."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        made = self.up(x).relu()
        self.mean.mul_(0.9).add_(0.1 * made.mean((0, 1)))
        return made - self.mean


@pytest.mark.parametrize(("devices", "layout"), [(1, {}), (2, {"up.weight": {"x": 0}})])
def test_a_state_goes_on_whatever_size_comes(devices, layout):
    model, x = Mean(), torch.randn(2, 10, 4)
    program = torch.export.export(model, (x,), dynamic_shapes=({1: Dim("places", min=2, max=256)},))
    run = mt.distribute_module(mt.from_torch(program), {"x": devices}, layout)
    for length in (40, 42, 44, 46, 30, 60, 24, 62, 40, 60, 24):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(run(x), model(x))
    torch.testing.assert_close(run.state_dict()["mean"], model.mean)
    shared = Counter(id(launch._run._mesh._first) for launch in run._launches)
    assert max(shared.values()) >= 3


class Window(torch.nn.Module):
    """Divides a size, and multiplies with it."""

    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Conv1d(4, 6, 3, stride=3)

    def forward(self, x):
        return self.rows(x.mT).cumsum(-1) * x.shape[1], x.softmax(1)


def test_sizes_that_are_divided(found):
    model, x = Window(), torch.randn(3, 50, 4)
    program = torch.export.export(model, (x,), dynamic_shapes=({1: Dim("places", min=12, max=256)},))
    run = mt.distribute_module(mt.from_torch(program), {"x": 2}, {"x": {"x": 0}}, poison=True)
    for length in (59, 65, 71, 77, 83, 89, 101, 60, 62):
        x = torch.randn(3, length, 4)
        for one, other in zip(run(x), model(x), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
        same_as_new(run)
    assert len(found[True]) >= 3


def test_terms():
    """Sums of products of sizes are known from the corners; what divides them has a longer period, and shows."""
    box = Box((4, 3), (20, 27), (4, 3))
    terms = Terms(box)
    number = terms.term(tuple(5 * a * b - 2 * a + 7 for a, b in box.corners))
    for size in ((8, 9), (4, 27), (16, 15)):
        assert terms.at(size)[number] == 5 * size[0] * size[1] - 2 * size[0] + 7
    assert (6, 9) not in box
    assert box.tells_periods((8, 6))
    assert not box.tells_periods((12, 6))  # half way
    halves = Terms(Box((4,), (20,), (4,)))
    halves.term((4 // 8, 20 // 8))
    assert halves.at((8,)) != [8 // 8]
