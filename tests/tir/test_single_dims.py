"""Indices of dims of one element, and kernels whose only block of heads shares one of them."""

import pytest
import tilelang.language as T
import torch
from tvm import ir

import mesh_tensor as mt
from mesh_tensor.rules.kernel.normalize import with_plain_single_dims
from tests.lowering.support import assert_right, lowered, outline


def scaled(heads=8, block=8, shared=None, rows=3, dim=4):
    """Y[r, h] = X[r, h] * S[r, h // heads]: all heads share one scale."""

    @T.prim_func
    def kernel(
        X: T.Tensor((rows, heads, dim), "float32"),
        S: T.Tensor((rows, 1, dim), "float32"),
        Y: T.Tensor((rows, heads, dim), "float32"),
    ):
        with T.Kernel(rows, T.ceildiv(heads, block), threads=32) as (bx, by):
            x = T.alloc_shared((block, dim), "float32")
            T.copy(X[bx, by * block : (by + 1) * block, :], x)
            for i, j in T.Parallel(block, dim):
                x[i, j] = x[i, j] * S[bx, by // (heads // block) if shared is None else shared(by), j]
            T.copy(x, Y[bx, by * block : (by + 1) * block, :])

    return kernel


@pytest.mark.parametrize(("heads", "block"), [(8, 8), (16, 4)])
def test_what_loops_prove_to_be_0_is_0(heads, block):
    made = with_plain_single_dims(scaled(heads, block))
    expected = scaled(heads, block, shared=lambda by: 0)
    ir.assert_structural_equal(made, expected)


def test_what_may_lie_past_the_dim_stays_as_it_is():
    kernel = scaled(16, 4, shared=lambda by: by)
    assert with_plain_single_dims(kernel).same_as(kernel)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(("heads", "block"), [(8, 8), (16, 16), (16, 4)])
def test_heads_are_split_though_there_is_one_block_of_them(devices, heads, block):
    dims = {"X": {"x": 1}, "S": {}, "Y": {"x": 1}}
    assert outline(lowered(scaled(heads, block), {"x": devices}, dims, strict=True)) == ["kernel(X, S, Y)"]
    inputs = [torch.randn(3, heads, 4), torch.randn(3, 1, 4)]
    assert_right(scaled(heads, block), {"x": devices}, dims, inputs, lambda x, s: x * s)


def limited(rows, style="limited"):
    """Rows that are read up to a last one, from a first one, or in other limits: those that no row reaches are none."""

    @T.prim_func
    def kernel(X: T.Tensor((rows, 4), "float32"), Y: T.Tensor((rows, 4), "float32")):
        with T.Kernel(T.ceildiv(rows, 8), threads=32) as bx:
            x = T.alloc_shared((8, 4), "float32")
            if style == "plain":
                T.copy(X[bx * 8, 0], x)
            else:
                T.copy(X[T.min(bx * 8, rows), 0], x)
            for i, j in T.Parallel(8, 4):
                if bx * 8 + i < rows:
                    if style == "plain":
                        Y[bx * 8 + i, j] = x[i, j] + X[bx * 8 + i, j]
                    elif style == "short":
                        Y[bx * 8 + i, j] = x[i, j] + X[T.min(bx * 8 + i, rows - 2), T.max(j, 1)]
                    else:
                        Y[bx * 8 + i, j] = x[i, j] + X[T.max(T.min(bx * 8 + i, rows - 1), 0), T.min(3, j)]

    return kernel


def test_limits_that_no_row_reaches_are_none():
    made = with_plain_single_dims(limited(16))
    ir.assert_structural_equal(made.body, limited(16, "plain").body, map_free_vars=True)


@pytest.mark.parametrize(("rows", "style"), [(14, "limited"), (16, "short"), (14, "short")])
def test_limits_that_a_row_reaches_stay(rows, style):
    func, x = limited(rows, style), torch.randn(rows, 4)
    assert "T.min(" in with_plain_single_dims(func).script()
    at = [min(row, rows - 2) for row in range(rows)] if style == "short" else list(range(rows))
    expected = x + (x[at][:, [1, 1, 2, 3]] if style == "short" else x)
    for layouts in ({"X": {"x": 0}, "Y": {"x": 0}}, {"X": {"x": 1}}):
        annotated = mt.annotate(func, mt.Mesh({"x": 2}), layouts)
        torch.testing.assert_close(mt.compile(annotated, target="interpret", poison=True)(x), expected)
