"""A product with a matrix of low rank: what comes of the first factor lies where the inputs of it were staged."""

import tilelang.language as T
import torch


def low_rank(M, N, K, rank, block_M=64, block_N=64):
    """`Y = (X @ A) @ B`; the first product goes over K in blocks as wide as the rank."""

    @T.prim_func
    def low_rank_kernel(
        X: T.Tensor((M, K), "float32"),
        A: T.Tensor((K, rank), "float32"),
        B: T.Tensor((rank, N), "float32"),
        Y: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            staged = T.alloc_shared((block_M, rank), "float32")
            down = T.alloc_shared((rank, rank), "float32")
            up = T.alloc_shared((rank, block_N), "float32")
            inner = T.alloc_fragment((block_M, rank), "float32")
            outer = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(inner)
            for ko in T.Pipelined(T.ceildiv(K, rank), num_stages=2):
                T.copy(X[bx * block_M, ko * rank], staged)
                T.copy(A[ko * rank, 0], down)
                T.gemm(staged, down, inner)
            T.copy(inner, staged)
            for by in T.serial(T.ceildiv(N, block_N)):
                T.copy(B[0, by * block_N], up)
                T.clear(outer)
                T.gemm(staged, up, outer)
                T.copy(outer, Y[bx * block_M, by * block_N])

    return low_rank_kernel


def low_rank_reference(x, a, b):
    return (x.double() @ a.double() @ b.double()).to(torch.float32)
