"""Transposition of a matrix, by an element-wise loop and by TileLang's own tile operation."""

import tilelang.language as T


def transpose(M, N, block_M=32, block_N=32, dtype="float32"):
    """`B[n, m] = A[m, n]`."""

    @T.prim_func
    def transpose_kernel(A: T.Tensor((M, N), dtype), B: T.Tensor((N, M), dtype)):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_N), dtype)
            B_local = T.alloc_fragment((block_N, block_M), dtype)
            T.copy(A[by * block_M, bx * block_N], A_shared)
            for j, i in T.Parallel(block_N, block_M):
                B_local[j, i] = A_shared[i, j]
            T.copy(B_local, B[bx * block_N, by * block_M])

    return transpose_kernel


def tile_transpose(M, N, block_M=32, block_N=32, dtype="float32"):
    """`B[n, m] = A[m, n]` with `T.transpose` between two blocks in shared memory."""

    @T.prim_func
    def tile_transpose_kernel(A: T.Tensor((M, N), dtype), B: T.Tensor((N, M), dtype)):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_N), dtype)
            B_shared = T.alloc_shared((block_N, block_M), dtype)
            T.copy(A[by * block_M, bx * block_N], A_shared)
            T.transpose(A_shared, B_shared)
            T.copy(B_shared, B[bx * block_N, by * block_M])

    return tile_transpose_kernel


def transpose_reference(a):
    """`a` with its last two dims swapped."""
    return a.mT.contiguous()
