"""What is handed in by mistake may have a repr of thousands of characters: messages cut it."""

import pytest
import tilelang.language as T
import torch
from tvm import tirx

import mesh_tensor as mt
from mesh_tensor.base.errors import did_you_mean, shown
from tests.refusals import refusal

LONG = torch.randn(100, 100)
MANY = {f"key{index}": list(range(50)) for index in range(50)}
MESH = {"x": 2}


@T.prim_func
def scale(A: T.Tensor((64, 32), "float32"), n: T.int32, B: T.Tensor((64, 32), "float32")):
    with T.Kernel(64) as bx:
        for j in T.Parallel(32):
            B[bx, j] = A[bx, j] * T.cast(n, "float32")


KERNEL = mt.compile(mt.annotate(scale, MESH, {"A": {"x": 0}, "B": {"x": 0}}), target="interpret")
FNS = mt.mesh_tensor_functions(MESH)
BUFFER = tirx.decl_buffer((64, 32), name="A")
INFO = mt.init_mesh_tensor_info({"x": 0})


@pytest.mark.parametrize("value", [LONG, MANY, "text " * 500, [scale] * 9], ids=["tensor", "dict", "text", "kernels"])
@pytest.mark.parametrize(
    "call",
    [
        lambda value: mt.Mesh(value),
        lambda value: mt.Mesh({"x": value}),
        lambda value: mt.annotate(value, MESH, {"A": {"x": 0}}),
        lambda value: mt.annotate(scale, value, {"A": {"x": 0}}),
        lambda value: mt.annotate(scale, MESH, value),
        lambda value: mt.annotate(scale, MESH, {"A": {"x": value}}),
        lambda value: mt.annotate(scale, MESH, {"A": {"partial": {"x": value}}}),
        lambda value: mt.annotate(scale, MESH, {"A": {"sharding": {}, "replicate": 1, "partial": value}}),
        lambda value: FNS["annotate_mesh_tensor_info"]({BUFFER: {**INFO, "program_id": value}}),
        lambda value: FNS["annotate_mesh_tensor_info"]({BUFFER: {**INFO, "block_shape": (value, 1)}}),
        lambda value: FNS["annotate_mesh_tensor_info"]({"A": value}),
        lambda value: FNS["get_tile_shape"](value),
        lambda value: KERNEL(LONG[:64, :32].contiguous(), value),
        lambda value: mt.compile(scale, out_idx=[value]),
        lambda value: mt.distribute(LONG, MESH, {"x": value}),
        lambda value: mt.plan_redistribution((4, 4), torch.float32, value, {}),
    ],
)
def test_no_line_is_long(call, value):
    message = refusal(call, value)
    assert max(map(len, message.splitlines())) < 520


def test_a_value_in_one_line():
    assert shown([1, 2]) == "[1, 2]"
    assert "\n" not in shown(LONG)
    assert len(shown(MANY)) == 120
    assert shown(MANY).endswith(" ...")


def test_the_nearest_name():
    assert did_you_mean("Wieght", ["bias", "weight"]) == "; did you mean 'weight'?"
    assert did_you_mean("zzz", ["bias", "weight"]) == ""
    assert did_you_mean(3, ["bias"]) == ""
