"""What can't be imported is refused by name."""

import importlib
import io

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import mesh_tensor as mt
from mesh_tensor.importers import torch_ops
from mesh_tensor.importers.imported import refuse_differences
from tests.importers.models import Function
from tests.importers.test_frontends_onnx import X, save
from tests.refusals import refusal


class Call(nn.Module):
    """A function as a module, inside another one."""

    def __init__(self, function):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), Function(function))

    def forward(self, x):
        return self.inner(x)


def refused(model, *inputs):
    return refusal(mt.from_torch, torch.export.export(model, inputs))


def test_all_unknown_operators_are_named():
    text = refused(Call(lambda x: x.new_empty_strided((4, 4), (1, 4)) + x.to_sparse().to_dense()), torch.randn(4, 4))
    assert "torch operator aten.new_empty_strided.default is not known (value 'new_empty_strided' in inner.1)" in text
    assert "torch operator aten._to_sparse.default is not known" in text


def test_random_operators():
    text = refused(nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout()).train(), torch.randn(4, 4))
    assert "random" in text
    assert "eval mode" in text


def test_operator_that_can_not_be_converted():
    text = refused(Call(lambda x: x[1:].as_strided((3, 3), (2, 1))), torch.randn(4, 4))
    assert "torch operator aten.as_strided.default can't be imported" in text
    assert "looks at the memory of a tensor that is a part of another one" in text
    assert "give it .clone(memory_format=torch.contiguous_format) first" in text
    text = refused(Call(lambda x: x.t().as_strided((4, 4), (4, 1))), torch.randn(4, 4))
    assert "looks at the memory of a tensor that does not lie in one piece" in text
    assert "in inner.1" in text


def test_attention_of_other_ranks():
    text = refused(Call(lambda x: nn.functional.scaled_dot_product_attention(x[None], x, x)), torch.randn(4, 4))
    assert "attention of tensors of [3, 2, 2] dims" in text
    assert "with batches and heads [[1], [], []]" in text
    assert "expand them to (batch, heads, positions, size) tensors" in text


def test_floats_of_8_bits():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)

        def forward(self, x, s):
            return x * self.w.float() * s.float()

    program = torch.export.export(Scaled(), (torch.randn(3), torch.ones(3).to(torch.float8_e5m2)))
    with pytest.raises(mt.MeshTensorError) as error:
        mt.from_torch(program)
    assert "'p_w' is of torch.float8_e4m3fn" in str(error.value)
    assert "'s' is of torch.float8_e5m2" in str(error.value)


def test_weights_without_memory():
    """An exporter under FakeTensorMode gives weights that are shapes only."""
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        program = torch.export.export(nn.Linear(4, 3), (torch.randn(2, 4),))
    with pytest.raises(mt.MeshTensorError) as error:
        mt.from_torch(program)
    text = str(error.value)
    assert "the weights 'weight', 'bias' have no memory" in text
    assert "FakeTensorMode" in text
    assert "export the model with real weights" in text


def test_results_that_differ(monkeypatch):
    """A converter that forgets an option, as many of TVM's do."""
    monkeypatch.setitem(torch_ops.CONVERTERS, "gelu.default", lambda node, importer: importer.env[node.args[0]])
    text = refused(nn.GELU(), torch.randn(4, 4))
    assert "result 0 differs from torch's by" in text
    assert "example inputs" in text


@pytest.mark.parametrize(
    ("found", "exact", "is_wrong"), [(1.002, 1.0005, False), (1.002, 1.0, True), (1.2, 0.9, True), (1.2, 1.2001, False)]
)
def test_float64_tells_what_rounding_changes(found, exact, is_wrong):
    """What torch's own result is off, another may be, too; but little. One that is right is so whatever torch's is."""

    def compared():
        results, expected, wide = torch.tensor(found), [torch.tensor(1.0)], [torch.tensor(exact, dtype=torch.float64)]
        refuse_differences(results, expected, "torch", "here", "don't", exact=lambda: wide)

    if is_wrong:
        with pytest.raises(mt.MeshTensorError, match="result 0 differs"):
            compared()
    else:
        compared()


