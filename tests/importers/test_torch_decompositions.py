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
    "norms": lambda w, x: F.softmax(F.instance_norm(x[None] @ w), -1),
    "constants": constant_part,
    "written": lambda w, x: (w @ x).add_(1).relu_(),
    "random access": lambda w, x: w.index_select(0, x.argmax(-1)).cumsum(0),
}
WHOLE = {"norms", "written"}  # what is taken apart in torch's own way


def operators(program):
    """Those that are called, but for copies."""
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return Counter(name for name in names if name not in ("aten.clone.default", "aten.alias.default"))


def both(model, inputs):
    """The program in both ways."""
    program = torch.export.export(model, inputs)
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


def test_symbolic_sizes_are_taken_apart_in_torchs_own_way():
    rows = torch.export.Dim("rows")
    model = Of(FUNCTIONS["several results"])
    program = torch.export.export(model, (torch.randn(4, 6),), dynamic_shapes=({1: 2 * rows},))
    known = _Importer().convert_map
    assert isinstance(torch_decompositions.decomposed(program, KEPT, known), torch.export.ExportedProgram)
