"""Gradients of modules against torch.autograd, whole and on meshes; what they look like, and what is refused."""

import pytest
import torch
import tvm.script
from torch import nn
from torch.nn import functional as F
from tvm import ir, relax
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R

import mesh_tensor as mt
from mesh_tensor.plan.gradient import gradient_function
from mesh_tensor.program.steps import CollectiveStep


class MLP(nn.Module):
    """Its loss."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(10, 14), nn.LayerNorm(14), nn.Linear(14, 6)

    def forward(self, x, y):
        hidden = self.norm(F.gelu(self.up(x)))
        return (self.down(F.relu(hidden)) - y).square().mean()


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(5)
    model, x, y = MLP(), torch.randn(8, 10), torch.randn(8, 6)
    loss = model(x, y)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    module = mt.gradient(mt.from_torch(torch.export.export(model, (x, y))))
    return module, (x, y), (loss.detach(), dict(zip(module.params, expected, strict=True)))


def _assert_same(found, expected):
    loss, gradients = found
    torch.testing.assert_close(loss, expected[0])
    for gradient, (name, wanted) in zip(gradients, expected[1].items(), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_on_one_device(case):
    module, inputs, expected = case
    _assert_same(mt.run_sequential(module.mod, [*inputs, *module.params.values()]), expected)


DATA = {"x": {"data": 0}, "y": {"data": 0}}
TENSOR = {"up.weight": {"model": 0}, "up.bias": {"model": 0}, "down.weight": {"model": 1}}


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ({"data": 2}, DATA),
        ({"data": 3}, DATA),
        ({"model": 2}, TENSOR),
        ({"model": 3}, TENSOR),
        ({"data": 2, "model": 2}, DATA | TENSOR),
        ({"data": 3}, {name: {"data": 0} for name in ("x", "y", "up.weight", "up.bias", "down.weight", "down.bias")}),
    ],
    ids=["data", "data, uneven", "model", "model, uneven", "both", "everything split"],
)
def test_on_a_mesh(case, mesh, layout):
    module, inputs, expected = case
    run = mt.distribute_module(module.mod, mesh, layout, weights=module.params, poison=True)
    _assert_same(run(*inputs), expected)


def test_data_parallel_takes_one_all_reduce_for_each_gradient(case):
    module, _, _ = case
    run = mt.distribute_module(module.mod, {"data": 2}, DATA, weights=module.params)
    kinds = [step.kind for step in run.program.steps if isinstance(step, CollectiveStep)]
    assert kinds == ["all_reduce"] * (1 + len(module.params))


def test_it_prints_parses_and_is_saved(case, tmp_path):
    module, inputs, expected = case
    assert relax.analysis.well_formed(module.mod)
    ir.assert_structural_equal(tvm.script.from_source(module.mod.script(show_meta=True)), module.mod)
    mt.save_module(module.mod, tmp_path / "gradients.json")
    loaded = mt.load_module(tmp_path / "gradients.json")
    _assert_same(mt.run_sequential(loaded, [*inputs, *module.params.values()]), expected)


def test_the_local_module_says_of_which_tiles_gradients_are(case):
    module, _, _ = case
    run = mt.distribute_module(module.mod, {"data": 2}, DATA, weights=module.params)
    calls = [line for line in run.local_module.script().splitlines() if "mesh.vjp" in line and "layer_norm" in line]
    assert len(calls) == 1
    assert r"\"operands\":[[[4,14],\"float32\"],[[14],\"float32\"],[[14],\"float32\"]]" in calls[0]


def test_the_gradient_of_an_annotated_value_lies_like_it(case):
    module, inputs, expected = case
    layout = DATA | {"up": {"data": 0, "model": 1}}
    run = mt.distribute_module(module.mod, {"data": 2, "model": 2}, layout, weights=module.params, poison=True)
    stated = [value.name for value in run.plan.graph.annotations]
    _assert_same(run(*inputs), expected)
    assert [name.startswith("d_") for name in stated if not name.startswith(("x", "y", "lv"))] == [True]
    shardings = {str(a.sharding) for v, a in run.plan.graph.annotations.items() if v.type.shape == (8, 14)}
    assert shardings == {"S[0], S[1]"}


def test_what_is_annotated_before_lies_so_backwards(case):
    """Annotations of the module stay, with what TVM has no words for."""
    torch.manual_seed(5)
    model, inputs = MLP(), case[1]
    plain = mt.from_torch(torch.export.export(model, inputs))
    mod = mt.annotate_module(plain.mod, {"data": 2}, {"x": {}, "up": {"data": 0}}, open="up", priority={"up": 1})
    made = mt.gradient(mod, list(plain.params))
    stated = mt.read_module_annotations(made).annotations
    layouts = [(a.sharding.text(), a.open, a.priority) for a in stated.values()]
    assert sorted(layouts) == [("R", False, 0), ("S[0]", True, 1), ("S[0]", True, 2)]
    _assert_same(mt.distribute_module(made, weights=plain.params)(*inputs), case[2])


@I.ir_module
class Calls:
    """A function that is called twice, and an If."""

    @R.function
    def twice(x: R.Tensor((4, 4), "float32"), w: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
        product = R.matmul(x, w)
        result = R.tanh(product)
        return result

    @R.function
    def main(
        x: R.Tensor((4, 4), "float32"), w: R.Tensor((4, 4), "float32"), positive: R.Tensor((), "bool")
    ) -> R.Tensor((), "float32"):
        cls = Calls
        first = cls.twice(x, w)
        second = cls.twice(first, w)
        if positive:  # noqa: SIM108
            taken = R.exp(second)
        else:
            taken = R.negative(first)
        loss = R.sum(taken)
        return loss


@pytest.mark.parametrize("positive", [True, False])
def test_calls_are_entered(positive):
    """A gradient goes through functions of the module; TVM's own pass gives zero there."""
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    first = torch.tanh(x @ w)
    loss = (torch.exp(torch.tanh(first @ w)) if positive else -first).sum()
    (expected,) = torch.autograd.grad(loss, w)
    made = mt.gradient(Calls, ["w"])
    found, (gradient,) = mt.run_sequential(made, [x, w.detach(), torch.tensor(positive)])
    torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(gradient, expected)
    assert [var.name_hint for var in made.get_global_vars()] == ["main"]