def test_written_inputs():
    class Adds(nn.Module):
        def forward(self, x):
            return x.add_(1)

    class Copies(Adds):
        def forward(self, x):
            x = x.clone()
            return super().forward(x), x

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(4, 4))

        def forward(self, x):
            return self.kept.add_(x)

    text, x = refused(Adds(), torch.randn(4, 4)), torch.randn(4, 4)
    assert "the program writes its input 'x'" in text
    assert "x = x.clone()" in text
    assert "as a buffer" in text
    run = mt.distribute_module(mt.from_torch(torch.export.export(Copies(), (x,))), {"d": 2}, {"x": {"d": 0}})
    torch.testing.assert_close(run(x), (x + 1, x + 1))
    run = mt.distribute_module(mt.from_torch(torch.export.export(Keeps(), (x,))), {"d": 2}, {"x": {"d": 0}})
    assert torch.equal(run(x), x)
    assert torch.equal(run(x), x + x)


@pytest.mark.parametrize(
    ("function", "named", "fix"),
    [
        (
            lambda x: x[x > 0],
            "aten.index.Tensor gives what depends on data (value 'index' in inner.1)",
            "use torch.where(mask, x, 0) instead of x[mask]",
        ),
        (lambda x: x.nonzero(), "aten.nonzero.default gives what depends on data", "torch.nonzero_static(mask, size="),
        (
            lambda x: x.new_zeros(x.max().int().item()),
            "aten._local_scalar_dense.default gives what depends on data",
            "keep numbers that are read by .item() or .tolist() in tensors where they say sizes",
        ),
    ],
)
def test_what_depends_on_data(function, named, fix):
    text = refused(Call(function), torch.randn(4, 4))
    assert f"torch operator {named}" in text
    assert fix in text


COLLECTIVES = {
    "all_reduce": ("sum", "0"),
    "all_gather_into_tensor": (2, "0"),
    "reduce_scatter_tensor": ("sum", 2, "0"),
    "all_to_all_single": ([2, 2], [2, 2], "0"),
    "broadcast": (0, "0"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_of_torch(name):
    """What one device of several does is no program of whole tensors: nothing is left out silently."""
    ops = torch.ops._c10d_functional
    text = refused(Call(lambda x: ops.wait_tensor(getattr(ops, name)(x, *COLLECTIVES[name]))), torch.randn(4, 4))
    assert f"torch operator _c10d_functional.{name}.default is not known" in text
    assert "torch operator _c10d_functional.wait_tensor.default is not known" in text
    assert "state how tensors lie: the collectives follow" in text
    assert "mt.manual_computation" in text


def test_sizes_as_inputs():
    class Power(nn.Module):
        def forward(self, x, exponent):
            return x**exponent

    program = torch.export.export(Power(), (torch.randn(4), 3), dynamic_shapes=(None, torch.export.Dim.DYNAMIC))
    with pytest.raises(mt.MeshTensorError, match="the input 'exponent' is a number that is not constant"):
        mt.from_torch(program)


def test_no_program():
    with pytest.raises(mt.MeshTensorError, match="a Linear is no exported program"):
        mt.from_torch(nn.Linear(2, 2))


def save_onnx(path, op, **attributes):
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])]
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], **attributes)], "graph", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.save(model, path)
    return path


def test_onnx_operator(tmp_path):
    with pytest.raises(mt.MeshTensorError, match="not supported for frontend ONNX: RandomUniformLike") as error:
        mt.from_onnx(save_onnx(tmp_path / "model.onnx", "Bernoulli"))
    assert "model.onnx" in str(error.value)


