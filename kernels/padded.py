"""Kernels over rows whose blocks are longer than what there is of a row: fragments of a power of 2, a last block that
is masked, numbers in the padding that are counted and taken off again."""

import tilelang.language as T
import torch


def fragment_layer_norm(M, N, block_M=4, length=128, eps=1e-5, dtype="float32"):
    """`Y = (X - mean) / sqrt(var + eps) * weight + bias`, the columns in one fragment of a multiple of `length`; what
    is there of no column adds `mean ** 2` each to the squares, and is taken off."""
    padded = -(-N // length) * length

    @T.prim_func
    def fragment_layer_norm_kernel(
        X: T.Tensor((M, N), dtype),
        weight: T.Tensor((N,), dtype),
        bias: T.Tensor((N,), dtype),
        Y: T.Tensor((M, N), dtype),
    ):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as row:
            x = T.alloc_shared((block_M, padded), dtype)
            squares = T.alloc_fragment((block_M, padded), "float32")
            total = T.alloc_fragment((block_M,), "float32")
            mean = T.alloc_fragment((block_M,), "float32")
            for i, j in T.Parallel(block_M, padded):
                x[i, j] = T.if_then_else(
                    T.And(row * block_M + i < M, j < N), X[row * block_M + i, j], T.cast(0.0, dtype)
                )
                squares[i, j] = T.cast(x[i, j], "float32")
            T.reduce_sum(squares, total, dim=1)
            for i in T.Parallel(block_M):
                mean[i] = total[i] / N
            for i, j in T.Parallel(block_M, padded):
                squares[i, j] = (squares[i, j] - mean[i]) * (squares[i, j] - mean[i])
            T.reduce_sum(squares, total, dim=1)
            for i in T.Parallel(block_M):
                total[i] = T.rsqrt((total[i] - (padded - N) * mean[i] * mean[i]) / N + eps)
            for i, j in T.Parallel(block_M, padded):
                if T.And(row * block_M + i < M, j < N):
                    Y[row * block_M + i, j] = (x[i, j] - mean[i]) * total[i] * weight[j] + bias[j]

    return fragment_layer_norm_kernel


def _load(X, row, block, staged, values, last, otherwise):
    """A block of rows; only the last one may reach past their end, and is masked."""
    block_M, block_N = staged.shape
    M, N = X.shape

    @T.macro
    def load(X, staged, values):
        if block < last:
            T.copy(X[row * block_M, block * block_N], staged)
            for i, j in T.Parallel(block_M, block_N):
                values[i, j] = T.cast(staged[i, j], "float32")
        else:
            for i, j in T.Parallel(block_M, block_N):
                values[i, j] = T.if_then_else(
                    T.And(row * block_M + i < M, block * block_N + j < N),
                    T.cast(X[row * block_M + i, block * block_N + j], "float32"),
                    T.cast(otherwise, "float32"),
                )

    return load(X, staged, values)


def block_logsumexp(M, N, block_M=4, block_N=128, dtype="float32"):
    """`Y[m] = log(sum(exp(X[m, :])))`, online."""
    blocks = -(-N // block_N)

    @T.prim_func
    def block_logsumexp_kernel(X: T.Tensor((M, N), dtype), Y: T.Tensor((M,), dtype)):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as row:
            staged = T.alloc_shared((block_M, block_N), dtype)
            x = T.alloc_fragment((block_M, block_N), "float32")
            largest = T.alloc_fragment((block_M,), "float32")
            before = T.alloc_fragment((block_M,), "float32")
            of_block = T.alloc_fragment((block_M,), "float32")
            total = T.alloc_fragment((block_M,), "float32")
            T.fill(largest, -T.infinity("float32"))
            T.fill(total, 0.0)
            for k in T.serial(blocks):
                _load(X, row, k, staged, x, blocks - 1, float("-inf"))
                T.fill(of_block, -T.infinity("float32"))
                T.reduce_max(x, of_block, dim=1, clear=False)
                for i in T.Parallel(block_M):
                    before[i] = largest[i]
                    largest[i] = T.max(largest[i], of_block[i])
                for i, j in T.Parallel(block_M, block_N):
                    x[i, j] = T.exp(x[i, j] - largest[i])
                T.reduce_sum(x, of_block, dim=1)
                for i in T.Parallel(block_M):
                    total[i] = total[i] * T.exp(before[i] - largest[i]) + of_block[i]
            for i in T.Parallel(block_M):
                of_block[i] = largest[i] + T.log(total[i])
            T.copy(of_block, Y[row * block_M])

    return block_logsumexp_kernel


def block_variance(M, N, block_M=4, block_N=128, dtype="float32"):
    """`Mean[m]` and `Var[m]` of the rows of X in two passes; what the last block has of no column adds `mean ** 2`
    each, and is taken off."""
    blocks = -(-N // block_N)

    @T.prim_func
    def block_variance_kernel(X: T.Tensor((M, N), dtype), Var: T.Tensor((M,), dtype), Mean: T.Tensor((M,), dtype)):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as row:
            staged = T.alloc_shared((block_M, block_N), dtype)
            x = T.alloc_fragment((block_M, block_N), "float32")
            of_block = T.alloc_fragment((block_M,), "float32")
            mean = T.alloc_fragment((block_M,), "float32")
            total = T.alloc_fragment((block_M,), "float32")
            T.fill(mean, 0.0)
            for k in T.serial(blocks):
                _load(X, row, k, staged, x, blocks - 1, 0.0)
                T.reduce_sum(x, of_block, dim=1)
                for i in T.Parallel(block_M):
                    mean[i] = mean[i] + of_block[i]
            for i in T.Parallel(block_M):
                mean[i] = mean[i] / N
            T.fill(total, 0.0)
            for k in T.serial(blocks):
                _load(X, row, k, staged, x, blocks - 1, 0.0)
                for i, j in T.Parallel(block_M, block_N):
                    x[i, j] = (x[i, j] - mean[i]) * (x[i, j] - mean[i])
                T.reduce_sum(x, of_block, dim=1)
                for i in T.Parallel(block_M):
                    total[i] = total[i] + of_block[i]
            for i in T.Parallel(block_M):
                total[i] = (total[i] - (blocks * block_N - N) * mean[i] * mean[i]) / N
            T.copy(total, Var[row * block_M])
            T.copy(mean, Mean[row * block_M])

    return block_variance_kernel


def block_variance_reference(x):
    return x.var(1, correction=0), x.mean(1)


def logsumexp_reference(x):
    return torch.logsumexp(x, 1)
