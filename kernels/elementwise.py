"""Element-wise kernels: addition with broadcasting, chains of activations, casts, positions, vectors."""

import tilelang.language as T
import torch
import torch.nn.functional as F

from .activations import gelu, relu, silu


def vector_add(N, block_N=256, dtype="float32"):
    """`C[n] = A[n] + B[n]`, read and written in place, without copies to shared memory."""

    @T.prim_func
    def vector_add_kernel(A: T.Tensor((N,), dtype), B: T.Tensor((N,), dtype), C: T.Tensor((N,), dtype)):
        with T.Kernel(T.ceildiv(N, block_N), threads=128) as bx:
            for i in T.Parallel(block_N):
                if bx * block_N + i < N:
                    C[bx * block_N + i] = A[bx * block_N + i] + B[bx * block_N + i]

    return vector_add_kernel


def add(M, N, block_M=32, block_N=64, dtype="float32"):
    """`C[m, n] = A[m, n] + B[m, n]`."""

    @T.prim_func
    def add_kernel(A: T.Tensor((M, N), dtype), B: T.Tensor((M, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_N), dtype)
            B_shared = T.alloc_shared((block_M, block_N), dtype)
            C_local = T.alloc_fragment((block_M, block_N), dtype)
            T.copy(A[by * block_M, bx * block_N], A_shared)
            T.copy(B[by * block_M, bx * block_N], B_shared)
            for i, j in T.Parallel(block_M, block_N):
                C_local[i, j] = A_shared[i, j] + B_shared[i, j]
            T.copy(C_local, C[by * block_M, bx * block_N])

    return add_kernel


def add_reference(a, b):
    """`a + b`."""
    return a + b


def add_bias(M, N, dim=1, block_M=32, block_N=64, dtype="float32"):
    """`C = A + bias`, where `bias` runs along A's dim `dim` and is broadcast over the other one."""
    bias_size, bias_block = (M, block_M) if dim == 0 else (N, block_N)

    @T.prim_func
    def add_bias_kernel(A: T.Tensor((M, N), dtype), bias: T.Tensor((bias_size,), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_local = T.alloc_fragment((block_M, block_N), dtype)
            bias_shared = T.alloc_shared((bias_block,), dtype)
            T.copy(A[by * block_M, bx * block_N], A_local)
            if dim == 0:
                T.copy(bias[by * block_M], bias_shared)
            else:
                T.copy(bias[bx * block_N], bias_shared)
            for i, j in T.Parallel(block_M, block_N):
                A_local[i, j] = A_local[i, j] + (bias_shared[i] if dim == 0 else bias_shared[j])
            T.copy(A_local, C[by * block_M, bx * block_N])

    return add_bias_kernel


def add_bias_reference(a, bias, dim=1):
    """`a + bias` with `bias` along `dim`."""
    return a + (bias[:, None] if dim == 0 else bias[None, :])


def activation_chain(M, N, block_M=32, block_N=64, dtype="float32"):
    """`C = silu(A) * gelu(B) + relu(A - B)`."""

    @T.prim_func
    def activation_chain_kernel(A: T.Tensor((M, N), dtype), B: T.Tensor((M, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            a = T.alloc_fragment((block_M, block_N), "float32")
            b = T.alloc_fragment((block_M, block_N), "float32")
            T.copy(A[by * block_M, bx * block_N], a)
            T.copy(B[by * block_M, bx * block_N], b)
            for i, j in T.Parallel(block_M, block_N):
                a[i, j] = silu(a[i, j]) * gelu(b[i, j]) + relu(a[i, j] - b[i, j])
            T.copy(a, C[by * block_M, bx * block_N])

    return activation_chain_kernel


def activation_chain_reference(a, b):
    """`silu(a) * gelu(b) + relu(a - b)`."""
    wide_a, wide_b = a.double(), b.double()
    return (F.silu(wide_a) * F.gelu(wide_b, approximate="tanh") + F.relu(wide_a - wide_b)).to(a.dtype)


def cast(M, N, block_M=32, block_N=64, dtype="float32", out_dtype="float16"):
    """`B[m, n] = A[m, n]` in another dtype."""

    @T.prim_func
    def cast_kernel(A: T.Tensor((M, N), dtype), B: T.Tensor((M, N), out_dtype)):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_N), dtype)
            B_local = T.alloc_fragment((block_M, block_N), out_dtype)
            T.copy(A[by * block_M, bx * block_N], A_shared)
            for i, j in T.Parallel(block_M, block_N):
                B_local[i, j] = T.cast(A_shared[i, j], out_dtype)
            T.copy(B_local, B[by * block_M, bx * block_N])

    return cast_kernel


def add_positions(M, N, block_M=32, block_N=64, dtype="float32"):
    """`B[m, n] = A[m, n] + m * N + n`: every element knows where it is in the whole tensor."""

    @T.prim_func
    def add_positions_kernel(A: T.Tensor((M, N), dtype), B: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            tile = T.alloc_fragment((block_M, block_N), dtype)
            T.copy(A[by * block_M, bx * block_N], tile)
            for i, j in T.Parallel(block_M, block_N):
                tile[i, j] = tile[i, j] + T.cast((by * block_M + i) * N + bx * block_N + j, dtype)
            T.copy(tile, B[by * block_M, bx * block_N])

    return add_positions_kernel


def add_positions_reference(a):
    """`a` plus each element's flat index."""
    return a + torch.arange(a.numel(), dtype=a.dtype).reshape(a.shape)
