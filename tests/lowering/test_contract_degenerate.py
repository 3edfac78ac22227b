"""Clause 10: axes and meshes of one device, tensors without elements, more devices than blocks or elements."""

import pytest
import torch
from tvm import ir

import mesh_tensor as mt
from kernels.softmax import softmax, softmax_reference

from .kernels import matmul, row_sums, scale
from .support import assert_right, local_kernels, lowered, only_kernel, outline, run

ONES = [{"x": 1}, {"x": 1, "y": 1}]


@pytest.mark.parametrize("mesh", ONES, ids=str)
def test_on_one_device_the_kernel_stays_as_it_is(mesh):
    layouts = {"A": {"x": 1}, "B": {"x": 0}, "C": {"x": 0}}
    result = lowered(matmul(32, 48, 64), mesh, layouts)
    ir.assert_structural_equal(local_kernels(result)[0], matmul(32, 48, 64))
    assert len(local_kernels(result)) == 1


@pytest.mark.parametrize("mesh", ONES, ids=str)
def test_on_one_device_nothing_is_cut(mesh):
    result = lowered(softmax(16, 48, 8), mesh, {"X": {"x": 1}, "Y": {"x": 1}})
    assert outline(result) == ["kernel(X, Y)"]


def test_an_axis_of_one_device_changes_nothing():
    layouts = {"A": {"x": 0, "y": 1}, "C": {"x": 0}, "B": {"y": 0}}
    kernel = local_kernels(lowered(matmul(32, 48, 64), {"x": 2, "y": 1}, layouts))[0]
    ir.assert_structural_equal(kernel, matmul(16, 48, 64))


def test_more_devices_than_elements():
    kernel = only_kernel(lowered(scale(3, 8), {"x": 8}, {"A": {"x": 0}, "B": {"x": 0}}))
    assert {tuple(map(int, b.shape)) for b in kernel.buffer_map.values()} == {(1, 8)}


@pytest.mark.parametrize("mesh", [*ONES, {"x": 8}, {"x": 5, "y": 2}], ids=str)
@pytest.mark.parametrize("dims", [(0, None, 0), (1, 0, None), (1, 0, 0), (0, 1, 1)], ids=str)
@pytest.mark.parametrize("sizes", [(3, 4, 2), (1, 1, 1)], ids=str)
def test_matmul_numbers(mesh, dims, sizes):
    M, N, K = sizes
    layouts = {name: dict.fromkeys(mesh, dim) for name, dim in zip("ABC", dims, strict=True)}
    inputs = [torch.randn(M, K), torch.randn(K, N)]
    assert_right(matmul(M, N, K), mesh, layouts, inputs, lambda a, b: a.double() @ b.double())


@pytest.mark.parametrize("mesh", [*ONES, {"x": 16}, {"x": 4, "y": 4}], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_softmax_numbers(mesh, dim):
    layout = dict.fromkeys(mesh, dim)
    assert_right(softmax(5, 7, 8), mesh, {"X": layout, "Y": layout}, [torch.randn(5, 7)], softmax_reference)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("mesh", [{"x": 1}, {"x": 2}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_tensors_without_elements(shape, mesh, dim):
    layout = dict.fromkeys(mesh, dim)
    result = run(scale(*shape), mesh, {"A": layout, "B": layout}, torch.zeros(shape))
    assert result.shape == shape


@pytest.mark.parametrize("mesh", [{"x": 1}, {"x": 2}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_no_rows_to_sum(mesh, dim):
    assert_right(row_sums(0, 8), mesh, {"A": dict.fromkeys(mesh, dim)}, [torch.zeros(0, 8)], lambda a: a.sum(1))


def test_a_mesh_of_thousands_of_devices_is_no_more_work():
    layouts = {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}}
    small = lowered(matmul(4096, 64, 4096), {"x": 2, "y": 2}, layouts)
    large = lowered(matmul(4096, 64, 4096), {"x": 64, "y": 64}, layouts)
    assert outline(small) == outline(large)
    for kernel, factor in ((small, 2), (large, 64)):
        ir.assert_structural_equal(local_kernels(kernel)[0], matmul(4096 // factor, 64, 4096 // factor))
    assert mt.Mesh({"x": 64, "y": 64}).num_devices == 4096
