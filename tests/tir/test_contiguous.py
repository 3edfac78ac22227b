import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from mesh_tensor.tir.plain_statements import with_contiguous_rows

ROWS, COLUMNS = 13, 10


def doubled(strides, offset=0):
    @T.prim_func
    def kernel(x: T.handle, Y: T.Tensor((ROWS, COLUMNS), "float32")):
        X = T.match_buffer(x, (ROWS, COLUMNS), "float32", strides=strides, elem_offset=offset)
        with T.Kernel(ROWS, threads=32) as bx:
            for j in T.Parallel(COLUMNS):
                Y[bx, j] = X[bx, j] * 2

    return kernel


@pytest.mark.parametrize("target", ["c", "interpret"])
@pytest.mark.parametrize("shardings", [{"X": {"x": 0}}, {"X": {}, "Y": {"x": 1}}])
@pytest.mark.parametrize(("strides", "offset"), [((1, ROWS), 0), ((16, 1), 0), ((COLUMNS, 1), 4)])
def test_rows_of_parameters_are_contiguous(strides, offset, shardings, target):
    x, y = torch.randn(ROWS, COLUMNS), torch.empty(ROWS, COLUMNS)
    compiled = mt.compile(mt.annotate(doubled(strides, offset), {"x": 2}, shardings), target=target)
    torch.testing.assert_close(compiled(x, y), x * 2)


def test_variables_that_are_strides_are_those_of_contiguous_rows():
    rows, columns, stride = T.dynamic("rows"), T.dynamic("columns"), T.dynamic("stride")

    @T.prim_func
    def kernel(X: T.StridedTensor((rows, columns), (stride, 1), "float32"), Y: T.Tensor((rows, columns), "float32")):
        with T.Kernel(rows, threads=32) as bx:
            for j in T.Parallel(columns):
                Y[bx, j] = X[bx, j] * stride

    x, y = torch.randn(ROWS, COLUMNS), torch.empty(ROWS, COLUMNS)
    torch.testing.assert_close(mt.compile(mt.annotate(kernel, {"x": 3}, {"X": {"x": 1}}))(x, y), x * COLUMNS)


def test_kernels_with_contiguous_rows_stay_as_they_are():
    kernel = doubled((COLUMNS, 1))
    assert with_contiguous_rows(kernel).same_as(kernel)


def test_one_variable_for_different_strides():
    stride = T.dynamic("stride")

    @T.prim_func
    def kernel(X: T.StridedTensor((4, 8), (stride, 1), "float32"), Y: T.StridedTensor((4, 6), (stride, 1), "float32")):
        with T.Kernel(4, threads=32) as bx:
            for j in T.Parallel(6):
                Y[bx, j] = X[bx, j]

    with pytest.raises(mt.MeshTensorError) as caught:
        mt.compile(mt.annotate(kernel, {"x": 2}, {"X": {"x": 0}}))
    for fact in ("the stride stride would be both 8 and 6", "kernel 'kernel'", "a stride of its own"):
        assert fact in str(caught.value)