def test_onnx_file(tmp_path):
    with pytest.raises(mt.MeshTensorError, match="there is no file"):
        mt.from_onnx(tmp_path / "none.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(mt.MeshTensorError, match="is no valid ONNX model"):
        mt.from_onnx(tmp_path / "bad.onnx")
    with pytest.raises(mt.MeshTensorError, match="^a bytes is no valid ONNX model"):
        mt.from_onnx(b"no model")
    with pytest.raises(mt.MeshTensorError, match="a dict is no ONNX model(?s:.*)an onnx.ModelProto"):
        mt.from_onnx({"model": 1})
    with pytest.raises(mt.MeshTensorError, match="a StringIO, whose read.. gives 'text' is no ONNX model"):
        mt.from_onnx(io.StringIO("text"))


def test_onnx_tensors_in_files_of_their_own(tmp_path):
    (expected,) = save(tmp_path / "model.onnx", "Add", {"x": X}, {"w": X})
    onnx.save(onnx.load(tmp_path / "model.onnx"), tmp_path / "apart.onnx", save_as_external_data=True, size_threshold=0)
    assert torch.equal(
        mt.run_sequential(mt.from_onnx(tmp_path / "apart.onnx").mod, [torch.from_numpy(X)] * 2), expected
    )
    without = onnx.load(tmp_path / "apart.onnx", load_external_data=False)
    for given in (without, without.SerializeToString()):
        with pytest.raises(mt.MeshTensorError, match="the tensors .w. lie in files beside(?s:.*)pass the path"):
            mt.from_onnx(given)


@pytest.mark.parametrize(
    ("node", "given", "made", "said"),
    [
        (helper.make_node("Shape", ["x"], ["y"]), TensorProto.FLOAT, (TensorProto.INT64, [2]), "result 0 is no tensor"),
        (
            helper.make_node("Cast", ["x"], ["y"], to=TensorProto.INT8),
            TensorProto.INT4,
            (TensorProto.INT8, [2, 4]),
            "x is of int4, which has parts of bytes",
        ),
    ],
)
def test_onnx_inputs_and_results(node, given, made, said, tmp_path):
    x, y = helper.make_tensor_value_info("x", given, ["n", 4]), helper.make_tensor_value_info("y", *made)
    model = helper.make_model(helper.make_graph([node], "graph", [x], [y]), opset_imports=[helper.make_opsetid("", 21)])
    onnx.save(model, tmp_path / "model.onnx")
    for check in (True, False):
        with pytest.raises(mt.MeshTensorError, match=said):
            mt.from_onnx(tmp_path / "model.onnx", check=check)


def test_onnx_shapes(tmp_path):
    with pytest.raises(mt.MeshTensorError, match="`shapes` has 'z', which is no input"):
        mt.from_onnx(save_onnx(tmp_path / "model.onnx", "Relu"), shapes={"z": (2, 4)})


def test_without_the_package(tmp_path, monkeypatch):
    real = importlib.import_module

    def without(name, *args):
        if name == "onnx":
            raise ImportError("No module named 'onnx'")
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(mt.MeshTensorError, match="needs the package onnx") as error:
        mt.from_onnx(tmp_path / "model.onnx")
    assert "pip install onnx" in str(error.value)


def test_indices_that_are_a_mask():
    mask = torch.tensor([True, False, True, False])
    text = refused(Call(lambda x: torch.index_put(x, (mask,), x[:2], accumulate=True)), torch.randn(4, 4))
    assert "torch operator aten.index_put.default can't be imported: an index of bool" in text
    assert "use torch.where" in text


class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4).eval()

    def forward(self, x, y):
        return self.norm(x * torch.ones(4, 1)) + 2 * y


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["x", "weight", "running_mean"])
def test_one_tensor_as_the_example_of_several(name, strict):
    """torch's own program is wrong then; of views, which are other tensors, it is right."""
    model, x, y = Added(), torch.randn(4, 4), torch.randn(4, 4)
    same = x if name == "x" else getattr(model.norm, name)
    with pytest.raises(mt.MeshTensorError, match="were one tensor, of which the program looks at '[xy]' alone"):
        mt.from_torch(torch.export.export(model, (x, same), strict=strict))
    module = mt.from_torch(torch.export.export(model, (x, x[:]), strict=strict))
    torch.testing.assert_close(mt.distribute_module(module, {"d": 2}, {"x": {"d": 0}})(x, y), model(x, y))