def test_gradients_of_results_as_parameters():
    """What a stage of a pipeline takes: the gradient of its result; and gives: those of its input and its weights."""
    mod = Calls.clone()
    made = gradient_function(mod, "twice", ["x", "w"], seeded=True)
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    seed = torch.randn(4, 4)
    expected = torch.autograd.grad(torch.tanh(x @ w), (x, w), seed)
    assert [param.name_hint for param in made["twice"].params] == ["x", "w", "d_result"]
    _, found = mt.run_sequential(made, [x.detach(), w.detach(), seed], "twice")
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_a_result_among_several():
    class Two(nn.Module):
        def forward(self, x):
            return x * 2, (x * x).sum()

    x = torch.randn(3)
    module = mt.from_torch(torch.export.export(Two(), (x,)))
    (doubled, loss), (gradient,) = mt.run_sequential(mt.gradient(module.mod, loss=1), [x])
    torch.testing.assert_close(doubled, 2 * x)
    torch.testing.assert_close(loss, (x * x).sum())
    torch.testing.assert_close(gradient, 2 * x)


class Partly(nn.Module):
    """Parts of it count as constants."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))

    def forward(self, x):
        with torch.no_grad():
            doubled, tripled = 2 * self.w, 3 * self.w
        return (x * self.w.detach() * self.w * doubled).sum() + tripled.sum()


def test_detach_and_no_grad_of_torch():
    model, x = Partly(), torch.randn(3)
    (expected,) = torch.autograd.grad(model(x), [model.w])
    program = torch.export.export(model, (x,))
    before = str(program.graph)
    module = mt.gradient(mt.from_torch(program))
    _, (gradient,) = mt.run_sequential(module.mod, [x, *module.params.values()])
    torch.testing.assert_close(gradient, expected)
    assert str(program.graph) == before
