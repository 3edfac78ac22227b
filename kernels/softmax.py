"""Softmax over the rows of a matrix: row held in a block, three passes over column blocks, and online."""

import tilelang.language as T
import torch


def softmax(M, N, block_M=32, dtype="float32", accum_dtype="float32"):
    """`Y[m, :] = softmax(X[m, :])`; a block holds whole rows."""

    @T.prim_func
    def softmax_kernel(X: T.Tensor((M, N), dtype), Y: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            x = T.alloc_fragment((block_M, N), accum_dtype)
            row_max = T.alloc_fragment((block_M,), accum_dtype)
            row_sum = T.alloc_fragment((block_M,), accum_dtype)
            scale = T.alloc_fragment((block_M,), accum_dtype)
            T.copy(X[bx * block_M, 0], x)
            T.reduce_max(x, row_max, dim=1, clear=True)
            for i, j in T.Parallel(block_M, N):
                x[i, j] = T.exp(x[i, j] - row_max[i])
            T.reduce_sum(x, row_sum, dim=1)
            for i in T.Parallel(block_M):
                scale[i] = 1.0 / row_sum[i]
            for i, j in T.Parallel(block_M, N):
                x[i, j] = x[i, j] * scale[i]
            T.copy(x, Y[bx * block_M, 0])

    return softmax_kernel


def softmax_backward(M, N, block_M=32, dtype="float32", accum_dtype="float32"):
    """The gradient of softmax over rows: `d_X[m, n] = Y[m, n] * (d_Y[m, n] - sum_k d_Y[m, k] * Y[m, k])`."""

    @T.prim_func
    def softmax_backward_kernel(Y: T.Tensor((M, N), dtype), d_Y: T.Tensor((M, N), dtype), d_X: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            y = T.alloc_fragment((block_M, N), accum_dtype)
            gradient = T.alloc_fragment((block_M, N), accum_dtype)
            product = T.alloc_fragment((block_M, N), accum_dtype)
            row_sum = T.alloc_fragment((block_M,), accum_dtype)
            T.copy(Y[bx * block_M, 0], y)
            T.copy(d_Y[bx * block_M, 0], gradient)
            for i, j in T.Parallel(block_M, N):
                product[i, j] = y[i, j] * gradient[i, j]
            T.reduce_sum(product, row_sum, dim=1)
            for i, j in T.Parallel(block_M, N):
                gradient[i, j] = y[i, j] * (gradient[i, j] - row_sum[i])
            T.copy(gradient, d_X[bx * block_M, 0])

    return softmax_backward_kernel


def three_pass_softmax(M, N, block_M=32, block_N=32, dtype="float32", accum_dtype="float32"):
    """Softmax over column blocks: one pass for the rows' maxima, one for their sums, one for the result."""

    @T.prim_func
    def three_pass_softmax_kernel(X: T.Tensor((M, N), dtype), Y: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            x = T.alloc_fragment((block_M, block_N), accum_dtype)
            row_max = T.alloc_fragment((block_M,), accum_dtype)
            row_sum = T.alloc_fragment((block_M,), accum_dtype)
            T.fill(row_max, -T.infinity(accum_dtype))
            T.clear(row_sum)
            for ko in T.serial(T.ceildiv(N, block_N)):
                T.copy(X[bx * block_M, ko * block_N], x)
                for i, j in T.Parallel(block_M, block_N):
                    x[i, j] = T.if_then_else(ko * block_N + j < N, x[i, j], -T.infinity(accum_dtype))
                T.reduce_max(x, row_max, dim=1, clear=False)
            for ko in T.serial(T.ceildiv(N, block_N)):
                T.copy(X[bx * block_M, ko * block_N], x)
                for i, j in T.Parallel(block_M, block_N):
                    x[i, j] = T.if_then_else(ko * block_N + j < N, T.exp(x[i, j] - row_max[i]), 0.0)
                T.reduce_sum(x, row_sum, dim=1, clear=False)
            for ko in T.serial(T.ceildiv(N, block_N)):
                T.copy(X[bx * block_M, ko * block_N], x)
                for i, j in T.Parallel(block_M, block_N):
                    x[i, j] = T.exp(x[i, j] - row_max[i]) / row_sum[i]
                T.copy(x, Y[bx * block_M, ko * block_N])

    return three_pass_softmax_kernel


def online_softmax(M, N, block_M=32, block_N=32, dtype="float32", accum_dtype="float32"):
    """Softmax over column blocks in two passes: the running sum is rescaled whenever the running maximum grows."""

    @T.prim_func
    def online_softmax_kernel(X: T.Tensor((M, N), dtype), Y: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            x = T.alloc_fragment((block_M, block_N), accum_dtype)
            row_max = T.alloc_fragment((block_M,), accum_dtype)
            row_max_prev = T.alloc_fragment((block_M,), accum_dtype)
            row_sum = T.alloc_fragment((block_M,), accum_dtype)
            block_sum = T.alloc_fragment((block_M,), accum_dtype)
            T.fill(row_max, -T.infinity(accum_dtype))
            T.clear(row_sum)
            for ko in T.Pipelined(T.ceildiv(N, block_N), num_stages=1):
                T.copy(X[bx * block_M, ko * block_N], x)
                for i, j in T.Parallel(block_M, block_N):
                    x[i, j] = T.if_then_else(ko * block_N + j < N, x[i, j], -T.infinity(accum_dtype))
                T.copy(row_max, row_max_prev)
                T.reduce_max(x, row_max, dim=1, clear=False)
                for i, j in T.Parallel(block_M, block_N):
                    x[i, j] = T.exp(x[i, j] - row_max[i])
                T.reduce_sum(x, block_sum, dim=1)
                for i in T.Parallel(block_M):
                    row_sum[i] = row_sum[i] * T.exp(row_max_prev[i] - row_max[i]) + block_sum[i]
            for ko in T.Pipelined(T.ceildiv(N, block_N), num_stages=1):
                T.copy(X[bx * block_M, ko * block_N], x)
                for i, j in T.Parallel(block_M, block_N):
                    x[i, j] = T.exp(x[i, j] - row_max[i]) / row_sum[i]
                T.copy(x, Y[bx * block_M, ko * block_N])

    return online_softmax_kernel


def softmax_reference(x):
    """Softmax over the last dim."""
    return torch.softmax(x.double(), dim=-1).to(x.dtype)
