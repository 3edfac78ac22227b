"""Modules from ONNX and files of TVM compute what they computed where they came from."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.reference
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.nn import functional as F
from tvm import ir, relax

import mesh_tensor as mt

DATA = Path(__file__).parent / "data"
SAVE = Path(__file__).parent / "save_with_apache_tvm.py"


def onnx_file(path, nodes, inputs, outputs, weights):
    """A file of a model; weights are arrays by name."""
    made = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.save(model, path)
    return path


def test_onnx(tmp_path):
    """Names that TVM's importer takes for one: it strips the letters of "onnx::" off them."""
    weights = {
        "o.w": np.random.randn(8, 16).astype("float32"),
        "n.w": np.random.randn(16).astype("float32"),
        "x.w": np.random.randn(16, 4).astype("float32"),
        "shape": np.array([2, 6], "int64"),
    }
    nodes = [
        helper.make_node("MatMul", ["in.put", "o.w"], ["a"]),
        helper.make_node("Add", ["a", "n.w"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "x.w"], ["d"]),
        helper.make_node("Reshape", ["d", "shape"], ["out"]),
    ]
    inputs = [helper.make_tensor_value_info("in.put", TensorProto.FLOAT, [3, 8])]
    outputs = [helper.make_tensor_value_info("out", TensorProto.FLOAT, [2, 6])]
    path = onnx_file(tmp_path / "model.onnx", nodes, inputs, outputs, weights)
    module = mt.from_onnx(path)
    assert relax.analysis.well_formed(module.mod)
    assert [param.name_hint for param in module.mod["main"].params][:4] == ["in_put", "o_w", "n_w", "x_w"]
    x = np.random.randn(3, 8).astype("float32")
    (expected,) = onnx.reference.ReferenceEvaluator(str(path)).run(None, {"in.put": x})
    result = mt.run_sequential(module.mod, {"in_put": torch.from_numpy(x)} | module.params)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-5)
    mod = mt.annotate_module(module.mod, {"x": 2}, {"o.w": {"x": 1}, "in.put": {}})
    assert len(mt.read_module_annotations(mod).annotations) == 2


def test_onnx_sizes_may_be_given(tmp_path):
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])]
    path = onnx_file(tmp_path / "model.onnx", [helper.make_node("Relu", ["x"], ["y"])], inputs, outputs, {})
    assert mt.from_onnx(path).mod["main"].params[0].struct_info.shape[0].name == "batch"
    module = mt.from_onnx(path, shapes={"x": (3, 8)})
    assert [int(size) for size in module.mod["main"].params[0].struct_info.shape] == [3, 8]


def run_saved(path):
    """A module as `save_with_apache_tvm` saves it, loaded and run."""
    mod = mt.load_module(path, trusted=path.suffix == ".txt")
    x, w1, w2 = torch.randn(8, 4), torch.randn(4, 16), torch.randn(16, 4)
    result = mt.run_sequential(mod, {"x": x, "w1": w1, "w2": w2})
    torch.testing.assert_close(result, (2 * F.gelu(x @ w1)) @ w2 + torch.tensor([1.0, 2, 3, 4]), atol=1e-4, rtol=1e-4)
    assert [str(a.sharding) for a in mt.read_module_annotations(mod).annotations.values()] == ["S[1]"]


@pytest.mark.parametrize("name", ["apache_tvm_0_25.json", "apache_tvm_0_25.txt"])
def test_modules_that_apache_tvm_saved(name):
    """Made by the commands in save_with_apache_tvm.py."""
    run_saved(DATA / name)


def apache_python():
    """A Python that has apache-tvm: MESH_TENSOR_APACHE_TVM, or this one."""
    try:
        importlib.metadata.version("apache-tvm")
    except importlib.metadata.PackageNotFoundError:
        return os.environ.get("MESH_TENSOR_APACHE_TVM")
    return os.environ.get("MESH_TENSOR_APACHE_TVM", sys.executable)


@pytest.mark.skipif(apache_python() is None, reason="MESH_TENSOR_APACHE_TVM names no Python with apache-tvm")
def test_apache_tvm_saves_now(tmp_path):
    environment = {"PATH": os.environ["PATH"]}  # tilelang leaves paths of its TVM in the environment
    subprocess.run([apache_python(), SAVE, tmp_path / "saved"], env=environment, check=True, timeout=120)
    for name in ("saved.json", "saved.txt"):
        run_saved(tmp_path / name)


def test_own_modules_load_again(tmp_path):
    mod = mt.load_module(DATA / "apache_tvm_0_25.json")
    (tmp_path / "a.json").write_text(ir.save_json(mod))
    (tmp_path / "a.py").write_text(mod.script(show_meta=True))
    ir.assert_structural_equal(mt.load_module(tmp_path / "a.json"), mod)
    ir.assert_structural_equal(mt.load_module(tmp_path / "a.py", trusted=True), mod)


def test_text_as_people_write_it(tmp_path):
    """With imports, and the names of blocks of TVM before 0.22."""
    path = tmp_path / "module.py"
    path.write_text(
        '''
"""A module."""
from tvm.script import ir as I, relax as R, tir as T

@I.ir_module
class Module:
    @T.prim_func
    def double(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4, 8), "float32")):
        for i, j in T.grid(4, 8):
            with T.block("double"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj] * T.float32(2)

    @R.function
    def main(x: R.Tensor((4, 8), "float32")):
        y = R.call_tir(Module.double, (x,), out_sinfo=R.Tensor((4, 8), "float32"))
        return y
'''
    )
    x = torch.randn(4, 8)
    torch.testing.assert_close(mt.run_sequential(mt.load_module(path, trusted=True), {"x": x}), 2 * x)


def test_one_function(tmp_path):
    path = tmp_path / "function.txt"
    path.write_text('@R.function\ndef main(x: R.Tensor((4,), "float32")):\n    y = R.nn.relu(x)\n    return y\n')
    assert isinstance(mt.load_module(path, trusted=True), ir.IRModule)
