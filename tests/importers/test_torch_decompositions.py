"""Programs taken apart: into the operators of torch's own way, alike ones once."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from kernels.models import gpt2, llama
from mesh_tensor.importers import torch_decompositions
from mesh_tensor.importers.torch_import import _Importer
from mesh_tensor.importers.torch_ops import KEPT
from mesh_tensor.importers.torch_pieces import OWN_DECOMPOSITIONS

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")  # torch's own


class Of(nn.Module):
    """A function as a model; its only input has a name that graphs have another one for."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(4, 4))

    def forward(self, input):
        return self.function(self.weight, input)


def constant_part(weight, x):
    with torch.no_grad():
        scale = x.softmax(-1).mean()
    return weight * scale


FUNCTIONS = {
    "several results": lambda w, x: sum(part.exp() for part in (w @ x).chunk(2, -1)),
    "unused results": lambda w, x: torch.max(w @ x, -1).values,
    "unsafe reshapes": lambda w, x: (w @ x).transpose(0, 1).reshape(2, 8).contiguous().to(torch.float64),
    "what it is given": lambda w, x: (F.dropout(x, training=False), x, w + x),
    "norms": lambda w, x: F.softmax(F.batch_norm(x[None] @ w, None, None, training=True), -1),
    "constants": constant_part,
    "written": lambda w, x: (w @ x).add_(1).relu_(),
    "random access": lambda w, x: w.index_select(0, x.argmax(-1)).cumsum(0),
}
WHOLE = {"norms", "written"}  # what is taken apart in torch's own way


def operators(program):
    """Those that are called, but for copies, and for what computes and asserts sizes."""
    called = [node for node in program.graph.nodes if node.op == "call_function"]
    names = [str(node.target) for node in called if not isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool))]
    left_out = ("aten.clone.default", "aten.alias.default", "aten._assert_scalar.default")
    return Counter(name for name in names if name not in left_out)


def both(model, inputs, sizes=None):
    """The program in both ways."""
    program = torch.export.export(model, inputs, dynamic_shapes=sizes)
    table = torch.export.default_decompositions()
    for op in KEPT:
        table.pop(op, None)
    known = _Importer().convert_map
    return torch_decompositions.decomposed(program, KEPT, known), program.run_decompositions(table)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_are_those_of_torchs_own_way(name):
    model, x = Of(FUNCTIONS[name]), torch.randn(4, 4)
    ours, theirs = both(model, (x,))
    assert isinstance(ours, torch.export.ExportedProgram) == (name in WHOLE)
    if name != "constants":  # they have a detach there
        assert operators(ours) == operators(theirs)
    module = mt.from_torch(torch.export.export(model, (x,)))
    expected = model(x)
    found = mt.run_sequential(module.mod, [x, *module.params.values()])
    for have, want in zip(_tensors(found), _tensors(expected), strict=True):
        torch.testing.assert_close(have, want.detach())


def _tensors(found):
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("family", [gpt2, llama])
def test_models(family):
    config = family.Config(layers=2)
    ours, theirs = both(family.build(config), family.example_inputs(config))
    assert isinstance(ours, torch_decompositions.DecomposedProgram)
    assert operators(ours) == operators(theirs)


def test_alike_operators_are_taken_apart_once(monkeypatch):
    traced = []
    make = torch_decompositions.make_fx
    monkeypatch.setattr(torch_decompositions, "make_fx", lambda *a, **k: traced.append(1) or make(*a, **k))
    counts = []
    for layers in (1, 4):
        traced.clear()
        config = gpt2.Config(layers=layers)
        both(gpt2.build(config), gpt2.example_inputs(config))
        counts.append(len(traced))
    assert counts[0] == counts[1] > 0


OPEN = {
    "reshapes": lambda w, x: (x.flatten() * x.shape[0]).view(-1, 4) @ w,
    "derived sizes": lambda w, x: torch.cat([x, x * (2 * x.shape[0] + 1)]).unflatten(0, (2, -1)).softmax(1),
    "parts": lambda w, x: w.repeat(20, 1)[: x.shape[0]] + x,
    "several results": lambda w, x: sum(part.exp() for part in (x @ w).chunk(2, -1)),
    "norms": lambda w, x: F.group_norm(x[:, :, None] @ w[:1], 2).mean(0),
    "positions": lambda w, x: w[torch.arange(x.shape[0]) % 4].cumsum(0) + x,
}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm2d(2, affine=True)

    def forward(self, x):
        return F.interpolate(self.norm(x) + x, scale_factor=2, mode="bilinear")


