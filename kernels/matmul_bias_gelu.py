"""`gelu(A @ B + bias)` in one kernel: the accumulator starts as the bias, and gelu is not linear in it."""

import tilelang.language as T
import torch.nn.functional as F

from .activations import gelu


def matmul_bias_gelu(
    M,
    N,
    K,
    block_M=64,
    block_N=64,
    block_K=32,
    dtype="float32",
    accum_dtype="float32",
    out_dtype="float16",
):
    """`C[m, n] = gelu(sum_k A[m, k] * B[k, n] + bias[n])`, accumulated in `accum_dtype`, stored in `out_dtype`."""

    @T.prim_func
    def matmul_bias_gelu_kernel(
        A: T.Tensor((M, K), dtype),
        B: T.Tensor((K, N), dtype),
        bias: T.Tensor((N,), accum_dtype),
        C: T.Tensor((M, N), out_dtype),
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), dtype)
            B_shared = T.alloc_shared((block_K, block_N), dtype)
            bias_shared = T.alloc_shared((block_N,), accum_dtype)
            C_local = T.alloc_fragment((block_M, block_N), accum_dtype)
            T.copy(bias[bx * block_N], bias_shared)
            for i, j in T.Parallel(block_M, block_N):
                C_local[i, j] = bias_shared[j]
            for ko in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[by * block_M, ko * block_K], A_shared)
                T.copy(B[ko * block_K, bx * block_N], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            for i, j in T.Parallel(block_M, block_N):
                C_local[i, j] = gelu(C_local[i, j])
            T.copy(C_local, C[by * block_M, bx * block_N])

    return matmul_bias_gelu_kernel


def matmul_bias_gelu_reference(a, b, bias, out_dtype=None):
    """The same in float64, cast at the end."""
    pre_activation = a.double() @ b.double() + bias.double()
    return F.gelu(pre_activation, approximate="tanh").to(out_dtype or a.dtype)
