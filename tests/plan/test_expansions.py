"""A softmax along a split dim is taken apart where that takes less than to gather the dim.

Tensors of a test's size are gathered, as a collective's start counts most: others are planned for a machine without."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.program.steps import CollectiveStep
from tests.other_machines import machine


def _module(make, dtype, shape=(6, 10)):
    x = relax.Var("x", relax.TensorStructInfo(shape, dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(make(x)))
    return builder.get()


def _kinds(run):
    return [step.kind for step in run.program.steps if isinstance(step, CollectiveStep)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_along_a_split_dim(name, devices, dtype):
    mod = _module(lambda x: getattr(relax.op.nn, name)(x, 1), dtype)
    with machine(1):
        run = mt.distribute_module(mod, {"model": devices}, {"x": {"model": 1}}, poison=True)
    x = (30 * torch.randn(6, 10)).to(getattr(torch, dtype))
    torch.testing.assert_close(run(x), getattr(torch, name)(x.float(), 1).to(x.dtype))
    assert sorted(_kinds(run)) == ["all_reduce"] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "axes", "keep"), [("variance", [1], True), ("std", [0, 2], False), ("std", None, True)]
)
def test_variances_over_a_split_dim(name, axes, keep, dtype):
    """Of what has a large mean, which is taken away first."""
    mod = _module(lambda x: getattr(relax.op, name)(x, axes, keep), dtype, (5, 7, 4))
    with machine(1):
        run = mt.distribute_module(mod, {"x": 2, "y": 3}, {"x": {"x": 0, "y": 1}}, poison=True)
    x = (100 + torch.randn(5, 7, 4)).to(getattr(torch, dtype))
    expected = getattr(x.double(), name.removesuffix("iance"))(axes or [0, 1, 2], correction=0, keepdim=keep)
    torch.testing.assert_close(run(x), expected.to(x.dtype), rtol=1e-3 if dtype == "float32" else 1e-2, atol=1e-4)
    assert sum(kind == "all_reduce" for kind in _kinds(run)) == 2


def test_a_mean_that_is_there_is_taken():
    """By rows, less their mean and by their deviation: the mean is summed once."""
    op = relax.op
    mod = _module(lambda x: op.divide(op.subtract(x, op.mean(x, [-1], True)), op.std(x, [1], True)), "float32")
    with machine(1):
        run = mt.distribute_module(mod, {"x": 3}, {"x": {"x": 1}}, poison=True)
    x = 100 + torch.randn(6, 10)
    expected = (x - x.mean(1, keepdim=True)) / x.std(1, correction=0, keepdim=True)
    torch.testing.assert_close(run(x), expected, rtol=1e-3, atol=1e-4)
    assert sum(kind == "all_reduce" for kind in _kinds(run)) == 2


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_what_is_small_is_gathered(name):
    mod = _module(lambda x: getattr(relax.op.nn, name)(x, 1), "float32")
    run = mt.distribute_module(mod, {"model": 3}, {"x": {"model": 1}}, poison=True)
    x = 30 * torch.randn(6, 10)
    torch.testing.assert_close(run(x), getattr(torch, name)(x, 1))
    assert _kinds(run) == ["all_gather"]


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_what_is_large_is_taken_apart(name):
    mod = _module(lambda x: getattr(relax.op.nn, name)(x, 1), "float32", (512, 8192))
    run = mt.distribute_module(mod, {"model": 2}, {"x": {"model": 1}})
    assert _kinds(run) == ["all_reduce"] * 2


def test_along_another_dim_it_stays():
    run = mt.distribute_module(_module(relax.op.nn.softmax, "float32"), {"model": 2}, {"x": {"model": 0}})
    assert [node.call.name for node in run.plan.graph.nodes if not node.is_annotation] == ["nn.softmax"]
    assert _kinds(run) == []


class Losses(nn.Module):
    """Cross-entropy of classes that are split, with its options."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 11)

    def forward(self, x, y):
        logits = self.head(x)
        smooth = F.cross_entropy(logits, y, ignore_index=3, label_smoothing=0.1)
        return smooth + F.nll_loss(torch.log_softmax(logits, 1), y) + F.cross_entropy(logits, y, reduction="sum") / 8


@pytest.mark.parametrize("mesh", [{"model": 2}, {"model": 3}, {"data": 2, "model": 2}], ids=["2", "3", "2 x 2"])
def test_losses_split_classes(mesh):
    torch.manual_seed(0)
    model, x, y = Losses(), torch.randn(8, 5), torch.randint(0, 11, (8,))
    y[:2] = 3
    loss = model(x, y)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    made = mt.gradient(mt.from_torch(torch.export.export(model, (x, y))))
    layout = {"head.weight": {"model": 0}, "head.bias": {"model": 0}}
    layout |= {"x": {"data": 0}, "y": {"data": 0}} if "data" in mesh else {}
    with machine(1):
        run = mt.distribute_module(made.mod, mesh, layout, weights=made.params, poison=True)
        kinds = _kinds(run)
    found, gradients = run(x, y)
    torch.testing.assert_close(found, loss.detach())
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)
    assert "all_gather" not in kinds
