"""States that other tools wrote, with what is no tensor, or has no values; and inputs that have none."""

import numpy as np
import pytest
import torch
from torch import nn

import mesh_tensor as mt
from kernels.matmul import matmul


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x):
        return self.fc(x) * self.scale


def freed(tensor):
    made = tensor.detach().clone()
    made.untyped_storage().resize_(0)
    return made


def shortened(tensor):
    made = tensor.detach().clone()
    made.untyped_storage().resize_(made.nbytes - 4)
    return made


BAD = {
    "numpy": (lambda tensor: np.asarray(tensor.detach()), "a ndarray, but expected a tensor"),
    "list": (lambda tensor: tensor.tolist(), "a list, but expected a tensor"),
    "none": (lambda _: None, "a NoneType, but expected a tensor"),
    "meta": (lambda tensor: tensor.to("meta"), "on device meta"),
    "sparse": (lambda tensor: tensor.detach().to_sparse(), "layout torch.sparse_coo"),
    "freed": (freed, "a tensor whose memory was given back"),
    "shortened": (shortened, "a tensor whose memory was given back"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", ["fc.weight", "scale"])
@pytest.mark.parametrize("kind", BAD)
def test_the_state_stays_as_it_was(name, kind):
    make, message = BAD[kind]
    model, x = Scaled(), torch.randn(6, 8)
    run = mt.distribute_module(mt.from_torch(torch.export.export(model, (x,))), {"x": 2}, {"fc.weight": {"x": 0}})
    state = model.state_dict()
    with pytest.raises(mt.MeshTensorError) as caught:
        run.load_state_dict({**state, name: make(state[name])})
    assert repr(name) in str(caught.value)
    assert message in str(caught.value)
    torch.testing.assert_close(run(x), model(x))


@torch.no_grad()
def test_an_input_whose_memory_was_given_back():
    model, x = Scaled(), torch.randn(6, 8)
    run = mt.distribute_module(mt.from_torch(torch.export.export(model, (x,))), {"x": 2}, {"x": {"x": 0}})
    with pytest.raises(mt.MeshTensorError, match="parameter 'x': a tensor whose memory was given back"):
        run(freed(x))
    torch.testing.assert_close(run(x), model(x))
    one = torch.randn(1, 8).expand(6, 8)
    torch.testing.assert_close(run(one), model(one))
    zeros = torch._efficientzerotensor(6, 8)
    torch.testing.assert_close(run(zeros), model(torch.zeros(6, 8)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x))


@torch.no_grad()
@pytest.mark.parametrize("names", [("first.weight", "last.weight"), ("last.weight", "first.weight")])
@pytest.mark.parametrize("make", [freed, lambda tensor: tensor.detach().to_sparse()])
def test_a_tied_weight_without_values_under_one_name(names, make):
    model, x = Tied(), torch.randn(6, 8)
    run = mt.distribute_module(mt.from_torch(torch.export.export(model, (x,))), {"x": 2}, {"x": {"x": 0}})
    state, (good, bad) = model.state_dict(), names
    with pytest.raises(mt.MeshTensorError, match="given under two names"):
        run.load_state_dict({good: torch.ones(8, 8), bad: make(state[bad]), "first.bias": state["first.bias"]})
    torch.testing.assert_close(run(x), model(x))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("make", [freed, shortened])
def test_a_kernels_argument_whose_memory_was_given_back(devices, make):
    func = mt.annotate(matmul(64, 64, 64), mt.Mesh({"x": devices}), {"A": {"x": 0}, "C": {"x": 0}})
    run, a, b = mt.compile(func, target="c"), torch.randn(64, 64), torch.randn(64, 64)
    for given in ((make(a), b), (a, make(b)), (a, b, make(a))):
        with pytest.raises(mt.MeshTensorError, match="parameter '[ABC]': a tensor whose memory was given back"):
            run(*given)
    with pytest.raises(mt.MeshTensorError, match="parameter 'A': zeros that have no memory"):
        run(torch._efficientzerotensor(64, 64), b)
    torch.testing.assert_close(run(a, b), a @ b)


def test_a_tensor_to_be_distributed_whose_memory_was_given_back():
    with pytest.raises(mt.MeshTensorError, match="a tensor whose memory was given back"):
        mt.distribute(freed(torch.randn(8, 8)), mt.Mesh({"x": 2}), {"x": 0})


def test_a_step_whose_batch_was_given_back():
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    step = mt.training_step(Scaled(), nn.functional.mse_loss, (x, y), optimizer="sgd", lr=0.1)
    run = mt.distribute_module(step, {"x": 2}, {"x": {"x": 0}})
    before = run.state_dict()
    with pytest.raises(mt.MeshTensorError, match="a tensor whose memory was given back"):
        run(freed(x), y)
    torch.testing.assert_close(run.state_dict(), before)


def test_parameters_that_are_not_initialised_yet():
    lazy = nn.parameter.UninitializedParameter(requires_grad=False)
    model, x = Scaled(), torch.randn(6, 8)
    run = mt.distribute_module(mt.from_torch(torch.export.export(model, (x,))), {"x": 2}, {})
    kernel = mt.compile(mt.annotate(matmul(64, 64, 64), mt.Mesh({"x": 1}), {}), target="c")
    calls = [
        lambda: run(lazy),
        lambda: run.load_state_dict({**model.state_dict(), "fc.weight": lazy}),
        lambda: kernel(lazy, torch.randn(64, 64)),
        lambda: mt.distribute(lazy, mt.Mesh({"x": 2}), {}),
    ]
    for call in calls:
        with pytest.raises(mt.MeshTensorError, match="a parameter that is not initialised yet"):
            call()
