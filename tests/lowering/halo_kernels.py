"""Kernels of which every position reads a bounded window of another tensor, with what they compute in torch."""

import tilelang.language as T
import torch.nn.functional as F


def stencil(n, block=8):
    """`B[x] = A[x - 1] + A[x] + A[x + 1]`, with zeros outside."""

    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=8) as bx:
            for i in T.Parallel(block):
                x = bx * block + i
                if x < n:
                    B[x] = T.if_then_else(x > 0, A[x - 1], 0) + A[x] + T.if_then_else(x < n - 1, A[x + 1], 0)

    return kernel


def stencil_reference(a):
    padded = F.pad(a, (1, 1))
    return padded[:-2] + padded[1:-1] + padded[2:]


def indexed(index, n, m, block=8):
    """`B[x] = A[index(x)]`, of n and m elements."""

    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), B: T.Tensor((m,), "float32")):
        with T.Kernel(T.ceildiv(m, block), threads=8) as bx:
            for i in T.Parallel(block):
                if bx * block + i < m:
                    B[bx * block + i] = A[index(bx * block + i)]

    return kernel


def staged(n, block=8):
    """`B[x] = A[x] + 2 * A[x + 1] + 3 * A[x + 2]`, from blocks that are copied with their margins."""

    @T.prim_func
    def kernel(A: T.Tensor((n + 2,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=8) as bx:
            rows = T.alloc_shared((block + 2,), "float32")
            T.copy(A[bx * block : bx * block + block + 2], rows)
            for i in T.Parallel(block):
                B[bx * block + i] = rows[i] + 2 * rows[i + 1] + 3 * rows[i + 2]

    return kernel


def max_pool(n, block=8):
    """`B[x] = max(A[2 * x], A[2 * x + 1])`, by blocks on chip."""

    @T.prim_func
    def kernel(A: T.Tensor((2 * n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=8) as bx:
            rows = T.alloc_shared((2 * block,), "float32")
            out = T.alloc_fragment((block,), "float32")
            T.copy(A[bx * 2 * block], rows)
            for i in T.Parallel(block):
                out[i] = T.max(rows[2 * i], rows[2 * i + 1])
            T.copy(out, B[bx * block])

    return kernel
