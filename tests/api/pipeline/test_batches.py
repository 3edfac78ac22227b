"""What pipelines are called with, and made and loaded from: any tensors are right, or refused by name."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor import MeshTensorError
from tests.api.pipeline.models import chain, chain_loss

TOPOLOGY = {"m0": {"d": 2}, "m1": {"d": 3}}


@pytest.fixture(scope="module")
def made():
    torch.manual_seed(0)
    module, weights = chain()
    return weights, mt.pipeline(module, TOPOLOGY, ["layer1"], {"x": {"d": 0}}, microbatches=4, train=True)


def nested(tensor):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that they are a prototype
        return torch.nested.nested_tensor([tensor[0], tensor[1]])


def inference(tensor):
    with torch.inference_mode():
        return tensor.clone()


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: x.repeat(1, 2)[:, ::2],
        lambda x: x[:1].expand(12, 6),
        torch._neg_view,
        inference,
        lambda x: torch.zeros(30, 12)[3:27:2, 1:7].copy_(x),
    ],
    ids=["transposed", "strided", "expanded", "negated", "inference", "inside of another"],
)
def test_views_of_all_kinds(made, form):
    weights, run = made
    x, y = torch.randn(12, 6), torch.randn(12, 6)
    given = form(x)
    torch.testing.assert_close(run(given, form(y)), chain_loss(weights, given.clone(), form(y).clone()))


@pytest.mark.parametrize(
    ("form", "facts"),
    [
        (lambda x: None, ["input 'x' is None", "pass torch tensors"]),
        (lambda x: x.numpy(), ["input 'x' is array", "pass torch tensors"]),
        (lambda x: x.to_sparse(), ["input 'x' is a tensor of another kind: layout torch.sparse_coo", ".to_dense()"]),
        (nested, ["input 'x' is", "nested tensor", ".to_padded_tensor(0)"]),
        (lambda x: x.to("meta"), ["'x': on device meta, but the module runs on cpu"]),
        (lambda x: x.clone().requires_grad_(), ["input 'x' is", "requires a gradient, which would be lost"]),
        (lambda x: x.double(), ["'x': (3, 6) float64, but expected (3, 6) float32"]),
        (lambda x: x[:, 0], ["'x': (3,) float32, but expected (3, 6) float32"]),
        (lambda x: x[:0], ["input 'x' has 0 rows, others 12"]),
        (lambda x: x[0, 0], ["input 'x' has 0 rows, others 12", "what all rows share is a weight"]),
    ],
)
def test_what_is_no_batch_is_refused_by_name(made, form, facts):
    weights, run = made
    x, y = torch.randn(12, 6), torch.randn(12, 6)
    with pytest.raises(MeshTensorError) as raised:
        run(form(x), y)
    assert all(fact in str(raised.value) for fact in facts), raised.value
    with pytest.raises(MeshTensorError, match="there are no gradients yet"):  # those of an earlier batch are no use
        run.update(lambda weight, gradient, state: weight - gradient)
    torch.testing.assert_close(run(x, y), chain_loss(weights, x, y))


class Placed(nn.Module):
    """Takes rows, their places, which all of them share, and a factor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.places, self.a, self.b = nn.Embedding(5, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, places, factor, y):
        return F.mse_loss(self.b(torch.tanh(self.a(x + self.places(places)))) * factor, y)


def test_one_microbatch_takes_inputs_of_any_sizes():
    model, shared = Placed(), (torch.arange(5), torch.tensor(2.0))
    inputs = torch.randn(4, 5, 6), *shared, torch.randn(4, 5, 6)
    module = mt.from_torch(torch.export.export(model, inputs))
    run = mt.pipeline(module, TOPOLOGY, ["a"], {"x": {"d": 0}}, train=True)
    loss = model(*inputs)
    torch.testing.assert_close(run(*inputs), loss.detach())
    loss.backward()
    gradients = run.gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[module.names[name]], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    with pytest.raises(MeshTensorError, match=r"needs the batch's rows together(?s:.*)run it with microbatches=1"):
        mt.pipeline(module, TOPOLOGY, ["a"], {"x": {"d": 0}}, microbatches=2, train=True)


def test_one_microbatch_without_rows():
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), torch.export.Dim("rows")
    exported = torch.export.export(model, (torch.randn(4, 6),), dynamic_shapes=({0: rows},))
    run = mt.pipeline(mt.from_torch(exported), TOPOLOGY, ["0"], {"input": {"d": 0}})
    for count in (0, 5):
        x = torch.randn(count, 6)
        torch.testing.assert_close(run(x), model(x).detach())


@pytest.mark.parametrize("open_size", [False, True])
def test_weights_are_those_from_when_it_was_made(open_size):
    """Whatever their owner writes later, before the first call and after it, also of what divides the loss."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))
    classes, rows = torch.rand(5) + 0.5, torch.export.Dim("rows", min=1, max=64)

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model
            self.register_buffer("classes", classes)

        def forward(self, x, y):
            return F.cross_entropy(self.model(x), y, weight=self.classes)

    step, sizes = Step(), {"x": {0: rows}, "y": {0: rows}} if open_size else None
    example = torch.randn(3, 6), torch.randint(5, (3,))
    module = mt.from_torch(torch.export.export(step, example, dynamic_shapes=sizes))
    train = [name for name in module.params if name != "classes"]
    run = mt.pipeline(module, TOPOLOGY, ["model.0"], {"x": {"d": 0}}, microbatches=4, train=train)
    x, y = torch.randn(12, 6), torch.randint(5, (12,))
    wanted = step(x, y).detach()
    with torch.no_grad():
        for tensor in (*model.parameters(), classes):
            tensor.mul_(torch.rand(tensor.shape) + 1)
        torch.testing.assert_close(run(x, y), wanted)
        classes.copy_(torch.rand(5) + 0.5)
    torch.testing.assert_close(run(x, y), wanted)


def test_weights_in_any_form():
    """Made of, and loaded from, tensors on a mesh, parameters, views."""
    module, weights = chain()
    forms = {
        "w0": mt.distribute(weights["w0"], {"d": 2}, {"d": 0}),
        "w1": nn.Parameter(weights["w1"]),
        "w2": weights["w2"].t().contiguous().t(),
    }
    run = mt.pipeline(module.mod, TOPOLOGY, ["layer1"], {"x": {"d": 0}}, microbatches=4, train=True, weights=forms)
    x, y = torch.randn(12, 6), torch.randn(12, 6)
    torch.testing.assert_close(run(x, y), chain_loss(weights, x, y))
    run.update(lambda weight, gradient, state: weight - gradient)
    run.load_state_dict(forms)
    torch.testing.assert_close(run(x, y), chain_loss(weights, x, y))
    with pytest.raises(MeshTensorError, match=r"'w0'(?s:.*)layout torch.sparse_coo"):
        run.load_state_dict({**forms, "w0": weights["w0"].to_sparse()})
    assert all(torch.equal(now, weights[name]) for name, now in run.weights().items())


@pytest.mark.parametrize("norm", [0, -1.0, float("nan"), True, "1", torch.tensor(1.0)])
def test_norms_that_are_none(made, norm):
    _, run = made
    run(torch.randn(12, 6), torch.randn(12, 6))
    before = run.weights()
    with pytest.raises(MeshTensorError, match="max_norm=.*(?s:.*)more than 0"):
        run.update(lambda weight, gradient, state: weight - gradient, max_norm=norm)
    assert all(torch.equal(before[name], now) for name, now in run.weights().items())
