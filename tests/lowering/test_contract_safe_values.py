"""T.annotate_safe_value: what a copy reads past the end is no padding that sums may take for 0."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt

from .every_layout import check


def summed():
    @T.prim_func
    def main(X: T.Tensor((7,), "float32"), Z: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=32):
            x, z = T.alloc_shared((8,), "float32"), T.alloc_fragment((1,), "float32")
            T.annotate_safe_value({X: 5.0})
            T.copy(X[0], x)
            T.reduce_sum(x, z, dim=0)
            T.copy(z, Z)

    return main


def multiplied():
    @T.prim_func
    def main(A: T.Tensor((8, 20), "float32"), B: T.Tensor((20, 8), "float32"), C: T.Tensor((8, 8), "float32")):
        with T.Kernel(1, threads=32):
            a, b = T.alloc_shared((8, 8), "float32"), T.alloc_shared((8, 8), "float32")
            c = T.alloc_fragment((8, 8), "float32")
            T.annotate_safe_value({A: 1.0, B: 2.0})
            T.clear(c)
            for k in T.serial(3):
                T.copy(A[0, k * 8], a)
                T.copy(B[k * 8, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C)

    return main


def test_sums():
    x = torch.randn(7)
    check(summed(), [x], x.sum(0, keepdim=True) + 5)


def test_products():
    a, b = torch.randn(8, 20), torch.randn(20, 8)
    check(multiplied(), [a, b], a @ b + 4 * 1 * 2)


@pytest.mark.parametrize("target", ["interpret", "c"])
def test_each_target(target):
    x = torch.randn(7)
    kernel = mt.compile(mt.annotate(summed(), {"x": 2}, {"X": {"x": 0}}), target=target)
    torch.testing.assert_close(kernel(x), x.sum(0, keepdim=True) + 5)
    assert "all_gather" in kernel.explain()
