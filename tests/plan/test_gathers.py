"""What is gathered of a transposed weight is gathered of the weight; results are those of the module."""

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from tvm import relax

import mesh_tensor as mt
from benchmarks.plan_layers import Einsums as Attention
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.program.steps import CollectiveStep, FreeStep, OpStep, WaitStep
from mesh_tensor.rules.operator.cost import class_of

from .modules import function, kinds

# Where collectives start at once, nothing is copied to go together.
AT_ONCE = replace(CPU, links=tuple(replace(link, start=1e-12) for link in CPU.links))


class Layers(nn.Module):
    """`count` layers of rows that are split unevenly."""

    def __init__(self, count=4, width=10):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _gathers(program):
    return [step for step in program.collectives if step.kind == "all_gather"]


def _trained(mesh, count=4, width=10, axes=("data",), **options):
    torch.manual_seed(0)
    model, x, y = Layers(count, width), torch.randn(12, width), torch.randn(12, width)
    step = mt.training_step(model, F.mse_loss, (x, y), optimizer="sgd", lr=0.1, zero=3, check=False)
    run = mt.distribute_module(step, mesh, {n: dict.fromkeys(axes, 0) for n in ("x", "target")}, **options)
    model = copy.deepcopy(model)  # the run takes its own when it is called first
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        assert run(x, y).item() == pytest.approx(loss.item(), abs=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(run.state_dict()[name], parameter.detach(), rtol=1e-5, atol=1e-6)
    return run.program


def test_weights_arrive_as_they_lie():
    """Once for each layer's product, once for the gradient of what it takes; the last one stays from one to the other.
    Bytes are those of ZeRO-3's closed form: of p - 1 of p parts of each weight."""
    program = _trained({"data": 2}, count=4, width=10, poison=True, machine=AT_ONCE)
    gathers = _gathers(program)
    assert Counter(step.src for step in gathers) == {f"layers_{n}_weight": 1 if n in (0, 3) else 2 for n in range(4)}
    assert sum(step.bytes for step in gathers) == 6 * 10 * 10 * 4 // 2
    transposes = [step for step in program.ops if step.call.name == "permute_dims"]
    assert not {name for step in gathers for name in (step.src, step.dst)} & {n for s in transposes for n in s.uses}


class Einsums(nn.Module):
    """Heads by einsums, each of which has a view of its own of the rows."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(6, 4, 5)) for _ in range(3))
        self.o = nn.Parameter(torch.randn(4, 5, 6))

    def forward(self, x):
        y = torch.tanh(x)
        q, k, v = (torch.einsum("btw,whd->bthd", y, part) for part in (self.q, self.k, self.v))
        return x + torch.einsum("bthd,hdw->btw", q * k + v, self.o)


@pytest.mark.parametrize("devices", [2, 4])
def test_of_several_views_the_tensor_is_gathered_once(devices):
    torch.manual_seed(0)
    model, x = Einsums(), torch.randn(4, 8, 6)
    stated = {"x": {"m": 1}, "q": {"m": 1}, "k": {"m": 1}, "v": {"m": 1}, "o": {"m": 0}}
    module = mt.from_torch(torch.export.export(model, (x,)), check=False)
    run = mt.distribute_module(module, {"m": devices}, stated, weights=module.params, poison=True)
    torch.testing.assert_close(run(x), model(x).detach(), rtol=1e-4, atol=1e-4)
    assert kinds(run.plan) == ["all_gather", "reduce_scatter"]
    assert [step.bytes for step in run.program.collectives] == [4 * 8 * 6 * 4 * (devices - 1) // devices] * 2


def test_they_come_ahead_and_go_at_once():
    """Each is started before an earlier product, and forgotten after the last step that takes it."""
    steps = _trained({"data": 2}, count=6, machine=AT_ONCE).steps
    waits = {s.collective.dst: n for n, s in enumerate(steps) if isinstance(s, WaitStep)}
    starts = {s.dst: n for n, s in enumerate(steps) if isinstance(s, CollectiveStep)}
    ends = {s.storage: n for n, s in enumerate(steps) if isinstance(s, FreeStep)}
    ahead = [name for name in waits if name.startswith("layers_")]
    assert len(ahead) >= 8
    for name in ahead:
        between = [s for s in steps[starts[name] : waits[name]] if isinstance(s, OpStep)]
        assert any(class_of(s.call.name) == "product" for s in between), name
        last = max(n for n, s in enumerate(steps) if isinstance(s, OpStep) and name in s.args)
        assert all(isinstance(s, FreeStep) for s in steps[last + 1 : ends[name]]), name


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [({"data": 3}, ("data",)), ({"pod": 2, "data": 2}, ("pod", "data")), ({"pod": 2, "data": 2}, ("data",))],
)
def test_on_other_meshes(mesh, axes):
    _trained(mesh, width=7, axes=axes, poison=True)


class Transposed(nn.Module):
    """Transposes that are no products' alone, of a tensor that is split along some dim."""

    def forward(self, x, w):
        t = w.permute(2, 0, 1)
        return torch.einsum("bi,jki->bjk", x, w) + t.sum(0), t * 2, t.transpose(0, 1) @ x[0, :3]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_transposes_that_others_take(dim):
    torch.manual_seed(0)
    x, w = torch.randn(4, 5), torch.randn(6, 3, 5)
    module = mt.from_torch(torch.export.export(Transposed(), (x, w)))
    run = mt.distribute_module(module, {"m": 2}, {"w": {"m": dim}, "x": {}}, poison=True)
    for found, expected in zip(run(x, w), Transposed()(x, w), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_is_there_is_not_gathered():
    """The transposed tensor is stated to be split, and its sums need it whole: what it is made of is."""

    def build(emit, x):
        made = emit(relax.op.cumsum(x, 2))
        turned = emit(relax.op.permute_dims(made, [1, 0, 2]))
        return relax.Tuple([emit(relax.op.cumsum(turned, 2)), emit(relax.op.negative(turned))])

    run = mt.distribute_module(function(build, x=(3, 5, 8)), {"d": 2}, {"lv1": {"d": 2}}, poison=True)
    x = torch.randn(3, 5, 8)
    turned = x.cumsum(2).transpose(0, 1)
    for result, expected in zip(run(x), (turned.cumsum(2), -turned), strict=True):
        torch.testing.assert_close(result, expected)
    assert "all_gather" not in kinds(run.plan)


def test_what_each_layer_has_a_view_of_is_gathered_once_each_way():
    """Queries, keys and values take one gather; so do their gradients, though products lie between these."""
    torch.manual_seed(0)
    model, x, y = Attention(16, 4).double(), *torch.randn(2, 4, 8, 16).double()
    step = mt.training_step(model, F.mse_loss, (x, y), optimizer="sgd", lr=0.1)
    split = {"x": {"m": 1}, "target": {"m": 1}, **{name: {"m": 1} for name in "qkv"}, "o": {"m": 0}}
    run, theirs = mt.distribute_module(step, {"m": 4}, split), copy.deepcopy(model)
    loss = F.mse_loss(theirs(x), y)
    loss.backward()
    torch.testing.assert_close(run(x, y), loss.detach())
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(run.state_dict()[name], parameter.detach() - 0.1 * parameter.grad)
    gathered = Counter(step.src for step in _gathers(run.program))
    assert sorted(gathered.values()) == [1, 2]  # the gradient of what the layer gives; what it takes
