"""ONNX models compute what onnx's reference evaluator computes, or are refused."""

import io

import numpy as np
import onnx
import onnx.reference
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import mesh_tensor as mt
from mesh_tensor.importers.onnx_rewrites import REWRITES

TYPES = {
    np.dtype("float32"): TensorProto.FLOAT,
    np.dtype("int64"): TensorProto.INT64,
    np.dtype("bool"): TensorProto.BOOL,
}


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype("float32")


def save(path, op, inputs, weights, opset=17, outputs=1, sizes=None, **attributes):
    """A file of one operator; what onnx's reference gives."""
    node = helper.make_node(op, [*inputs, *weights], [f"y{i}" for i in range(outputs)], **attributes)
    shapes = sizes or {name: value.shape for name, value in inputs.items()}
    into = [helper.make_tensor_value_info(name, TYPES[inputs[name].dtype], shapes[name]) for name in inputs]
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output]
    graph = helper.make_graph([node], "graph", into, outputs, constants)
    options = {"opset_imports": [helper.make_opsetid("", opset)], "ir_version": 8}
    results = onnx.reference.ReferenceEvaluator(helper.make_model(graph, **options)).run(None, inputs)
    del graph.output[:]
    for name, result in zip(node.output, results, strict=True):
        shape = [None] * result.ndim if sizes else result.shape
        graph.output.append(helper.make_tensor_value_info(name, TYPES[result.dtype], shape))
    onnx.save(helper.make_model(graph, **options), path)
    return [torch.from_numpy(np.array(result)) for result in results]


X = random(3, 5, 8)
EMPTY = np.zeros(0, "float32")


@pytest.mark.parametrize(
    ("op", "weights", "options"),
    [
        ("Split", {"sizes": np.array([3, 4, 1])}, {"axis": 2, "outputs": 3}),
        ("TopK", {"k": np.array([3])}, {"axis": 2, "outputs": 2}),
        ("Expand", {"shape": np.array([2, 1, 1, 1])}, {}),
        ("LayerNormalization", {"scale": random(8)}, {}),
        ("LayerNormalization", {"scale": random(5, 8)}, {"axis": 1, "epsilon": 0.1}),
        ("ReduceMean", {"axes": np.array([-1, 0])}, {"keepdims": 0, "opset": 18}),
    ],
)
def test_what_says_how_operators_work_is_constant(tmp_path, op, weights, options):
    expected = save(tmp_path / "model.onnx", op, {"x": X}, weights, **options)
    module = mt.from_onnx(tmp_path / "model.onnx")
    assert list(module.params) == [name for name, value in weights.items() if value.dtype == np.float32]
    run = mt.distribute_module(module.mod, {"a": 2}, {"x": {"a": 1}}, weights=module.params)
    results = run(torch.from_numpy(X))
    for result, meant in zip(results if isinstance(results, tuple) else [results], expected, strict=True):
        torch.testing.assert_close(result, meant, rtol=1e-4, atol=1e-5)


def test_batch_norm_before_opset_14_is_for_inference(tmp_path):
    x, weights = random(2, 3, 4, 4), {name: random(3) for name in ("scale", "bias", "mean")}
    save(tmp_path / "model.onnx", "BatchNormalization", {"x": x}, weights | {"var": random(3) ** 2}, opset=9)
    module = mt.from_onnx(tmp_path / "model.onnx")
    result = mt.run_sequential(module.mod, {"x": torch.from_numpy(x), **module.params})
    scale, bias, mean, var = (module.params[name] for name in ("scale", "bias", "mean", "var"))
    expected = torch.nn.functional.batch_norm(torch.from_numpy(x), mean, var, scale, bias)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_what_tvm_reads_differently(tmp_path, monkeypatch):
    save(tmp_path / "model.onnx", "LpPool", {"x": X}, {}, kernel_shape=[3], p=3, opset=18)
    monkeypatch.delitem(REWRITES, "LpPool")
    with pytest.raises(mt.MeshTensorError, match="result 0 differs from onnx's reference's by") as error:
        mt.from_onnx(tmp_path / "model.onnx")
    assert "model.onnx, on random inputs" in str(error.value)
    assert "`check=False` leaves this check out" in str(error.value)
    assert mt.from_onnx(tmp_path / "model.onnx", check=False).mod["main"].params


def test_files_bytes_and_models(tmp_path):
    path = tmp_path / "model.onnx"
    (expected,) = save(path, "Add", {"x": X}, {"w": random(8)})
    model = onnx.load(path)
    kept = model.SerializeToString()
    with path.open("rb") as file:
        for given in (path, str(path), file, io.BytesIO(kept), kept, bytearray(kept), memoryview(kept), model):
            run = mt.distribute_module(mt.from_onnx(given), {"a": 2}, {"x": {"a": 0}, "w": {"a": 0}})
            torch.testing.assert_close(run(torch.from_numpy(X)), expected)
    assert model.SerializeToString() == kept


