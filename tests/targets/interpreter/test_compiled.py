"""The interpreter agrees with TileLang's own C back end, for what that runs as it is (no fragments, no lanes)."""

import numpy as np
import pytest
import tilelang
import tilelang.language as T
import torch

from mesh_tensor.targets.interpreter import interpret

NO_VECTORS = {"tirx.disable_vectorize": True}


def agree(func, *inputs, n_out=1, rtol=1e-5):
    """Run both on copies of `inputs`, the last `n_out` of which are written."""
    kernel = tilelang.compile(func, target="c", execution_backend="cython", pass_configs=NO_VECTORS)
    arrays = [a.copy() for a in inputs]
    tensors = [torch.from_numpy(a.copy()) for a in inputs]
    interpret(func, arrays)
    kernel(*tensors)
    for array, tensor in zip(arrays[-n_out:], tensors[-n_out:], strict=True):
        np.testing.assert_allclose(array, tensor.numpy(), rtol=rtol, atol=rtol)


def normal(*shape, dtype=np.float32):
    return np.random.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_ragged_matmul(dtype):
    accum = "int32" if dtype == "int8" else "float32"

    @T.prim_func
    def func(A: T.Tensor((30, 13), dtype), B: T.Tensor((19, 13), dtype), C: T.Tensor((30, 19), accum)):
        with T.Kernel(T.ceildiv(19, 8), T.ceildiv(30, 8), threads=128) as (bx, by):
            a, b = T.alloc_shared((8, 4), dtype, scope="shared"), T.alloc_shared((8, 4), dtype, scope="shared")
            c = T.alloc_local((8, 8), accum)
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(13, 4), num_stages=2):
                T.copy(A[by * 8, k * 4], a)
                T.copy(B[bx * 8, k * 4], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * 8, bx * 8])

    a, b = (normal(30, 13) * 9).astype(dtype), (normal(19, 13) * 9).astype(dtype)
    agree(func, a, b, np.zeros((30, 19), accum))


def test_online_softmax_in_serial_loops():
    @T.prim_func
    def func(X: T.Tensor((13, 30), "float32"), Y: T.Tensor((13, 30), "float32")):
        with T.Kernel(T.ceildiv(13, 4), threads=128) as bx:
            top, total = T.alloc_local((4,), "float32"), T.alloc_local((4,), "float32")
            old = T.alloc_local((4,), "float32")
            for i in T.serial(4):
                top[i] = -T.infinity("float32")
                total[i] = 0
            for j in T.serial(30):
                for i in T.serial(4):
                    old[i] = top[i]
                    top[i] = T.max(top[i], X[bx * 4 + i, j])
                    total[i] = total[i] * T.exp(old[i] - top[i]) + T.exp(X[bx * 4 + i, j] - top[i])
            for i, j in T.grid(4, 30):
                Y[bx * 4 + i, j] = T.exp(X[bx * 4 + i, j] - top[i]) / total[i]

    agree(func, normal(13, 30), np.zeros((13, 30), np.float32))


def test_copies_that_clip_and_convert():
    @T.prim_func
    def func(X: T.Tensor((13, 30), "float32"), Y: T.Tensor((30, 13), "int32")):
        with T.Kernel(T.ceildiv(30, 8), T.ceildiv(13, 8), threads=128) as (bx, by):
            x = T.alloc_shared((8, 8), "float32", scope="shared")
            y = T.alloc_shared((8, 8), "int32", scope="shared")
            T.copy(X[by * 8 - 2, bx * 8 - 3], x)
            for i, j in T.grid(8, 8):
                y[j, i] = T.cast(x[i, j] * 10, "int32")
            T.copy(y, Y[bx * 8, by * 8])

    agree(func, normal(13, 30), np.full((30, 13), -5, np.int32))


def test_reductions_and_guards():
    @T.prim_func
    def func(X: T.Tensor((6, 30), "float32"), Y: T.Tensor((6, 3), "float32")):
        with T.Kernel(6, threads=128) as bx:
            x, s = T.alloc_local((1, 16), "float32"), T.alloc_local((1,), "float32")
            m = T.alloc_local((1,), "float32")
            m[0] = 0.5
            for k in T.serial(3):
                for j in T.serial(16):
                    x[0, j] = T.if_then_else(j % 3 == 0, X[bx, k * 12 + j], X[bx, j])
                T.reduce_sum(x, s, dim=1)
                T.reduce_max(x, m, dim=1, clear=False)
                Y[bx, k] = s[0] * 2 + T.truncmod(bx - 3, 2) + m[0]

    agree(func, normal(6, 30), np.zeros((6, 3), np.float32))


def test_symbolic_sizes():
    n = T.dynamic("n")

    @T.prim_func
    def func(X: T.Tensor((n, 5), "float32"), Y: T.Tensor((n, 5), "float32")):
        with T.Kernel(T.ceildiv(n, 4), threads=128) as bx:
            x = T.alloc_shared((4, 5), "float32", scope="shared")
            T.copy(X[bx * 4, 0], x)
            for i, j in T.grid(4, 5):
                if bx * 4 + i < n:
                    Y[n - 1 - (bx * 4 + i), j] = x[i, j] + T.cast(T.floormod(j - 2, n), "float32")

    agree(func, normal(11, 5), np.zeros((11, 5), np.float32))
