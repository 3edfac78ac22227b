"""Modules from torch, ONNX and files of TVM compute what they computed where they came from."""

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
import tvm.script
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional as F
from tvm import ir, relax

import mesh_tensor as mt

DATA = Path(__file__).parent / "data"
SAVE = Path(__file__).parent / "save_with_apache_tvm.py"


def imported(model, *inputs):
    """The module of a torch model; it parses again from what it prints."""
    module = mt.from_torch(torch.export.export(model.eval(), inputs))
    assert relax.analysis.well_formed(module.mod)
    ir.assert_structural_equal(tvm.script.from_source(module.mod.script(show_meta=True)), module.mod)
    return module


def check(model, *inputs, **tolerances):
    """What the module computes is what torch computes."""
    module = imported(model, *inputs)
    names = [param.name_hint for param in module.mod["main"].params[: len(inputs)]]
    result = mt.run_sequential(module.mod, dict(zip(names, inputs, strict=True)) | module.params)
    expected = model(*inputs)
    torch.testing.assert_close(result, expected.detach(), **tolerances)
    return module


def operators(module):
    """The names of the operators that the module's function calls."""
    names = []
    relax.analysis.post_order_visit(
        module.mod["main"],
        lambda expr: names.append(expr.op.name) if isinstance(getattr(expr, "op", None), ir.Op) else None,
    )
    return names


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **self.options)


MASK = torch.rand(6, 6) < 0.7
MASK[:, 0] = True


@pytest.mark.parametrize(
    ("options", "key_heads"),
    [
        ({}, 4),
        ({"is_causal": True}, 4),
        ({"scale": 0.3}, 4),
        ({"is_causal": True, "enable_gqa": True}, 2),
        ({"attn_mask": MASK}, 4),
        ({"attn_mask": torch.rand(4, 6, 6)}, 4),
    ],
)
def test_attention_stays_one_operator(options, key_heads):
    q = torch.randn(2, 4, 6, 8)
    k, v = torch.randn(2, key_heads, 6, 8), torch.randn(2, key_heads, 6, 8)
    module = check(Attention(**options), q, k, v)
    assert len([name for name in operators(module) if name.startswith("relax.nn.attention")]) == 1


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x: F.layer_norm(x, (8,)), [(4, 8)]),
        (lambda x: F.rms_norm(x, (8,)), [(4, 8)]),
        (lambda x, w: F.rms_norm(x, (8,), w, eps=1e-3), [(4, 8), (8,)]),
        (F.gelu, [(4, 8)]),
        (lambda x: F.gelu(x, approximate="tanh"), [(4, 8)]),
        (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), [(3,), (2, 4), (4, 3)]),
        (lambda a, b: a @ b, [(2, 3, 4), (4, 5)]),
        (lambda a, b: torch.bmm(a, b), [(2, 3, 4), (2, 4, 5)]),
        (lambda x: F.max_pool2d(x, 2), [(1, 2, 4, 4)]),
        (lambda x: x.var(0), [(4, 8)]),
        (lambda x: x.std((0, -1), keepdim=True, correction=0), [(4, 8, 3)]),
        (lambda x: x.amax(0) - x.amin(), [(4, 8)]),
        (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=(1, 0), groups=2), [(2, 4, 6, 7), (6, 2, 3, 3), (6,)]),
        (lambda x: torch.softmax(x, -1).sum(0), [(4, 8)]),
        (lambda x: torch.where(torch.ones(4, 4).tril() > 0, x, -1e9).softmax(-1), [(4, 4)]),
    ],
)
def test_operators(function, shapes):
    check(Call(function), *(torch.randn(shape) for shape in shapes))


def test_half_precision_stays_half():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()).half(), torch.randn(4, 8).half()
    module = check(model, x, rtol=1e-3, atol=1e-3)  # intermediate results are rounded to 11 bits
    assert module.mod["main"].ret_struct_info.dtype == "float16"


def test_names_of_weights_and_submodules():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8, bias=False))
    module = check(model, torch.randn(4, 8))
    assert list(module.params) == ["p_0_weight", "p_0_bias", "p_2_weight"]
    torch.testing.assert_close(module.params["p_2_weight"], model[2].weight.detach())
    assert module.names["0.weight"] == "p_0_weight"
    stated = {"0.weight": {"x": 0}, "1": {"x": 1}, "2.weight": {"x": 1}, "2": "R"}
    mod = mt.annotate_module(module.mod, {"x": 2}, stated)
    layouts = [str(annotation.sharding) for annotation in mt.read_module_annotations(mod).annotations.values()]
    assert layouts == ["S[0]", "S[1]", "S[1]", "R"]
    (relu,) = [b for b in mod["main"].body.blocks[1].bindings if b.var.name_hint == f"{module.names['1']}_sharded"]
    assert relu.value.attrs.placement.dim_specs[0].axis == 1


def test_submodule_that_is_called_twice_has_no_name():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(torch.relu(self.fc(x)))

    module = check(Twice(), torch.randn(4, 8))
    assert "fc.weight" in module.names
    assert "fc" not in module.names


def test_inputs_and_weights_with_one_name():
    class Clash(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.randn(8))

        def forward(self, x):
            return x * self.x

    module = check(Clash(), torch.randn(4, 8))
    assert list(module.params) == ["x_1"]


def test_buffers_are_constants():
    module = check(nn.BatchNorm1d(8), torch.randn(4, 8))
    assert list(module.params) == ["weight", "bias"]


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(12, 8)
            self.head = nn.Linear(8, 12, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.embed(tokens))

    module = check(Tied(), torch.randint(12, (2, 3)))
    assert module.params["embed_weight"].data_ptr() == module.params["head_weight"].data_ptr()


def test_symbolic_sizes():
    batch = torch.export.Dim("batch", min=2, max=64)
    model = nn.Linear(8, 4).eval()
    program = torch.export.export(model, (torch.randn(4, 8),), dynamic_shapes={"input": {0: batch}})
    module = mt.from_torch(program)
    x = torch.randn(7, 8)
    torch.testing.assert_close(mt.run_sequential(module.mod, {"input": x} | module.params), model(x).detach())


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
    mod = mt.load_module(path)
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
    ir.assert_structural_equal(mt.load_module(tmp_path / "a.py"), mod)


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
    torch.testing.assert_close(mt.run_sequential(mt.load_module(path), {"x": x}), 2 * x)


def test_one_function(tmp_path):
    path = tmp_path / "function.txt"
    path.write_text('@R.function\ndef main(x: R.Tensor((4,), "float32")):\n    y = R.nn.relu(x)\n    return y\n')
    assert isinstance(mt.load_module(path), ir.IRModule)
