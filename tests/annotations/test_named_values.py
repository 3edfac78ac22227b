"""Names of values: those in torch, through wrappers, tied ones, patterns of names."""

import re

import pytest
import torch
from torch import nn
from tvm import relax

import mesh_tensor as mt
from tests.plan.modules import function
from tests.refusals import refusal


class Tied(nn.Module):
    """An embedding whose table is the last layer's weight, and two layers."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.head.weight = self.table.weight
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.unused = nn.Linear(6, 6)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


@pytest.fixture(scope="module")
def model():
    return Tied()


@pytest.fixture(scope="module")
def module(model):
    return mt.from_torch(torch.export.export(model, (IDS,)))


IDS = torch.arange(5)


def layouts(module, shardings, **options):
    """The layouts that are stated, by value."""
    mod = mt.annotate_module(module.mod, {"x": 2}, shardings, **options)
    stated = mt.read_module_annotations(mod).annotations
    return {name.removesuffix("_sharded"): str(annotation.sharding) for (_, name), annotation in stated.items()}


def refused(module, shardings):
    return refusal(mt.annotate_module, module.mod, {"x": 2}, shardings)


def test_tied_weights_are_one_parameter_under_all_their_names(model, module):
    assert module.names["table.weight"] == module.names["head.weight"] == "table_weight"
    assert "head_weight" not in [param.name_hint for param in module.mod["main"].params]
    for name in ("table.weight", "head.weight"):
        run = mt.distribute_module(module.mod, {"x": 2}, {name: {"x": 0}}, weights=module.params, poison=True)
        assert "table_weight" in run.explain()
        torch.testing.assert_close(run(IDS), model(IDS))
        assert layouts(module, {name: {"x": 0}}) == {"table_weight": "S[0]"}


def test_tied_weights_in_a_state_dict(model, module):
    weights = {name: weight.detach() for name, weight in model.named_parameters(remove_duplicate=False)}
    torch.testing.assert_close(mt.distribute_module(module.mod, {"x": 2}, weights=weights)(IDS), model(IDS))
    weights["head.weight"] = weights["head.weight"] + 1
    message = refusal(mt.distribute_module, module.mod, {"x": 2}, weights=weights)
    assert "a weight is given under two names, 'table.weight', 'head.weight', with two values" in message


@pytest.mark.parametrize("pattern", ["blocks.*.weight", "*.?.weight", re.compile(r"blocks\.\d+\.weight")])
def test_patterns(module, pattern):
    expected = {f"blocks_{n}_weight": "S[0]" for n in range(3)}
    assert layouts(module, {pattern: {"x": 0}}) == expected
    assert layouts(module, {pattern: {"x": 0}, "blocks.1.weight": {"x": 1}}) == expected | {"blocks_1_weight": "S[1]"}


def test_patterns_of_the_modules_own_names(module):
    assert layouts(module, {"blocks_?_bias": {"x": 0}}) == {f"blocks_{n}_bias": "S[0]" for n in range(3)}


class Again(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fcs = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x):
        return self.fcs[0](self.fcs[1](self.fcs[0](x)))


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        *(("fcs.0", 2), ("fcs.0@1", 1), ("fcs.?", 3), ("fcs.[0-1]", 3), ("fcs.0*", 2), ("*@0", 1)),
        (re.compile(r"fcs\.\d"), 3),
    ],
)
def test_calls_of_a_submodule_that_is_called_twice(name, calls):
    module = mt.from_torch(torch.export.export(Again(), (torch.randn(2, 4),)))
    mod = mt.annotate_module(module.mod, {"x": 2}, {name: {"x": 0}, "fcs.0.weight": {}, "fcs.1.weight": {}})
    stated = mt.read_module_annotations(mod).annotations.values()
    assert sum(each.sharding.text() == "S[0]" for each in stated) == calls


def test_options_of_patterns(module):
    mod = mt.annotate_module(module.mod, {"x": 2}, {"*.bias": {"x": 0}}, open=["*.bias"], priority={"*.bias": 2})
    stated = list(mt.read_module_annotations(mod).annotations.values())
    assert [(annotation.open, annotation.priority) for annotation in stated] == [(True, 2)] * 3


@pytest.mark.parametrize(
    "name",
    [
        "model.blocks.0.weight",
        "module.model.blocks.0.weight",
        "module.blocks.0.weight",
        "_orig_mod.blocks.0.weight",
        "module._orig_mod.blocks.0.weight",
    ],
)
def test_wrappers_do_not_matter(module, name):
    assert layouts(module, {name: {"x": 0}}) == {"blocks_0_weight": "S[0]"}


def test_wrappers_of_weights_do_not_matter(model, module):
    weights = {f"_orig_mod.model.{name}": weight.detach() for name, weight in model.named_parameters()}
    torch.testing.assert_close(mt.distribute_module(module.mod, {"x": 2}, weights=weights)(IDS), model(IDS))


class Twice(nn.Module):
    """A layer, and one of the same name in a submodule that is called as wrappers are."""

    def __init__(self):
        super().__init__()
        self.fc, self.module = nn.Linear(6, 6), nn.Module()
        self.module.fc = nn.Linear(6, 6)

    def forward(self, x):
        return self.fc(self.module.fc(x))


def test_names_that_could_mean_several():
    module = mt.from_torch(torch.export.export(Twice(), (torch.ones(2, 6),)))
    assert layouts(module, {"fc.weight": {"x": 0}}) == {"fc_weight": "S[0]"}
    assert layouts(module, {"module.fc.weight": {"x": 0}}) == {"module_fc_weight": "S[0]"}
    text = refused(module, {"_orig_mod.fc.weight": {"x": 0}})
    assert "there is no value '_orig_mod.fc.weight'" in text
    assert "did you mean 'fc.weight'?" in text or "did you mean 'module.fc.weight'?" in text


def test_patterns_that_fit_nothing_or_disagree(module):
    said = refused(module, {"layers.*": {"x": 0}})
    assert "no value that is used has a name like 'layers.*', but '" in said
    assert "no value that is used has a name like 'x+'" in refused(module, {re.compile("x+"): {"x": 0}})
    text = refused(module, {"blocks.*.weight": {"x": 0}, "*.0.weight": {"x": 1}})
    assert "value 'blocks_0_weight' of 'main' is given two layouts, one of them under '*.0.weight'" in text


def test_layouts_of_what_nothing_uses(module):
    text = refused(module, {"unused.weight": {"x": 0}})
    assert "nothing uses parameter 'unused.weight'" in text
    assert layouts(module, {"*s*.weight": {"x": 0}}).keys() == {f"blocks_{n}_weight" for n in range(3)}


def test_what_a_module_on_a_mesh_says_of_itself():
    """Its parameters, as a call takes them: without the weights."""
    mod = function(lambda emit, x, w: emit(relax.op.matmul(x, w)), x=(4, 8), w=(8, 4))
    run = mt.distribute_module(mod, {"x": 2}, {"x": {"x": 0}}, weights={"w": torch.ones(8, 4)}, target="interpret")
    assert repr(run) == "MeshModule(main(x), Mesh({\"x\": 2}), target='interpret')"
    run = mt.distribute_module(mod, {"x": 2}, {"x": {"x": 0}}, target="interpret")
    assert repr(run) == "MeshModule(main(x, w), Mesh({\"x\": 2}), target='interpret')"
