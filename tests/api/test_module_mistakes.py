"""Mistakes that people make with modules, told in their own words."""

import pickle
from functools import partial

import pytest
import torch
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R

import mesh_tensor as mt
from mesh_tensor.runtime.module_inputs import ModuleSignature
from tests.plan.seed_modules import NESTED
from tests.refusals import refusal

refused = partial(refusal, mt.distribute_module)


def test_one_annotation_contradicts_nothing():
    """It can't be used as stated: both sides of the product are the same tensor."""

    @I.ir_module
    class Gram:
        @R.function
        def main(x: R.Tensor((8, 8), "float32")) -> R.Tensor((8, 8), "float32"):
            with R.dataflow():
                y = R.matmul(x, R.permute_dims(x))
                R.output(y)
            return y

    text = refused(Gram, {"x": 2}, {"x": {"x": 0}}, strict=True)
    assert "axis x splits" in text
    assert "why: the one annotation there is can't be used as stated there: an axis splits one factor of" in text
    assert "fix: state another layout for it, or leave out strict" in text
    assert "annotations" not in text
    assert "contradict" not in text
    run = mt.distribute_module(Gram, {"x": 2}, {"x": {"x": 0}})
    assert "an annotation that can't be used as stated" in run.explain()
    x = torch.randn(8, 8)
    torch.testing.assert_close(run(x), x @ x.T, rtol=1e-4, atol=1e-4)


def test_a_module_is_not_pickled():
    message = refusal(lambda: pickle.dumps(mt.distribute_module(NESTED, {"x": 2}, {})))
    assert "a MeshModule can't be pickled" in message
    assert "fix: pickle the weights, save the module, and distribute it again there" in message


def test_names_that_are_nearly_torchs():
    """They are told in torch's names, which the caller knows."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    imported = mt.from_torch(torch.export.export(model, (torch.randn(2, 4),)))
    weights = dict(model.state_dict())
    weights["0.wieght"] = weights.pop("0.weight")
    for text in (
        refused(imported.mod, {"x": 2}, {"0.wieght": {"x": 0}}),
        refused(imported.mod, {"x": 2}, weights=weights),
    ):
        assert "'0.weight', '0.bias'" in text
        assert "did you mean '0.weight'?" in text
        assert "p_0_weight" not in text


def test_other_sizes_than_it_was_exported_for():
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    run = mt.distribute_module(mt.from_torch(torch.export.export(model, (x,))), {"x": 2})
    message = refusal(lambda: run(torch.randn(3, 4)))
    assert "parameter 'input': (3, 4), but expected (2, 4) float32\n" in message
    assert "torch.export.export(..., dynamic_shapes=...)" in message
    message = refusal(lambda: run(x.double()))
    assert "dynamic_shapes" not in message


def test_weights_that_nobody_gave():
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    run = mt.distribute_module(mt.from_torch(torch.export.export(model, (x,))).mod, {"x": 2})
    with pytest.raises(mt.MeshTensorError, match="1 tensors for 3 parameters") as error:
        run(x)
    assert "what stays is given once: distribute_module(..., weights={name: tensor})" in str(error.value)


def test_what_from_torch_gives_prints_in_a_line():
    module = mt.from_torch(torch.export.export(torch.nn.Linear(400, 4), (torch.randn(2, 400),)))
    assert repr(module) == "ImportedModule(main; 2 weights)"


def test_a_part_of_a_batch_on_ranks(monkeypatch):
    module = mt.from_torch(torch.export.export(torch.nn.Linear(4, 4), (torch.randn(2, 4),)))
    signature = ModuleSignature(module.mod, "main")
    for ranks in (1, 2):
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda n=ranks: n)
        message = refusal(lambda: signature.check({"input": torch.randn(1, 4)}))
        assert ("DTensor.from_local(tensor, device_mesh, [Shard(0)])" in message) == (ranks == 2)
