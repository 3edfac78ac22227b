"""ONNX models with sizes that no tensor has are refused before memory is asked for; so is what lies elsewhere."""

import os
import resource

import numpy as np
import pytest
from onnx import TensorProto, helper

import mesh_tensor as mt

from .test_onnx_sizes import saved


def info(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def whole(name, values):
    return helper.make_tensor(
        name, TensorProto.INT64, [len(values)] if isinstance(values, list) else [], np.ravel(values)
    )


def refusal(path, **options):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(mt.MeshTensorError) as error:
        mt.from_onnx(path, **options)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB: nothing huge was made
    assert path.name in str(error.value)
    return str(error.value)


def save(path, nodes, inputs, rank, initializers=()):
    outputs = [info("y", [f"d{dim}" for dim in range(rank)])]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("size", [-1, -(2**40)])
def test_inputs_with_negative_sizes(tmp_path, size):
    message = refusal(saved(tmp_path / "model.onnx", [4, size]))
    assert f"input 'x' has size {size} in dim 1" in message
    assert "give the inputs' sizes by `shapes`" in message


@pytest.mark.parametrize("shape", [[2**62, 4], [2**40, 2**40], [2**38], [2**63 - 1]], ids=str)
def test_inputs_with_huge_sizes(tmp_path, shape):
    message = refusal(saved(tmp_path / "model.onnx", shape))
    assert f"takes {4 * int(np.prod(np.array(shape, dtype=object))):,} bytes" in message
    assert f"its sizes are {shape}" in message
    assert "this machine's memory" in message


OPERATORS = {
    "ConstantOfShape": (["s"], [], {"s": [2**40]}),
    "Expand": (["x", "s"], [info("x", [1])], {"s": [2**40]}),
    "Tile": (["x", "s"], [info("x", [1])], {"s": [2**40]}),
    "Pad": (["x", "s"], [info("x", [1])], {"s": [2**40, 0]}),
    "Range": (["a", "s", "b"], [], {"a": 0, "s": 2**40, "b": 1}),
    "Reshape": (["x", "s"], [info("x", [1])], {"s": [2**40]}),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_huge_values_inside(tmp_path, operator):
    names, inputs, constants = OPERATORS[operator]
    initializers = [whole(name, value) for name, value in constants.items()]
    path = save(tmp_path / "model.onnx", [helper.make_node(operator, names, ["y"])], inputs, 1, initializers)
    for check in (True, False):
        assert "value 'y' takes" in refusal(path, check=check)


@pytest.mark.parametrize("operator", ["ConstantOfShape", "Expand", "Tile", "Reshape"])
def test_negative_sizes_inside(tmp_path, operator):
    names, inputs, constants = OPERATORS[operator]
    initializers = [whole(name, [-3]) for name in constants]
    refusal(save(tmp_path / "model.onnx", [helper.make_node(operator, names, ["y"])], inputs, 1, initializers))


@pytest.mark.parametrize("shape", [(2, -1), (2.5, 1), ("a", 1), 3, (2, None)], ids=str)
def test_shapes_that_are_none(tmp_path, shape):
    path = saved(tmp_path / "model.onnx", ["n", 4])
    message = refusal(path, shapes={"x": shape})
    assert f"`shapes` has {shape} for input 'x', which are no sizes" in message
    assert "takes" in refusal(path, shapes={"x": (2**40, 4)})


def external(tmp_path, **entries):
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)
    folder = tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    (folder / "weights.bin").write_bytes(np.array([1, 2], "float32").tobytes())
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    return save(folder / "model.onnx", nodes, [info("x", [2])], 1, [tensor])


def test_tensors_in_files_of_their_own_stay_in_the_folder(tmp_path):
    (tmp_path / "secret.bin").write_bytes(np.array([5, 6], "float32").tobytes())
    assert mt.from_onnx(external(tmp_path, location="weights.bin")).params["w"].tolist() == [1, 2]
    os.symlink(tmp_path / "secret.bin", tmp_path / "folder" / "link.bin")
    for location in ("../secret.bin", str(tmp_path / "secret.bin"), "link.bin", "none.bin", ".", "/dev/zero", ""):
        assert "is no valid ONNX model" in refusal(external(tmp_path, location=location))
    for offset, length in ((2**40, 8), (-4, 8), (4, 8), (0, 2**50)):
        refusal(external(tmp_path, location="weights.bin", offset=offset, length=length))


def test_graphs_that_go_round(tmp_path):
    steps = [("a", "b"), ("b", "a"), ("a", "y")]
    nodes = [helper.make_node("Relu", [source], [result]) for source, result in steps]
    assert "is no valid ONNX model" in refusal(save(tmp_path / "model.onnx", nodes, [info("x", [2])], 1))


def test_long_and_deep_models(tmp_path):
    nodes = [helper.make_node("Relu", [f"v{i}" if i else "x"], [f"v{i + 1}" if i < 999 else "y"]) for i in range(1000)]
    assert mt.from_onnx(save(tmp_path / "model.onnx", nodes, [info("x", [2])], 1)).mod["main"].params
    model = b""
    for _ in range(300):
        model = field(1, field(5, field(6, model)))  # a graph's node's attribute is a graph
    (tmp_path / "deep.onnx").write_bytes(field(7, model))
    assert "is no valid ONNX model" in refusal(tmp_path / "deep.onnx")


def field(number, data):
    """A field of a protobuf message that holds `data`."""
    size, length = len(data), b""
    while size > 127:
        length += bytes([size % 128 + 128])
        size //= 128
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


def test_nodes_without_what_they_need(tmp_path):
    for operator in ("TopK", "OneHot", "LayerNormalization"):
        node = helper.make_node(operator, [], [], domain="elsewhere")
        path = save(tmp_path / "model.onnx", [node], [info("x", [2])], 0)
        refusal(path)