@pytest.mark.parametrize(("op", "options"), [("Softmax", {"axis": 1}), ("LogSoftmax", {}), ("Hardmax", {"axis": 0})])
def test_softmax_before_opset_13_is_over_all_dims_behind(tmp_path, op, options):
    """onnx's reference takes it for the newer one, over one dim."""
    save(tmp_path / "model.onnx", op, {"x": X}, {}, opset=11, **options)
    x = torch.from_numpy(X)
    rows = x.flatten(options.get("axis", 1)) if options.get("axis", 1) else x.reshape(1, -1)
    of = {"Softmax": rows.softmax(1), "LogSoftmax": rows.log_softmax(1)}
    expected = of[op] if op in of else torch.nn.functional.one_hot(rows.argmax(1), rows.shape[1]).float()
    for dim in range(x.dim()):
        run = mt.distribute_module(mt.from_onnx(tmp_path / "model.onnx"), {"a": 2}, {"x": {"a": dim}}, poison=True)
        torch.testing.assert_close(run(x), expected.reshape(x.shape))


def test_one_hot_of_indices_that_count_from_the_end(tmp_path):
    at = {"at": np.array([-1, 0, 2, -3])}
    weights = {"depth": np.array(4), "values": np.array([0.5, 2.0], "float32")}
    (expected,) = save(tmp_path / "model.onnx", "OneHot", at, weights)
    module = mt.from_onnx(tmp_path / "model.onnx")
    run = mt.distribute_module(module.mod, {"a": 2}, {"at": {"a": 0}}, weights=module.params)
    result = run(torch.from_numpy(at["at"]))
    assert torch.equal(result, expected)
    assert torch.equal(result.argmax(1), torch.tensor([3, 0, 2, 1]))


def test_open_sizes_are_tried(tmp_path):
    inputs, sizes = {"x": random(4, 6), "y": random(4, 6)}, {"x": ("n", 6), "y": ("m", 6)}
    save(tmp_path / "model.onnx", "Add", inputs, {}, sizes=sizes)
    assert mt.from_onnx(tmp_path / "model.onnx").mod["main"].params
    inputs, sizes = {"x": random(35, 6)}, {"x": ("n", 6)}
    save(tmp_path / "model.onnx", "Reshape", inputs, {"shape": np.array([5, 7, 6])}, sizes=sizes)
    with pytest.raises(mt.MeshTensorError, match="onnx's reference evaluator, .* can't run the model") as error:
        mt.from_onnx(tmp_path / "model.onnx")
    assert "settle open sizes by `shapes`" in str(error.value)
    assert mt.from_onnx(tmp_path / "model.onnx", shapes={"x": (35, 6)}).mod["main"].params


def test_path_that_is_none():
    with pytest.raises(mt.MeshTensorError, match="a int is no ONNX model"):
        mt.from_onnx(3)


@pytest.mark.parametrize(
    ("op", "inputs", "weights", "options"),
    [
        ("Celu", {"x": X}, {}, {"alpha": 2.0}),
        ("Dropout", {"x": X}, {}, {}),
        (
            "Resize",
            {"x": random(2, 3, 4, 6)},
            {"r": EMPTY, "s": np.float32([1, 1, 2, 2])},
            {"mode": "linear", "opset": 18},
        ),
        ("Resize", {"x": random(2, 3, 4, 6)}, {"r": EMPTY, "s": np.float32([1, 1, 2, 0.5])}, {"opset": 18}),
    ],
)
def test_operators_that_are_written_by_others(tmp_path, op, inputs, weights, options):
    """Functions of onnx, and what the importer of TVM lacks."""
    expected = save(tmp_path / "model.onnx", op, inputs, weights, **options)
    module = mt.from_onnx(tmp_path / "model.onnx")
    run = mt.distribute_module(module, {"a": 2}, {"x": {"a": 1}})
    torch.testing.assert_close(run(torch.from_numpy(inputs["x"])), expected[0])


def test_rms_norm(tmp_path):
    """Newer than the reference that `save` asks for."""
    scale = random(8)
    node = helper.make_node("RMSNormalization", ["x", "scale"], ["y"], epsilon=0.1)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, X.shape) for name in ("x", "y")]
    graph = helper.make_graph([node], "graph", ends[:1], ends[1:], [numpy_helper.from_array(scale, "scale")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    run = mt.distribute_module(mt.from_onnx(tmp_path / "model.onnx"), {"a": 2}, {"x": {"a": 1}})
    x = torch.from_numpy(X)
    torch.testing.assert_close(run(x), torch.nn.functional.rms_norm(x, (8,), torch.from_numpy(scale), 0.1))
