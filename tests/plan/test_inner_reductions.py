"""Kernels that reduce in the middle: what that costs counts, and modules decide it once."""

import pytest
import torch

import mesh_tensor as mt
from kernels.matmul_bias_gelu import matmul_bias_gelu, matmul_bias_gelu_reference
from kernels.softmax import softmax
from tests.lowering.support import lowered, outline

from .modules import kinds, planned
from .step_modules import call, module, operands


def softmax_module(rows, columns):
    return module({"x": (rows, columns)}, [("y", call(softmax(rows, columns), "x", shape=(rows, columns)))])


def gelu(m, n, k):
    return matmul_bias_gelu(m, n, k, dtype="float32", out_dtype="float32")


def gelu_module(m, n, k):
    shapes = {"a": (m, k), "b": (k, n), "bias": (n,)}
    return module(shapes, [("c", call(gelu(m, n, k), "a", "b", "bias", shape=(m, n)))])


COLUMNS = {"X": {"x": 1}, "Y": {"x": 1}}
SHORT, LONG = (4096, 4), (512, 8192)


@pytest.mark.parametrize(("shape", "expected"), [(SHORT, ["all_gather", "slice"]), (LONG, ["all_reduce"] * 2)])
def test_a_kernel_and_a_module_of_one_kernel_decide_alike(shape, expected):
    result = lowered(softmax(*shape), {"x": 2}, COLUMNS)
    assert [step.split("(")[0] for step in outline(result) if not step.startswith("kernel")] == expected
    assert kinds(planned(softmax_module(*shape), {"x": 2}, {"x": {"x": 1}, "y": {"x": 1}})) == expected


@pytest.mark.parametrize("shape", [SHORT, (37, 5), (64, 4096)], ids=str)
def test_either_way_the_result_is_the_same(shape):
    mod = softmax_module(*shape)
    (data,) = operands(mod)
    made = mt.distribute_module(mod, {"x": 2}, {"x": {"x": 1}, "y": {"x": 1}})
    torch.testing.assert_close(made(data), torch.softmax(data, 1), rtol=1e-5, atol=1e-6)


def test_an_axis_whose_factor_ends_inside_is_scattered_over_what_the_output_asks():
    """k is summed up over y before gelu, and C is split over y: one reduce-scatter does both."""
    shardings = {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0, "y": 1}}
    alone = lowered(gelu(64, 64, 64), {"x": 2, "y": 2}, shardings)
    assert [step.split("(")[0] for step in outline(alone)] == ["kernel", "reduce_scatter", "kernel"]
    mod = gelu_module(64, 64, 64)
    layouts = {"a": {"x": 0, "y": 1}, "b": {"y": 0}, "bias": {}, "c": {"x": 0, "y": 1}}
    made = mt.distribute_module(mod, {"x": 2, "y": 2}, layouts)
    assert kinds(planned(mod, {"x": 2, "y": 2}, layouts)) == ["reduce_scatter"]
    data = operands(mod)
    torch.testing.assert_close(made(*data), matmul_bias_gelu_reference(*data, torch.float32), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [(64, 64, 64), (37, 45, 29)], ids=str)
@pytest.mark.parametrize("layout", [{"x": 0}, {"x": 1}, {"y": 0}, {"x": 0, "y": 1}, {}], ids=str)
def test_sums_in_the_middle_of_modules(sizes, layout):
    mod = gelu_module(*sizes)
    data = operands(mod)
    made = mt.distribute_module(mod, {"x": 2, "y": 2}, {"a": {"x": 1, "y": 1}, "b": {"x": 0, "y": 0}, "c": layout})
    torch.testing.assert_close(made(*data), matmul_bias_gelu_reference(*data, torch.float32), rtol=1e-4, atol=1e-4)
