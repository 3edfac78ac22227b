"""Modules in files: what is saved is loaded as it was, whatever saved it."""

import json
import math

import numpy as np
import pytest
import torch
import tvm
from tvm import ir, relax
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R

import mesh_tensor as mt
from mesh_tensor.importers import saved, saved_probe
from tests.plan.modules import Heads, function
from tests.plan.seed_modules import Mlp
from tests.random_modules.build import build
from tests.random_modules.strategy import make_case


def no_probe(monkeypatch):
    """From here on, nothing may be tried in a process of its own."""

    def refuse(form, text):
        raise AssertionError("a file with a checksum was tried out")

    monkeypatch.setattr(saved, "tried", refuse)


@pytest.mark.parametrize("mod", [Heads, Mlp], ids=["heads", "mlp"])
def test_what_is_saved_is_loaded(tmp_path, monkeypatch, mod):
    no_probe(monkeypatch)
    mt.save_module(mod, tmp_path / "module.json")
    ir.assert_structural_equal(mt.load_module(tmp_path / "module.json"), mod)
    assert [path.name for path in tmp_path.iterdir()] == ["module.json"]


@pytest.mark.parametrize("number", range(12))
def test_random_modules(tmp_path, monkeypatch, number):
    mod = build(make_case(number).source)
    (tmp_path / "plain.json").write_text(ir.save_json(mod))
    ir.assert_structural_equal(mt.load_module(tmp_path / "plain.json"), mod)
    no_probe(monkeypatch)
    mt.save_module(mod, tmp_path / "own.json")
    ir.assert_structural_equal(mt.load_module(tmp_path / "own.json"), mod)


def test_a_saved_file_says_what_wrote_it_and_is_read_by_tvm(tmp_path):
    mt.save_module(Heads, tmp_path / "module.json")
    text = (tmp_path / "module.json").read_text()
    header = json.loads(text)["mesh_tensor"]
    assert header["format"] == 1
    assert header["tvm"] == tvm.__version__
    assert set(header) == {"format", "mesh_tensor", "tilelang", "tvm", "sha256"}
    ir.assert_structural_equal(ir.load_json(text), Heads)


def test_saving_over_a_file(tmp_path):
    (tmp_path / "module.json").write_text("something else")
    mt.save_module(Heads, str(tmp_path / "module.json"))
    ir.assert_structural_equal(mt.load_module(tmp_path / "module.json"), Heads)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e-45, -0.0, 0.1])
def test_constants_of_any_value(tmp_path, value):
    kept = np.array([value], "float32")
    mod = function(lambda emit, x: emit(relax.op.add(x, relax.const(kept))), x=(1,))
    mt.save_module(mod, tmp_path / "module.json")
    result = mt.run_sequential(mt.load_module(tmp_path / "module.json"), [torch.zeros(1)])
    assert np.array_equal(result.numpy(), kept, equal_nan=True)


@I.ir_module
class Infinite:
    @R.function
    def main(x: R.Tensor((3,), "float32")):
        y = R.full(R.shape([3]), R.const(float("-inf"), "float32"), "float32")
        return R.maximum(x, y)


def test_attributes_of_any_value(tmp_path):
    mt.save_module(Infinite, tmp_path / "module.json")
    x = torch.randn(3)
    torch.testing.assert_close(mt.run_sequential(mt.load_module(tmp_path / "module.json"), [x]), x)


def test_the_format_is_stated(tmp_path):
    mt.save_module(Heads, tmp_path / "module.json")
    (tmp_path / "module").write_bytes((tmp_path / "module.json").read_bytes())
    ir.assert_structural_equal(mt.load_module(tmp_path / "module", format="json"), Heads)
    (tmp_path / "text").write_text(Heads.script(show_meta=True))
    ir.assert_structural_equal(mt.load_module(tmp_path / "text", format="tvmscript", trusted=True), Heads)


def test_a_process_tries_several_files_and_survives_them(tmp_path):
    """What kills TVM is told as what it is; the next one is tried as if nothing had been."""
    deep = {"root_index": 1, "nodes": [{"type": "None"}, {"type": "ffi.Array", "data": [1]}]}
    assert saved_probe.tried("json", json.dumps(deep)).problem == "TVM dies of it (SIGSEGV)"
    assert saved_probe.tried("json", ir.save_json(Heads)).problem == ""
    process = saved_probe._process()
    process.kill()
    process.wait()
    assert saved_probe.tried("json", ir.save_json(Heads)).problem == ""
    number = '{"root_index": 0, "nodes": [{"type": "int", "data": 3}]}'
    assert "no module" in saved_probe.tried("json", number).problem
