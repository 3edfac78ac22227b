"""Whose memory is what: what a caller writes into a result, or into a weight that was given, changes nothing else."""

import pytest
import torch
from torch import nn

import mesh_tensor as mt
from mesh_tensor.targets.tile_memory import memory_of

LAYOUTS = [({"x": 1}, {}), ({"x": 3}, {"x": {"x": 0}}), ({"x": 2}, {"x": {"x": 1}, "weight": {"x": 0}})]


class Passed(nn.Module):
    """Gives what it was given, has and writes, as that is and as copies and views; and what it computes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 6))
        self.register_buffer("table", torch.randn(7, 6))
        self.register_buffer("count", torch.zeros(7, 6))

    def forward(self, x):
        self.count.add_(x)
        kept = x, self.weight, self.table, self.count
        h = torch.relu(x)
        views = x.view(-1), x[1:], self.weight[None], h.t()
        return *kept, *[tensor.clone() for tensor in kept], *views, h, h.clone(), x + self.weight + self.table


@pytest.fixture(scope="module")
def made():
    """The model, its example input, its module, and copies of its results."""
    torch.manual_seed(0)
    model, x = Passed(), torch.randn(7, 6)
    module = mt.from_torch(torch.export.export(model, (x,)))
    return model, x, module


def expected(model, x):
    """The results of the model's first call, each in memory of its own."""
    with torch.no_grad():
        model.count.zero_()
        results = [result.clone() for result in model(x)]
        model.count.zero_()
    return results


def tiles(tensor):
    """A tensor's memory, in parts."""
    return list(tensor.tiles()) if isinstance(tensor, mt.MeshTensor) else [tensor]


def whole(tensors):
    """All of them as global tensors."""
    return [tensor.full() if isinstance(tensor, mt.MeshTensor) else tensor for tensor in tensors]


@pytest.mark.parametrize("laid", [False, True])
@pytest.mark.parametrize(("mesh", "shardings"), LAYOUTS)
def test_a_result_shares_no_memory(made, mesh, shardings, laid):
    model, x, module = made
    run = mt.distribute_module(module, mesh, shardings, poison=True)
    given = mt.distribute(x, mesh, {"x": 0}) if laid else x.clone()
    results = run(given)
    memories = [{memory_of(tile) for tile in tiles(tensor)} for tensor in (given, *results)]
    assert len(set.union(*memories)) == sum(map(len, memories))
    for number, result in enumerate(results):
        for tile in tiles(result):
            tile.fill_(number)
    torch.testing.assert_close(whole([given]), [x])
    run.reset_state()
    torch.testing.assert_close(whole(run(given)), expected(model, x), rtol=1e-5, atol=1e-5)


def test_a_result_of_a_recorded_call_shares_no_memory(made):
    _, x, _ = made

    class Twice(nn.Module):
        def forward(self, x, w):
            h = x @ w
            return h, h.clone(), x, x.clone(), w

    w = torch.randn(6, 6)
    run = mt.distribute_module(mt.from_torch(torch.export.export(Twice(), (x, w))), {"x": 2}, {"x": {"x": 0}})
    given = x.clone().requires_grad_(), w.clone().requires_grad_()
    results = run(*given)
    assert len({memory_of(tensor) for tensor in (*given, *results)}) == 7
    seeds = [torch.randn_like(result) for result in results]
    found = torch.autograd.grad(results, given, seeds)
    torch.testing.assert_close(found, torch.autograd.grad(Twice()(*given), given, seeds))


@pytest.mark.parametrize(("mesh", "shardings"), LAYOUTS)
def test_weights_are_as_they_were_when_given(made, mesh, shardings):
    model, x, module = made
    weights = {name: mt.distribute(tensor, mesh, {"x": 0}) for name, tensor in module.params.items()}
    run = mt.distribute_module(module.mod, mesh, shardings, weights=weights)
    given = [tile for tensor in weights.values() for tile in tensor.tiles()]
    for tile in given:
        tile.fill_(3)
    torch.testing.assert_close(run(x)[-1], (x + model.weight + model.table).detach())
    loaded = {name: mt.distribute(torch.ones(7, 6), mesh, {"x": 1}) for name in ("weight", "count")}
    run.load_state_dict(loaded, strict=False)
    for tensor in loaded.values():
        for tile in tensor.tiles():
            tile.fill_(3)
    results = run(x)
    torch.testing.assert_close(results[-1], x + 1 + model.table)
    torch.testing.assert_close(results[3], x + 1)


def test_a_copy_of_a_mesh_tensor():
    tensor = mt.distribute(torch.randn(5, 4), {"x": 2, "y": 2}, {"x": 0})
    whole, copy = tensor.full(), tensor.clone()
    assert copy.sharding == tensor.sharding
    assert len({memory_of(tile) for tile in (*tensor.tiles(), *copy.tiles())}) == 4
    tensor.tile(0).zero_()
    torch.testing.assert_close(copy.full(), whole)
