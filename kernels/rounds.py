"""Kernels that go on with what a few rounds of reductions leave: the largest of rows, one after the other, and a matrix
whose rows and columns are scaled in turns until all of them sum to 1."""

import tilelang.language as T
import torch


def top_k(M, N, k=4, block_M=16):
    """`High[m, r] = A[m, At[m, r]]`, the r-th largest of row m; of equal ones the last, and none of the others."""

    @T.prim_func
    def top_k_kernel(A: T.Tensor((M, N), "float32"), High: T.Tensor((M, k), "float32"), At: T.Tensor((M, k), "int32")):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            left = T.alloc_fragment((block_M, N), "float32")
            places = T.alloc_fragment((block_M, N), "int32")
            high = T.alloc_fragment((block_M,), "float32")
            at = T.alloc_fragment((block_M,), "int32")
            T.copy(A[bx * block_M, 0], left)
            for r in T.serial(k):
                T.fill(places, -1)
                T.reduce_max(left, high, dim=1)
                for i, j in T.Parallel(block_M, N):
                    places[i, j] = T.if_then_else(left[i, j] == high[i], j, places[i, j])
                T.reduce_max(places, at, dim=1)
                for i, j in T.Parallel(block_M, N):
                    left[i, j] = T.if_then_else(left[i, j] == high[i], -T.infinity("float32"), left[i, j])
                for i in T.Parallel(block_M):
                    if bx * block_M + i < M:
                        High[bx * block_M + i, r] = high[i]
                        At[bx * block_M + i, r] = at[i]

    return top_k_kernel


def top_k_reference(a, k=4):
    left, high, at = a.clone(), [], []
    for _ in range(k):
        high.append(left.max(1).values)
        largest = left == high[-1][:, None]
        at.append(torch.where(largest, torch.arange(a.shape[1]), -1).max(1).values.int())
        left[largest] = -torch.inf
    return torch.stack(high, 1), torch.stack(at, 1)


def balanced(batch, n, rounds=3):
    """`B[b]`: the exponentials of `A[b]`, of which rows and columns are divided by their sums in turns (Sinkhorn)."""

    @T.prim_func
    def balanced_kernel(A: T.Tensor((batch, n, n), "float32"), B: T.Tensor((batch, n, n), "float32")):
        with T.Kernel(batch, threads=128) as b:
            x = T.alloc_fragment((n, n), "float32")
            of_rows = T.alloc_fragment((n,), "float32")
            of_columns = T.alloc_fragment((n,), "float32")
            for i, j in T.Parallel(n, n):
                x[i, j] = T.exp(A[b, i, j])
            for _r in T.serial(rounds):
                T.reduce_sum(x, of_rows, dim=1)
                for i, j in T.Parallel(n, n):
                    x[i, j] = x[i, j] / of_rows[i]
                T.reduce_sum(x, of_columns, dim=0)
                for i, j in T.Parallel(n, n):
                    x[i, j] = x[i, j] / of_columns[j]
            for i, j in T.Parallel(n, n):
                B[b, i, j] = x[i, j]

    return balanced_kernel


def balanced_reference(a, rounds=3):
    x = a.double().exp()
    for _ in range(rounds):
        x = x / x.sum(2, keepdim=True)
        x = x / x.sum(1, keepdim=True)
    return x.float()
