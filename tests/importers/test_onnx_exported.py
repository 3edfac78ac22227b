"""What torch's exporters write: sizes that are computed node by node, and constants, where TVM's importer is wrong."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import mesh_tensor as mt
from mesh_tensor.importers.onnx_reference import reference_results

RANDOM = np.random.default_rng(5)
KINDS = {np.dtype(name): kind for name, kind in (("float32", TensorProto.FLOAT), ("int64", TensorProto.INT64))}


def saved(tmp_path, nodes, shapes, weights, *, results=("y",), kinds=None, opset=18):
    """The path of a model of `nodes`, (op, inputs, output, options), with inputs of these shapes."""
    made = [helper.make_node(op, inputs, [output], **options) for op, inputs, output, options in nodes]
    inputs = [
        helper.make_tensor_value_info(name, (kinds or {}).get(name, TensorProto.FLOAT), shape)
        for name, shape in shapes.items()
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in results]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph(made, "graph", inputs, outputs, tensors)
    inferred = onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    )
    known = {value.name: value for value in (*inferred.graph.value_info, *inferred.graph.output)}
    del graph.output[:]
    graph.output.extend(known[name] for name in results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 9
    onnx.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


# (batch, time, 8) -> heads: sizes one by one, a product and a quotient of them, and 0 for no elements.
HEADS = [
    ("Shape", ["x"], "batch", {"start": 0, "end": 1}),
    ("Shape", ["x"], "last", {"start": -1}),
    ("Shape", ["x"], "sizes", {}),
    ("Gather", ["sizes", "both"], "rows", {}),
    ("Gather", ["sizes", "one"], "time", {}),
    ("Mul", ["time", "two"], "twice", {}),
    ("Reshape", ["twice", "vector"], "halves", {}),
    ("Div", ["last", "twos"], "half", {}),
    ("Concat", ["batch", "halves", "half"], "split", {"axis": 0}),
    ("Concat", ["rows", "last"], "whole", {"axis": 0}),
    ("Reshape", ["x", "split"], "parts", {"allowzero": 1}),
    ("Relu", ["parts"], "positive", {}),
    ("Reshape", ["positive", "whole"], "y", {"allowzero": 1}),
]
NUMBERS = {"both": [0, 1], "one": 1, "two": 2, "vector": [-1], "twos": [2]}


def test_open_sizes_are_computed(tmp_path):
    numbers = {name: np.asarray(value, np.int64) for name, value in NUMBERS.items()}
    path = saved(tmp_path, HEADS, {"x": ["n", "t", 8]}, numbers)
    run = mt.distribute_module(mt.from_onnx(path).mod, {"a": 2}, {"x": {"a": 0}}, poison=True)
    for batch, time in ((4, 3), (2, 5), (1, 1)):
        x = torch.randn(batch, time, 8)
        torch.testing.assert_close(run(x), x.relu())


def test_whether_open_sizes_are_equal_is_refused(tmp_path):
    nodes = [
        ("Shape", ["x"], "sizes", {}),
        ("Equal", ["sizes", "four"], "same", {}),
        ("Where", ["same", "other", "sizes"], "new", {}),
        ("Expand", ["one", "new"], "ones", {}),
        ("Add", ["x", "ones"], "y", {}),
    ]
    weights = {"four": np.array([4, 8]), "other": np.array([1, 1]), "one": np.float32(1)}
    path = saved(tmp_path, nodes, {"x": ["n", 8]}, weights)
    message = r"whether the size n is 4 tells what is computed[\s\S]*settle sizes by `shapes`"
    with pytest.raises(mt.MeshTensorError, match=message):
        mt.from_onnx(path)
    module = mt.from_onnx(path, shapes={"x": (4, 8)})
    run = mt.distribute_module(module.mod, {"a": 2}, {"x": {"a": 0}}, weights=module.params)
    x = torch.randn(4, 8)
    torch.testing.assert_close(run(x), x + 1)


A, B = RANDOM.integers(-9, 9, (2, 10, 12))  # of more elements than sizes have


@pytest.mark.parametrize(
    ("nodes", "meant"),
    [
        ([("Min", ["a", "b"], "c", {})], np.minimum(A, B)),
        ([("Max", ["a", "b", "zero"], "c", {})], np.maximum(np.maximum(A, B), 0)),
        ([("Less", ["a", "b"], "d", {}), ("Where", ["d", "a", "b"], "c", {})], np.minimum(A, B)),
    ],
)
def test_constants(tmp_path, nodes, meant):
    """Weights that are whole numbers are constants where other constants make them."""
    constants = [
        ("Constant", [], name, {"value": numpy_helper.from_array(value)})
        for name, value in (("a", A), ("b", B), ("zero", np.array(0)))
    ]
    path = saved(tmp_path, [*constants, *nodes, ("Add", ["x", "c"], "y", {})], {"x": A.shape}, {}, kinds={"x": 7})
    run = mt.distribute_module(mt.from_onnx(path).mod, {"a": 2}, {"x": {"a": 1}})
    x = torch.randint(-5, 5, A.shape)
    torch.testing.assert_close(run(x), x + torch.from_numpy(meant))


@pytest.mark.parametrize("op", ["Sum", "Mean"])
def test_sums_of_several(tmp_path, op):
    a, b = RANDOM.standard_normal((2, 3, 8)).astype("float32")
    path = saved(tmp_path, [(op, ["x", "a", "b"], "y", {})], {"x": (3, 8)}, {"a": a, "b": b})
    module = mt.from_onnx(path)
    run = mt.distribute_module(module.mod, {"a": 2}, {"x": {"a": 1}}, weights=module.params)
    x = torch.randn(3, 8)
    total = x + torch.from_numpy(a) + torch.from_numpy(b)
    torch.testing.assert_close(run(x), total / (3 if op == "Mean" else 1))


def test_a_slope_without_dims(tmp_path):
    path = saved(tmp_path, [("PRelu", ["x", "slope"], "y", {})], {"x": (3, 8)}, {"slope": np.float32(0.3)})
    module = mt.from_onnx(path)
    run = mt.distribute_module(module.mod, {"a": 2}, {"x": {"a": 0}}, weights=module.params)
    x = torch.randn(3, 8)
    torch.testing.assert_close(run(x), torch.nn.functional.prelu(x, torch.tensor(0.3)))


def test_elements_that_the_reference_cant_gather(tmp_path):
    """Of more than 32 along the last dim, where fewer rows are looked at than there are."""
    path = saved(
        tmp_path, [("GatherElements", ["x", "at"], "y", {"axis": 1})], {"x": (3, 40), "at": (2, 5)}, {}, kinds={"at": 7}
    )
    x, at = torch.randn(3, 40), torch.randint(-40, 40, (2, 5))
    (found,) = reference_results(onnx.load(path), {"x": x.numpy(), "at": at.numpy()})
    torch.testing.assert_close(found, x.gather(1, at % 40))
    run = mt.distribute_module(mt.from_onnx(path).mod, {"a": 2}, {"at": {"a": 1}})
    torch.testing.assert_close(run(x, at % 40), x.gather(1, at % 40))


def test_a_recurrent_layer_with_relu(tmp_path):
    torch.manual_seed(0)
    layer = torch.nn.RNN(4, 6, nonlinearity="relu", bias=False)
    weights = {"w": layer.weight_ih_l0, "r": layer.weight_hh_l0}
    weights = {name: value.detach().numpy()[None] for name, value in weights.items()}
    nodes = [("RNN", ["x", "w", "r"], "y", {"activations": ["Relu"], "hidden_size": 6})]
    path = saved(tmp_path, nodes, {"x": (5, 2, 4)}, weights)
    module = mt.from_onnx(path)
    run = mt.distribute_module(module.mod, {"a": 2}, {"x": {"a": 1}}, weights=module.params)
    x = torch.randn(5, 2, 4)
    torch.testing.assert_close(run(x), layer(x)[0].detach()[:, None])
