"""Modules called in the form of the torch model that they come from; what the model writes is kept between calls."""

import pytest
import torch
from torch import nn

import mesh_tensor as mt
from tests.refusals import refusal


class Cache(nn.Module):
    """Writes a cache where positions say, counts its calls, and keeps its last input."""

    def __init__(self):
        super().__init__()
        self.keys = nn.Linear(8, 8)
        self.register_buffer("cache", torch.zeros(2, 6, 8))
        self.register_buffer("last", torch.zeros(2, 1, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x, position, scale=2.0, *, mask=None, kind="sum"):
        """Results in a dict, among them the counter itself, a number and None."""
        key = self.keys(x) * scale
        self.cache[:, position] = key
        self.count += 1
        self.last.copy_(x)
        return {"sum": self.cache.sum(1), "none": None, "number": 3, "both": (key, self.count)}


GIVEN = {"mask": None, "kind": "sum"}


@pytest.fixture(scope="module")
def made():
    """A model, and its module."""
    model = Cache().eval()
    inputs = (torch.randn(2, 1, 8), torch.tensor([3]), 2.0)
    return model, mt.from_torch(torch.export.export(model, inputs, GIVEN))


def fresh(model):
    """The model before its first call."""
    other = Cache().eval()
    other.load_state_dict(model.state_dict())
    return other


def test_a_program_stays_as_it_was(made):
    model, module = made
    assert module.state == ("cache", "last", "count")
    assert not any(module.params[name].any() for name in module.state)


@pytest.mark.parametrize(
    "shardings", [{"x": {"x": 0}}, {"cache": {"x": 2}}, {"cache": {"x": 1}, "keys.weight": {"x": 0}}]
)
@pytest.mark.parametrize("size", [2, 3])
def test_state_is_kept_between_calls(made, shardings, size):
    model, module = made
    model, run = fresh(model), mt.distribute_module(module, {"x": size}, shardings, poison=True)
    for position in range(3):
        x = torch.randn(2, 1, 8)
        found = run(x, torch.tensor([position]), 2.0, **GIVEN)
        torch.testing.assert_close(found, model(x, torch.tensor([position])))
        found["both"][1].fill_(7)  # what callers have is no memory of the state
        x.fill_(7)
    kept = run.state_dict()
    torch.testing.assert_close({n: kept[n] for n in module.state}, {n: getattr(model, n) for n in module.state})
    first = {name: module.params[name] for name in module.state}
    run.load_state_dict(first, strict=False)
    torch.testing.assert_close({name: run.state_dict()[name] for name in module.state}, first)
    torch.testing.assert_close(run.state_dict()["keys.weight"], model.keys.weight.detach())


def test_a_call_that_raises_leaves_the_state(made):
    _, module = made
    run = mt.distribute_module(module, {"x": 2}, {"cache": {"x": 0}})
    run(torch.ones(2, 1, 8), torch.tensor([0]), 2.0, **GIVEN)
    before = run.state_dict()
    with pytest.raises(mt.MeshTensorError):
        run(torch.ones(2, 1, 8), torch.tensor([[0]]), 2.0, **GIVEN)
    torch.testing.assert_close(run.state_dict(), before)


def test_without_the_form_of_the_model(made):
    """The module alone takes tensors, and gives a tuple of them."""
    model, module = made
    model, run = fresh(model), mt.distribute_module(module.mod, {"x": 2}, {"cache": {"x": 0}}, weights=module.params)
    x, position = torch.randn(2, 1, 8), torch.tensor([1])
    expected = model(x, position)
    torch.testing.assert_close(run(x, position), (expected["sum"], *expected["both"]))


def test_state_that_is_passed():
    """Without values for what is written, that is an input, and its new value a result."""
    model = nn.BatchNorm1d(4).train()
    module = mt.from_torch(torch.export.export(model, (torch.randn(6, 4),)))
    weights = {name: value for name, value in module.params.items() if name not in module.state}
    run = mt.distribute_module(module.mod, {"x": 2}, {"input": {"x": 0}}, weights=weights)
    x = torch.randn(6, 4)
    result, *new = run(x, *(module.params[name].clone() for name in module.state))
    torch.testing.assert_close(result, model(x).detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tuple(new), (model.running_mean, model.running_var, model.num_batches_tracked))
    with pytest.raises(
        mt.MeshTensorError, match="the weights lack 'running_var', 'num_batches_tracked', which the mod"
    ):
        mt.distribute_module(module.mod, {"x": 2}, weights=weights | {"running_mean": module.params["running_mean"]})


def test_parameters_that_are_written():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.ones(size), requires_grad=False) for size in (1, 4))
            self.register_buffer("third", torch.ones(1, 4))

        def forward(self, x):
            self.third += 1
            self.first.mul_(2)
            return x * self.first + self.second + self.third

    model, x = Scaled(), torch.randn(4, 4)
    run = mt.distribute_module(mt.from_torch(torch.export.export(model, (x,))), {"x": 2}, {"x": {"x": 0}})
    for _ in range(2):
        torch.testing.assert_close(run(x), model(x))
    torch.testing.assert_close(run.state_dict(), dict(model.state_dict()))


def test_sizes_change_while_the_state_stays():
    class Total(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x):
            self.total += x.sum(0)
            return x + self.total

    model, x = Total(), torch.randn(4, 4)
    rows = torch.export.Dim("rows", min=2, max=64)
    run = mt.distribute_module(
        mt.from_torch(torch.export.export(model, (x,), dynamic_shapes=({0: rows},))), {"x": 2}, {"x": {"x": 0}}
    )
    for size in (4, 6, 4):
        x = torch.randn(size, 4)
        torch.testing.assert_close(run(x), model(x))


def test_gradients_of_what_is_written_are_refused():
    module = mt.from_torch(torch.export.export(nn.BatchNorm1d(4).train(), (torch.randn(6, 4),)))
    with pytest.raises(mt.MeshTensorError, match="the gradient of a module that writes 'running_mean'") as error:
        mt.gradient(module)
    assert "use training_step" in str(error.value)


@pytest.mark.parametrize(
    ("args", "named", "told"),
    [
        ((3.0,), GIVEN, "argument 2 is 3.0, but the model was recorded with 2.0"),
        ((2,), GIVEN, "argument 2 is 2, but the model was recorded with 2.0"),
        ((2.0,), GIVEN | {"kind": "mean"}, "is 'mean', but the model was recorded with 'sum'"),
        ((), GIVEN, "2 arguments in order and 'mask', 'kind' by name"),
        ((2.0,), {"mask": None}, "the model was recorded with 3 in order and 'mask', 'kind' by name"),
        (([2.0],), GIVEN, "arguments of the structure"),
    ],
)
def test_calls_of_another_form(made, args, named, told):
    run = mt.distribute_module(made[1], {"x": 2})
    message = refusal(lambda: run(torch.ones(2, 1, 8), torch.tensor([0]), *args, **named))
    assert told in message
    assert "where: a call of a module from torch" in message
