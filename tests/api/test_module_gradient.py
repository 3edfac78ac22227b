"""Calls of modules that autograd records: gradients as those of the torch model, whatever the layout."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from tvm import relax
from tvm.script import relax as R

import mesh_tensor as mt
from tests.api.models import MLP
from tests.plan.step_modules import module
from tests.refusals import refusal


class Several(MLP):
    """Results of several kinds: floats, whole numbers, one twice, one that depends on no input."""

    def forward(self, x, mask):
        y = super().forward(x)
        return {"y": (y, y), "best": y.argmax(-1), "exp": (y * mask).exp(), "norm": self.norm.weight * 2}


LAYOUTS = [
    ({"data": 1}, {}),
    ({"data": 4}, {"x": {"data": 0}}),
    ({"model": 2}, {"up.weight": {"model": 0}, "down.weight": {"model": 1}}),
    ({"data": 3, "model": 2}, {"x": {"data": 0}, "up.weight": {"model": 0}, "down.weight": {"model": 1}}),
]

EXP = module({"x": (4, 4)}, [("y", lambda _, env: R.exp(env["x"]))])


def _imported(model, *inputs, **dynamic):
    torch.manual_seed(0)
    return mt.from_torch(torch.export.export(model, inputs, **dynamic))


@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_inputs_and_parameters(mesh, layout):
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(6, 12, requires_grad=True)
    params = dict(model.named_parameters())
    run = mt.distribute_module(_imported(model, x.detach()), mesh, layout, weights={}, poison=True)
    expected, found = model(x), run(x, **params)
    torch.testing.assert_close(found, expected)
    seed = torch.randn_like(expected)
    gradients = torch.autograd.grad(found, [x, *params.values()], seed)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, [x, *params.values()], seed))


def test_an_optimizer_of_torchs():
    torch.manual_seed(0)
    model, x, y = MLP(), torch.randn(6, 12), torch.randint(8, (6,))
    mine, theirs = ({n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()} for _ in range(2))
    run = mt.distribute_module(_imported(model, x), {"data": 2}, {"x": {"data": 0}}, weights={})
    optimizers = [torch.optim.AdamW(params.values(), lr=0.05) for params in (mine, theirs)]
    for _ in range(3):
        losses = [
            F.cross_entropy(run(x, **mine), y),
            F.cross_entropy(torch.func.functional_call(model, theirs, (x,)), y),
        ]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


def test_results_of_several_kinds():
    torch.manual_seed(0)
    model, x, mask = Several(), torch.randn(5, 12, requires_grad=True), torch.rand(5, 8, requires_grad=True)
    run = mt.distribute_module(
        _imported(model, x.detach(), mask.detach()), {"data": 2}, {"x": {"data": 0}}, poison=True
    )
    results, expected = run(x, mask), model(x, mask)
    assert not results["best"].requires_grad
    assert not results["norm"].requires_grad
    for loss in (lambda r: r["exp"].sum(), lambda r: (r["y"][0] * r["y"][1]).sum()):
        made, wanted = (
            torch.autograd.grad(loss(r), [x, mask], retain_graph=True, allow_unused=True) for r in (results, expected)
        )
        for gradient, right in zip(made, wanted, strict=True):
            torch.testing.assert_close(gradient, torch.zeros_like(mask) if right is None else right)


def test_sizes_that_are_open():
    model = MLP()
    shapes = {"dynamic_shapes": ({0: torch.export.Dim("rows", min=2, max=64)},)}
    run = mt.distribute_module(_imported(model, torch.randn(6, 12), **shapes), {"data": 2}, {"x": {"data": 0}})
    for rows in (4, 7):
        x = torch.randn(rows, 12, requires_grad=True)
        (gradient,) = torch.autograd.grad(run(x).square().sum(), [x])
        torch.testing.assert_close(gradient, torch.autograd.grad(model(x).square().sum(), [x])[0])


def test_what_does_not_depend_on_it_has_no_gradient():
    constant = module(
        {"x": (4, 4), "w": (4, 4)},
        [
            ("high", lambda _, env: R.exp(env["x"])),
            ("low", lambda _, env: relax.op.grad.no_grad(env["high"])),
            ("high", lambda _, env: R.exp(env["w"])),
            ("both", lambda _, env: relax.Tuple([env["low"], env["high"]])),
        ],
    )
    run = mt.distribute_module(constant, {"x": 2}, {"x": {"x": 0}})
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    assert not any(result.requires_grad for result in run(x, w.detach()))
    _, made = run(x, w)
    (gradient,) = torch.autograd.grad(made.sum(), [w])
    torch.testing.assert_close(gradient, w.exp().detach())


def test_what_is_written_into_afterwards_is_seen():
    run = mt.distribute_module(EXP, {"x": 2}, {})
    x = torch.randn(4, 4, requires_grad=True)
    made = run(x)
    with torch.no_grad():
        made.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.sum().backward()


def test_only_the_inputs_of_layers_are_kept():
    """No weight, and nothing that follows from weights alone, is kept for every call."""
    torch.manual_seed(0)
    x = torch.randn(6, 12, requires_grad=True)
    run = mt.distribute_module(_imported(MLP(), x.detach()), {"data": 2}, {"x": {"data": 0}})
    made = run(x)
    inner = made.grad_fn.inner
    assert inner
    assert all(tensor.shape[0] == 6 for tensor in inner.values())


class Next(nn.Module):
    def forward(self, x):
        return torch.nextafter(x, x + 1)


def _refusal(run, *args, **named):
    message = refusal(run, *args, **named)
    assert "fix:" in message
    return message


def test_what_is_refused():
    torch.manual_seed(0)
    x = torch.randn(4, 4, requires_grad=True)
    step = _imported(Next(), x.detach())
    assert "aten.nextafter.default has no gradient" in _refusal(mt.distribute_module(step, {"x": 2}), x)
    adds = module({"x": (4, 4), "w": (4, 4)}, [("y", lambda _, env: R.add(env["x"], env["w"]))])
    weight = nn.Parameter(torch.randn(4, 4))
    run = mt.distribute_module(adds, {"x": 2}, weights={"w": weight})
    assert "weight 'w' requires a gradient, but is a constant" in _refusal(run, x)
    run = mt.distribute_module(_imported(nn.Linear(4, 4), x.detach()), {"x": 2}, weights={})
    given = {"weight": weight, "model.weight": x + 1, "bias": x[0]}
    assert "'model.weight' is given under another name with another value" in _refusal(run, x, **given)
    run = mt.distribute_module(adds, {"x": 2})
    assert "requires a gradient, which would be lost" in _refusal(run, x, mt.distribute(torch.ones(4, 4), {"x": 2}, {}))
    with torch.no_grad():
        assert not run(x, weight).requires_grad


def test_statistics_that_are_written_are_refused():
    torch.manual_seed(0)
    x = torch.randn(6, 4, requires_grad=True)
    run = mt.distribute_module(_imported(nn.BatchNorm1d(4).train(), x.detach()), {"data": 2})
    assert "it writes 'running_mean'" in _refusal(run, x)


def test_gradients_of_gradients_are_refused():
    run = mt.distribute_module(EXP, {"x": 2}, {})
    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(mt.MeshTensorError, match="gradients of gradients"):
        torch.autograd.grad(run(x).sum(), [x], create_graph=True)
