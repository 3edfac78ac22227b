"""Indices of dims of one element, and kernels whose only block of heads shares one of them."""

import pytest
import tilelang.language as T
import torch
from tvm import ir

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