def test_rows_stay_rows_of_an_open_batch():
    """Instance norms mix no rows and channels; tracing an upsampling takes no size for good."""
    model, x = Scaled(), torch.randn(3, 2, 4, 4)
    nn.init.normal_(model.norm.weight)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=1, max=9)},))
    run = mt.pipeline(mt.from_torch(program), {"m0": {"d": 2}, "m1": {"d": 1}}, ["norm"], microbatches=3)
    x = torch.randn(7, 2, 4, 4)
    torch.testing.assert_close(run(x), model(x).detach())


@pytest.mark.parametrize("name", OPEN)
def test_open_sizes(name):
    """One graph for all sizes, of the operators that torch finds, and right at all of them."""
    model, x = Of(OPEN[name]), torch.randn(6, 4)
    ours, theirs = both(model, (x,), ({0: torch.export.Dim.DYNAMIC},))
    assert isinstance(ours, torch_decompositions.DecomposedProgram)
    assert operators(ours) == operators(theirs)
    module = mt.from_torch(torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)))
    for rows in (6, 1, 2, 7, 80):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(mt.run_sequential(module.mod, [x, *module.params.values()]), model(x).detach())
        for mesh in ({"x": 2}, {"x": 3}):
            run = mt.distribute_module(module, mesh, {"input": {"x": 0}})
            torch.testing.assert_close(run(x), model(x).detach())


def test_a_size_that_a_constant_does_not_have():
    model, some = Of(OPEN["parts"]), {0: torch.export.Dim.DYNAMIC}
    module = mt.from_torch(torch.export.export(model, (torch.randn(6, 4),), dynamic_shapes=(some,)))
    with pytest.raises(mt.MeshTensorError, match=r"= 81 \(dim 0 of 'input'\), but the module is for \w+ <= 80"):
        mt.distribute_module(module, {"x": 2})(torch.randn(81, 4))


@pytest.mark.parametrize("dims", [(0,), (0, 1)])
def test_models_of_open_sizes(dims):
    config = llama.Config(layers=2)
    model, some = llama.build(config), dict.fromkeys(dims, torch.export.Dim.DYNAMIC)
    ours, theirs = both(model, llama.example_inputs(config), (some,))
    assert isinstance(ours, torch_decompositions.DecomposedProgram)
    assert operators(ours) == operators(theirs)
    module = mt.from_torch(torch.export.export(model, llama.example_inputs(config), dynamic_shapes=(some,)))
    run = mt.distribute_module(module, {"x": 2}, llama.tensor_parallel(config, "x"))
    for batch, positions in ((3, 8), (1, 8), *(((2, 1), (5, 7)) if 1 in dims else ())):
        tokens = torch.randint(config.vocabulary, (batch, positions))
        torch.testing.assert_close(run(tokens), model(tokens).detach(), rtol=1e-4, atol=1e-5)


def test_sizes_made_of_others():
    rows = torch.export.Dim("rows")
    model, x = Of(lambda w, x: (w @ x).unflatten(1, (2, -1)).exp().sum(1)), torch.randn(4, 6)
    module = mt.from_torch(torch.export.export(model, (x,), dynamic_shapes=({1: 2 * rows},)))
    for columns in (6, 4, 10):
        x = torch.randn(4, columns)
        torch.testing.assert_close(mt.run_sequential(module.mod, [x, *module.params.values()]), model(x).detach())
    with pytest.raises(mt.MeshTensorError, match="but the module is for .* != 2"):  # as torch itself does
        mt.run_sequential(module.mod, [torch.randn(4, 2), *module.params.values()])


def test_an_operator_that_is_registered_later():
    """What torch takes apart is found once, and again when there are more operators."""

    def known():
        return torch_decompositions._decompositions(torch_decompositions._composite_ops(), frozenset(), False)

    before = known()
    assert known() is before
    with torch.library._scoped_library("registered_later", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
        model, x = Of(lambda w, x: torch.ops.registered_later.twice(x) @ w), torch.randn(4, 4)
        ours, theirs = both(model, (x,))
        assert operators(ours) == operators(theirs)
        after = known()
        assert after.keys() == torch.export.default_decompositions().materialize().keys() | OWN_DECOMPOSITIONS.keys()
        assert after.keys() - before.keys() == {torch.ops.registered_later.twice.default}


def test_results_under_no_grad_are_results_of_the_model():
    """As they are, several, and beside others: with the values of torch, on a mesh."""

    class Frozen(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                y = super().forward(x) * 2
                z = y + 1
            return z, y, y + x

    class OnlyFrozen(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                return super().forward(x) * 2

    x = torch.randn(4, 8)
    for model in (Frozen(8, 8), OnlyFrozen(8, 8)):
        module = mt.from_torch(torch.export.export(model, (x,)))
        run = mt.distribute_module(module, {"x": 2}, {"x": {"x": 0}, "weight": {"x": 1}})
        torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
