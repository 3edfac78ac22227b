"""Names of open sizes in ONNX models are opaque: whatever they are, they are no expressions."""

import pytest
import torch
from onnx import TensorProto, helper
from onnx import save as save_onnx

import mesh_tensor as mt


def saved(path, shape):
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "graph", infos[:1], infos[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    save_onnx(model, path)
    return path


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (["batch", "batch"], ["batch", "batch"]),
        (["n*2", "n"], ["n_2", "n"]),
        (["a b/c*", "n-1"], ["a_b_c_", "n_1"]),
        (["class", "1x"], ["p_class", "p_1x"]),
        (["a\0b", "é"], ["a_b", "_"]),
        (["x" * 5_000, 4], ["x" * 5_000, "4"]),
    ],
)
def test_names_of_open_sizes(tmp_path, shape, expected):
    module = mt.from_onnx(saved(tmp_path / "model.onnx", shape))
    (param,) = module.mod["main"].params
    found = [size.name if hasattr(size, "name") else str(size.value) for size in param.struct_info.shape]
    assert found == expected
    x = torch.randn(*(4 for _ in shape))
    torch.testing.assert_close(mt.run_sequential(module.mod, [x]), x.relu())


def test_sizes_that_are_given_replace_the_files(tmp_path):
    path = saved(tmp_path / "model.onnx", [-1, 2**40])
    module = mt.from_onnx(path, shapes={"x": (2, 3)})
    x = torch.randn(2, 3)
    torch.testing.assert_close(mt.run_sequential(module.mod, [x]), x.relu())
