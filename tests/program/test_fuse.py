"""Operators that torch has as one run as one, where that is what the graph says; results are those of the module."""

import pytest
import torch
from torch import nn

import mesh_tensor as mt


class Cases(nn.Module):
    """One form per method; `x` is (4, 6, 8), `w` (8, 8), `b` (8,)."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x, w, b):
        return getattr(self, self.name)(x, w, b)

    def linear(self, x, w, b):
        return torch.nn.functional.linear(x, w, b)

    def transposed_without_a_bias(self, x, w, b):
        return x @ w.t()

    def bias_first(self, x, w, b):
        return b + x @ w

    def bias_of_rows(self, x, w, b):
        return x[0] @ w + b[:6, None]

    def product_used_twice(self, x, w, b):
        y = x @ w
        return (y + b) * y

    def tensordot_of_what_no_transpose_is(self, x, w, b):
        return torch.tensordot(x[0], w, 1)  # by permute_dims(w, [0, 1])

    def transposed_from_the_last_dim(self, x, w, b):
        return x @ w.permute(-1, -2)

    def transpose_used_twice(self, x, w, b):
        t = w.t()
        return x @ t + (t * 2).sum()

    def transpose_that_is_a_result(self, x, w, b):
        t = w.t()
        return x @ t, t

    def undone(self, x, w, b):
        return torch.relu(x).permute(2, 0, 1).permute(1, 2, 0) + b

    def not_undone(self, x, w, b):
        return torch.relu(x).permute(2, 0, 1).permute(2, 0, 1).sum(0)

    def undone_result(self, x, w, b):
        return x.permute(2, 0, 1).permute(1, 2, 0)

    def gradient_of_a_softmax(self, x, w, b):
        y = torch.softmax(x, 1)
        return (x - (x * y).sum(1, keepdim=True)) * y

    def another_sum(self, x, w, b):
        y = torch.softmax(x, 1)
        return (x - (x * x).sum(1, keepdim=True)) * y

    def a_part_of_it_used_twice(self, x, w, b):
        y = torch.softmax(x, 1)
        parts = x * y
        return y * (x - parts.sum(1, keepdim=True)), parts

    def two_products(self, x, w, b):
        return x @ w + x @ w.t()


FUSED = {
    "linear": ["fused.linear"],
    "transposed_without_a_bias": ["fused.linear"],
    "tensordot_of_what_no_transpose_is": ["permute_dims", "permute_dims", "matmul"],
    "transposed_from_the_last_dim": ["fused.linear"],
    "bias_first": ["fused.matmul_add"],
    "bias_of_rows": ["matmul", "add"],
    "product_used_twice": ["matmul", "add", "multiply"],
    "transpose_used_twice": ["permute_dims", "fused.linear", "multiply", "add"],
    "transpose_that_is_a_result": ["permute_dims", "fused.linear"],
    "undone": ["nn.relu", "add"],
    "not_undone": ["nn.relu", "permute_dims", "permute_dims"],
    "undone_result": ["permute_dims", "permute_dims"],
    "gradient_of_a_softmax": ["fused.softmax_gradient"],
    "another_sum": ["multiply", "multiply"],
    "a_part_of_it_used_twice": ["multiply", "multiply"],
    "two_products": ["matmul", "fused.linear", "add"],
}
SHOWN = {"fused.linear", "fused.matmul_add", "fused.softmax_gradient", "matmul", "add", "permute_dims", "nn.relu"}
SHOWN |= {"multiply"}


@pytest.mark.parametrize("name", FUSED)
def test_what_runs_as_one(name):
    torch.manual_seed(0)
    tensors = torch.randn(4, 6, 8), torch.randn(8, 8), torch.randn(8)
    model = Cases(name)
    mod = mt.from_torch(torch.export.export(model, tensors))
    for mesh in ({"x": 1}, {"x": 2}):
        run = mt.distribute_module(mod, mesh, {"x": {"x": 0}})
        torch.testing.assert_close(run(*tensors), model(*tensors))
        assert [n for step in run.program.ops if (n := step.call.operator) in SHOWN] == FUSED[name]
        assert all(f"torch {n}" in run.explain() for n in FUSED[name])
        alone = mt.distribute_module(mod, mesh, {"x": {"x": 0}}, fuse="off", poison=True)
        torch.testing.assert_close(alone(*tensors), model(*tensors))
        assert not any(step.call.operator.startswith("fused.") for step in alone.program.ops)


def test_a_product_whose_sum_is_split_gets_its_bias_once():
    torch.manual_seed(0)
    tensors = torch.randn(4, 6, 8), torch.randn(8, 8), torch.randn(8)
    model = Cases("linear")
    mod = mt.from_torch(torch.export.export(model, tensors))
    run = mt.distribute_module(mod, {"x": 2}, {"x": {"x": 2}, "w": {"x": 1}}, poison=True)
    torch.testing.assert_close(run(*tensors), model(*tensors))
    names = [step.call.operator for step in run.program.ops]
    assert names == ["fused.linear", "add"]  # the all-reduce is between them


def test_low_precision_is_that_of_torch():
    torch.manual_seed(0)
    tensors = [torch.randn(shape).bfloat16() for shape in ((4, 6, 8), (8, 8), (8,))]
    model = Cases("linear")
    run = mt.distribute_module(mt.from_torch(torch.export.export(model, tuple(tensors))), {"x": 1})
    assert torch.equal(run(*tensors), model(*tensors))


def test_gradients_of_weights_come_in_the_order_of_the_weight():
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 5), torch.randn(4, 6, 8), torch.randn(4, 6, 5)
    step = mt.training_step(model, nn.functional.mse_loss, (x, y), optimizer="sgd")
    for mesh, layouts in (({"d": 1}, {}), ({"d": 2}, {"input": {"d": 0}})):
        run = mt.distribute_module(step, mesh, layouts)
        loss = run(x, y)
        names = [op.call.operator for op in run.program.ops]
        assert "permute_dims" not in names
        torch.testing.assert_close(loss, nn.functional.mse_loss(model(x), y))
        expected = nn.Linear(8, 5)
        expected.load_state_dict(model.state_dict())
        nn.functional.mse_loss(expected(x), y).backward()
        torch.optim.SGD(expected.parameters(), lr=1e-3).step()
        torch.testing.assert_close(run.state_dict()["weight"], expected.weight.detach())


class Scored(nn.Module):
    """log_softmax of a product, of which the gradient is taken along `dim`."""

    def __init__(self, dim):
        super().__init__()
        self.dim, self.layer = dim, nn.Linear(6, 9)

    def forward(self, x, target):
        return (torch.log_softmax(self.layer(x), self.dim) * target).sum()


@pytest.mark.parametrize("dim", [-1, 1, 0])
@pytest.mark.parametrize("split", [{}, {"layer.weight": {"m": 0}, "layer.bias": {"m": 0}}, {"x": {"m": 0}}])
def test_gradient_of_log_softmax(dim, split):
    """One operator, unless what is summed is split."""
    torch.manual_seed(0)
    model, x, target = Scored(dim), torch.randn(4, 5, 6), torch.randn(4, 5, 9)
    module = mt.gradient(mt.from_torch(torch.export.export(model, (x, target))))
    run = mt.distribute_module(module.mod, {"m": 3}, split, weights=module.params, poison=True)
    _, found = run(x, target)
    expected = torch.autograd.grad(model(x, target), list(model.parameters()))
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5)
    along = {0: "x", 2: "layer.weight"}.get(dim % 3)
    names = [step.call.name for step in run.program.ops]
    assert ("fused.log_softmax_backward" in names) == (along not in split)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_takes_its_bias(dims, dtype):
    """Before it is rounded: in bfloat16, bit for bit what torch has."""
    torch.manual_seed(0)
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](4, 6, 3, stride=2, padding=1, groups=2).to(dtype)
    x = torch.randn(5, 4, *[7] * dims).to(dtype)
    mod = mt.from_torch(torch.export.export(layer, (x,)))
    expected = layer(x).detach()
    for layouts in ({}, {"input": {"x": 0}}, {"input": {"x": 2}}, {"weight": {"x": 0}, "bias": {"x": 0}}):
        run = mt.distribute_module(mod, {"x": 2}, layouts, poison=True)
        found = run(x)
        names = [step.call.operator for step in run.program.ops]
        assert f"fused.conv{dims}d_add" in names
        assert "add" not in names
        assert torch.equal(found, expected) if dtype is torch.bfloat16 else torch.allclose(found, expected, atol=1e-5)


def test_a_convolution_whose_channels_are_summed_by_devices_gets_its_bias_once():
    torch.manual_seed(0)
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 7, 7)
    mod = mt.from_torch(torch.export.export(layer, (x,)))
    run = mt.distribute_module(mod, {"x": 2}, {"input": {"x": 1}, "weight": {"x": 1}}, poison=True)
    torch.testing.assert_close(run(x), layer(x).detach())
    names = [step.call.operator for step in run.program.ops]
    assert "nn.conv2d" in names
    assert names[-1] == "add"


def test_what_is_no_bias_of_a_convolution_is_added_after_it():
    class Other(nn.Module):
        def forward(self, x, w, b):
            y = nn.functional.conv2d(x, w)
            return y + b, nn.functional.conv2d(x, w) + b[:, :1, :1], y

    torch.manual_seed(0)
    tensors = torch.randn(2, 4, 7, 7), torch.randn(5, 4, 3, 3), torch.randn(5, 5, 5)
    run = mt.distribute_module(mt.from_torch(torch.export.export(Other(), tensors)), {"x": 2}, {"x": {"x": 0}})
    for found, expected in zip(run(*tensors), Other()(*tensors), strict=True):
        torch.testing.assert_close(found, expected)
    assert "fused.conv2d_add" not in [step.call.operator for step in run.program.ops]


@pytest.mark.parametrize("shape", [(1, 6, 1), (1, 6), (6, 1, 1), (1, 1, 6)])
def test_as_many_rows_or_columns_as_channels_are_no_channels(shape):
    """What is added has fewer dims than the result: its dim of 6 is what its place from the end says."""

    class Other(nn.Module):
        def forward(self, x, w, b):
            return nn.functional.conv2d(x, w, padding=1) + b

    torch.manual_seed(0)
    tensors = torch.randn(2, 4, 6, 6), torch.randn(6, 4, 3, 3), torch.randn(shape)
    run = mt.distribute_module(mt.from_torch(torch.export.export(Other(), tensors)), {"x": 2}, {"x": {"x": 0}})
    torch.testing.assert_close(run(*tensors), Other()(*tensors))
