"""Modules on meshes in folders, and on other meshes from there."""

import json

import pytest
import torch

import mesh_tensor as mt
from kernels.models import gpt2
from tests.plan.seed_modules import NESTED
from tests.refusals import refusal

pytest.importorskip("safetensors")

CONFIG = gpt2.Config(layers=1, fused=True)


@pytest.fixture(scope="module")
def model():
    return gpt2.build(CONFIG)


@pytest.fixture(scope="module")
def module(model):
    return mt.from_torch(torch.export.export(model, gpt2.example_inputs(CONFIG)))


@pytest.fixture(scope="module")
def folder(model, module, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model"
    mt.save(mt.distribute_module(module.mod, {"x": 2}, STATED, weights=module.params), path)
    return path


STATED = gpt2.tensor_parallel(CONFIG, "x") | {"blocks.0": {"x": 1}}
TOKENS = gpt2.example_inputs(CONFIG)


def gathered(run):
    """The layouts of two weights, with their names."""
    held = {name: tensor for name, tensor in run.state_dict(full=False).items() if isinstance(tensor, mt.MeshTensor)}
    return {name: str(held[name].sharding) for name in ("blocks.0.fc.weight", "blocks.0.proj.weight")}


@pytest.mark.parametrize("mesh", [None, {"x": 2}, {"x": 3}, {"y": 2, "x": 2}])
def test_saved_and_loaded(folder, model, mesh):
    run = mt.load(folder, mesh, poison=True)
    assert run.mesh == mt.Mesh(mesh or {"x": 2})
    torch.testing.assert_close(run(*TOKENS), model(*TOKENS).detach())
    before = "R, " if mesh and "y" in mesh else ""
    assert gathered(run) == {"blocks.0.fc.weight": f"{before}S[0]", "blocks.0.proj.weight": f"{before}S[1]"}
    state = run.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_saved_without_layouts(tmp_path):
    """The mesh is in the index: no layout says it."""
    model, x = torch.nn.Linear(4, 6), torch.randn(5, 4)
    mt.save(mt.distribute_module(mt.from_torch(torch.export.export(model, (x,))), {"x": 2}), tmp_path)
    for mesh, layouts in ((None, None), (None, {"input": {"x": 0}}), ({"y": 3}, {"input": {"y": 0}})):
        run = mt.load(tmp_path, mesh, layouts)
        assert run.mesh == mt.Mesh(mesh or {"x": 2})
        torch.testing.assert_close(run(x), model(x).detach())
    index = json.loads((tmp_path / "weights.json").read_text())
    for wrong, said in (
        ({"x": 0}, "a size is at least 1"),
        ([2], "a mesh is a dict"),
        (None, "the module has no mesh"),
    ):
        (tmp_path / "weights.json").write_text(json.dumps(index | {"mesh": wrong}))
        with pytest.raises(mt.MeshTensorError, match=said):
            mt.load(tmp_path)


def test_other_layouts(folder, model):
    run = mt.load(folder, {"d": 2}, {"tokens": {"d": 0}})
    torch.testing.assert_close(run(*TOKENS), model(*TOKENS).detach())
    assert gathered(run) == {"blocks.0.fc.weight": "R", "blocks.0.proj.weight": "R"}


def test_saved_again_where_it_was_loaded_from(folder, model, tmp_path):
    run = mt.load(folder, {"x": 3})
    mt.save(run, tmp_path)
    mt.save(mt.load(tmp_path), tmp_path)
    again = mt.load(tmp_path, {"x": 1})
    torch.testing.assert_close(again(*TOKENS), model(*TOKENS).detach())


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}, {"y": 2}])
def test_functions_that_are_called(tmp_path, mesh):
    """Values of called functions are annotated, too."""
    tensors = [torch.randn(128, 128) / 128**0.5 for _ in range(5)]
    stated = {"A": {"x": 0}, "mlp.Y": {"x": 1}, "mlp.Z": {"y": 0}}
    mt.save(mt.distribute_module(NESTED, {"x": 2, "y": 2}, stated, check_indices=False), tmp_path)
    run = mt.load(tmp_path, mesh, poison=True)
    torch.testing.assert_close(run(*tensors), mt.run_sequential(NESTED, tensors), rtol=1e-4, atol=1e-4)


def test_an_index_that_is_damaged(folder, tmp_path):
    for name in ("module.json", "weights-00000.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    index = json.loads((folder / "weights.json").read_text())
    for text, said in (
        (json.dumps(index | {"function": 3}), "weights.json names no function"),
        (json.dumps(index | {"function": "other"}), "the module has no Relax function 'other'"),
        ("[" * 100_000, "can't be read"),
    ):
        (tmp_path / "weights.json").write_text(text)
        message = refusal(mt.load, tmp_path)
        assert said in message


def test_what_can_not_be_loaded(folder, tmp_path):
    def refused(work):
        message = refusal(work)
        return message

    assert "there is no module.json" in refused(lambda: mt.load(tmp_path))
    text = refused(lambda: mt.load(folder, {"z": 2}))
    assert 'it was saved for Mesh({"x": 2}), which has no axis of Mesh({"z": 2})' in text
    assert "pass shardings" in text
    assert "shardings without a mesh" in refused(lambda: mt.load(folder, shardings={}))
    assert "a module with weights of its own" in refused(lambda: mt.load(folder, weights={}))
    assert "save takes a MeshModule, not int" in refused(lambda: mt.save(3, tmp_path))
    model = mt.from_torch(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)))
    assert "mt.save_module(module.mod, file)" in refused(lambda: mt.save(model, tmp_path))
    torch.save({}, tmp_path / "weights.pt")
    assert "torch.load(file, weights_only=True)" in refused(lambda: mt.open_weights(tmp_path / "weights.pt"))
    assert "can't be written" in refused(lambda: mt.save(mt.load(folder), folder / "module.json" / "inside"))
