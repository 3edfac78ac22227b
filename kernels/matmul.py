"""Matrix products: plain (with transposed operands), batched, and split along K with atomics."""

import tilelang.language as T
import torch


def matmul(
    M,
    N,
    K,
    block_M=64,
    block_N=64,
    block_K=32,
    trans_A=False,
    trans_B=False,
    dtype="float32",
    accum_dtype="float32",
    out_dtype=None,
    num_stages=2,
    threads=128,
):
    """`C[m, n] = sum_k A[m, k] * B[k, n]`; A is stored (K, M) if `trans_A`, B is stored (N, K) if `trans_B`."""
    A_shape, A_block = ((K, M), (block_K, block_M)) if trans_A else ((M, K), (block_M, block_K))
    B_shape, B_block = ((N, K), (block_N, block_K)) if trans_B else ((K, N), (block_K, block_N))

    @T.prim_func
    def matmul_kernel(
        A: T.Tensor(A_shape, dtype),
        B: T.Tensor(B_shape, dtype),
        C: T.Tensor((M, N), out_dtype or dtype),
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=threads) as (bx, by):
            A_shared = T.alloc_shared(A_block, dtype)
            B_shared = T.alloc_shared(B_block, dtype)
            C_local = T.alloc_fragment((block_M, block_N), accum_dtype)
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(K, block_K), num_stages=num_stages):
                if trans_A:
                    T.copy(A[ko * block_K, by * block_M], A_shared)
                else:
                    T.copy(A[by * block_M, ko * block_K], A_shared)
                if trans_B:
                    T.copy(B[bx * block_N, ko * block_K], B_shared)
                else:
                    T.copy(B[ko * block_K, bx * block_N], B_shared)
                T.gemm(A_shared, B_shared, C_local, transpose_A=trans_A, transpose_B=trans_B)
            T.copy(C_local, C[by * block_M, bx * block_N])

    return matmul_kernel


def matmul_backward(M, N, K, block_M=64, block_N=64, block_K=32, dtype="float32", accum_dtype="float32"):
    """The gradients of `matmul(M, N, K)`: `d_A = d_C @ B^T` and `d_B = A^T @ d_C`, a kernel each."""

    @T.prim_func
    def matmul_d_A_kernel(
        B: T.Tensor((K, N), dtype),
        d_C: T.Tensor((M, N), dtype),
        d_A: T.Tensor((M, K), dtype),
    ):
        with T.Kernel(T.ceildiv(K, block_K), T.ceildiv(M, block_M), threads=128) as (bx, by):
            B_shared = T.alloc_shared((block_K, block_N), dtype)
            d_C_shared = T.alloc_shared((block_M, block_N), dtype)
            d_A_local = T.alloc_fragment((block_M, block_K), accum_dtype)
            T.clear(d_A_local)
            for no in T.Pipelined(T.ceildiv(N, block_N), num_stages=2):
                T.copy(d_C[by * block_M, no * block_N], d_C_shared)
                T.copy(B[bx * block_K, no * block_N], B_shared)
                T.gemm(d_C_shared, B_shared, d_A_local, transpose_B=True)
            T.copy(d_A_local, d_A[by * block_M, bx * block_K])

    @T.prim_func
    def matmul_d_B_kernel(
        A: T.Tensor((M, K), dtype),
        d_C: T.Tensor((M, N), dtype),
        d_B: T.Tensor((K, N), dtype),
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(K, block_K), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), dtype)
            d_C_shared = T.alloc_shared((block_M, block_N), dtype)
            d_B_local = T.alloc_fragment((block_K, block_N), accum_dtype)
            T.clear(d_B_local)
            for mo in T.Pipelined(T.ceildiv(M, block_M), num_stages=2):
                T.copy(A[mo * block_M, by * block_K], A_shared)
                T.copy(d_C[mo * block_M, bx * block_N], d_C_shared)
                T.gemm(A_shared, d_C_shared, d_B_local, transpose_A=True)
            T.copy(d_B_local, d_B[by * block_K, bx * block_N])

    return matmul_d_A_kernel, matmul_d_B_kernel


def matmul_reference(a, b, trans_A=False, trans_B=False, out_dtype=None):
    """The product of two matrices, or of two batches of matrices, computed in float64 (integers: exactly)."""
    wide = torch.float64 if a.is_floating_point() else torch.int64
    a, b, dtype = a.to(wide), b.to(wide), out_dtype or a.dtype
    return ((a.mT if trans_A else a) @ (b.mT if trans_B else b)).to(dtype)


def batched_matmul(batch, M, N, K, block_M=64, block_N=64, block_K=32, dtype="float32", accum_dtype="float32"):
    """`C[b, m, n] = sum_k A[b, m, k] * B[b, k, n]`."""

    @T.prim_func
    def batched_matmul_kernel(
        A: T.Tensor((batch, M, K), dtype),
        B: T.Tensor((batch, K, N), dtype),
        C: T.Tensor((batch, M, N), dtype),
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), batch, threads=128) as (bx, by, bz):
            A_shared = T.alloc_shared((block_M, block_K), dtype)
            B_shared = T.alloc_shared((block_K, block_N), dtype)
            C_local = T.alloc_fragment((block_M, block_N), accum_dtype)
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[bz, by * block_M, ko * block_K], A_shared)
                T.copy(B[bz, ko * block_K, bx * block_N], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C[bz, by * block_M, bx * block_N])

    return batched_matmul_kernel


def split_k_matmul(M, N, K, split=2, block_M=64, block_N=64, block_K=32, dtype="float32", accum_dtype="float32"):
    """`C += A @ B`, where `split` programs per block of C each walk a part of K and add to C with atomics."""
    steps = T.ceildiv(T.ceildiv(K, block_K), split)

    @T.prim_func
    def split_k_matmul_kernel(
        A: T.Tensor((M, K), dtype),
        B: T.Tensor((K, N), dtype),
        C: T.Tensor((M, N), accum_dtype),
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), split, threads=128) as (bx, by, bz):
            A_shared = T.alloc_shared((block_M, block_K), dtype)
            B_shared = T.alloc_shared((block_K, block_N), dtype)
            C_local = T.alloc_fragment((block_M, block_N), accum_dtype)
            T.clear(C_local)
            for ko in T.Pipelined(steps, num_stages=2):
                T.copy(A[by * block_M, (bz * steps + ko) * block_K], A_shared)
                T.copy(B[(bz * steps + ko) * block_K, bx * block_N], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.atomic_add(C[by * block_M, bx * block_N], C_local)

    return split_k_matmul_kernel


def split_k_matmul_reference(a, b, c):
    """`c + a @ b` in `c`'s dtype."""
    return (c.double() + a.double() @ b.double()).to(c.dtype)
