"""What nothing in a kernel uses stays where it is."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.schedules import matmul_with_workspace
from tests.other_machines import machine

from .every_layout import check
from .support import lowered, outline, run

A, B, W = torch.randn(13, 24), torch.randn(24, 30), torch.randn(13, 30)
FUNC = matmul_with_workspace(13, 30, 24, 8, 8, 8)


@pytest.mark.parametrize("layout", [{"x": 0}, {"x": 1}, {}])
@pytest.mark.parametrize("rows", [{"A": {"x": 0}, "C": {"x": 0}}, {"B": {"x": 1}, "C": {"x": 1}}])
def test_an_unused_tensor_is_not_moved(layout, rows):
    layouts = {**rows, "workspace": layout}
    assert outline(lowered(FUNC, {"x": 4}, layouts, strict=True)) == ["kernel(A, B, workspace, C)"]
    torch.testing.assert_close(run(FUNC, {"x": 4}, layouts, A, B, W), A @ B)


def test_in_every_layout():
    with machine(1):
        check(FUNC, [A, B, W], A @ B)


def test_a_size_that_only_an_unused_tensor_has():
    rows = T.dynamic("rows")

    @T.prim_func
    def doubled(X: T.Tensor((32,), "float32"), unused: T.Tensor((rows,), "float32"), Y: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            for i in T.Parallel(8):
                Y[bx * 8 + i] = X[bx * 8 + i] * T.cast(rows, "float32")

    for layout in ({"x": 0}, {}):
        func = mt.annotate(doubled, {"x": 3}, {"X": {"x": 0}, "unused": layout, "Y": {"x": 0}})
        kernel = mt.compile(func, target="interpret", poison=True)
        x = torch.randn(32)
        torch.testing.assert_close(kernel(x, torch.randn(7)), 7 * x)
