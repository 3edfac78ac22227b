"""Products of quantized matrices: scales per block of what is summed over, sums that are taken out of an accumulator
now and then, and two 4-bit numbers in one byte."""

import tilelang.language as T
import torch


def block_scaled_matmul(M, N, K, group=32, block_M=16, block_N=16, dtype="float32"):
    """`C[m, n] = sum_k A[m, k] * A_scale[m, k // group] * B[n, k] * B_scale[n // group, k // group]`: the product of a
    group is scaled as a whole."""

    @T.prim_func
    def block_scaled_matmul_kernel(
        A: T.Tensor((M, K), dtype),
        B: T.Tensor((N, K), dtype),
        A_scale: T.Tensor((M, K // group), "float32"),
        B_scale: T.Tensor((T.ceildiv(N, group), K // group), "float32"),
        C: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, group), dtype)
            B_shared = T.alloc_shared((block_N, group), dtype)
            scale = T.alloc_shared((block_M,), "float32")
            product = T.alloc_fragment((block_M, block_N), "float32")
            total = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(total)
            for k in T.Pipelined(K // group, num_stages=2):
                T.copy(A[by * block_M, k * group], A_shared)
                T.copy(B[bx * block_N, k * group], B_shared)
                for i in T.Parallel(block_M):
                    scale[i] = A_scale[by * block_M + i, k] * B_scale[bx * block_N // group, k]
                T.clear(product)
                T.gemm(A_shared, B_shared, product, transpose_B=True)
                for i, j in T.Parallel(block_M, block_N):
                    total[i, j] += product[i, j] * scale[i]
            T.copy(total, C[by * block_M, bx * block_N])

    return block_scaled_matmul_kernel


def block_scaled_matmul_reference(a, b, a_scale, b_scale):
    """The product of the scaled matrices, in float64."""
    group = a.shape[1] // a_scale.shape[1]
    a = a.double() * a_scale.double().repeat_interleave(group, 1)
    rows = b_scale.double().repeat_interleave(group, 0)[: b.shape[0]]
    return (a @ (b.double() * rows.repeat_interleave(group, 1)).T).float()


def promoted_matmul(M, N, K, block_M=16, block_N=16, block_K=16, interval=2, dtype="float32"):
    """`C = A @ B^T`, where what `interval` blocks of K come to is added to a second accumulator, as matrix instructions
    on 8-bit floats want it: their own accumulator keeps fewer bits."""
    blocks = -(-K // block_K)

    @T.prim_func
    def promoted_matmul_kernel(
        A: T.Tensor((M, K), dtype),
        B: T.Tensor((N, K), dtype),
        C: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), dtype)
            B_shared = T.alloc_shared((block_N, block_K), dtype)
            recent = T.alloc_fragment((block_M, block_N), "float32")
            total = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(recent)
            T.clear(total)
            for k in T.Pipelined(blocks, num_stages=2):
                T.copy(A[by * block_M, k * block_K], A_shared)
                T.copy(B[bx * block_N, k * block_K], B_shared)
                T.gemm(A_shared, B_shared, recent, transpose_B=True)
                if (k + 1) % interval == 0:
                    for i, j in T.Parallel(block_M, block_N):
                        total[i, j] += recent[i, j]
                    T.clear(recent)
            if blocks % interval != 0:
                for i, j in T.Parallel(block_M, block_N):
                    total[i, j] += recent[i, j]
            T.copy(total, C[by * block_M, bx * block_N])

    return promoted_matmul_kernel


def packed_matmul(M, N, K, block_M=16, block_N=16, block_K=16, dtype="float32"):
    """`C = A @ B^T` where B has two 4-bit numbers per byte, the even one in the low bits."""

    @T.prim_func
    def packed_matmul_kernel(
        A: T.Tensor((M, K), dtype),
        B: T.Tensor((N, K // 2), "uint8"),
        C: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), dtype)
            B_shared = T.alloc_shared((block_N, block_K // 2), "uint8")
            B_local = T.alloc_fragment((block_N, block_K), dtype)
            total = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[by * block_M, k * block_K], A_shared)
                T.copy(B[bx * block_N, k * block_K // 2], B_shared)
                for i, j in T.Parallel(block_N, block_K):
                    B_local[i, j] = T.cast(
                        (B_shared[i, j // 2] >> (T.cast(j % 2, "uint8") * T.uint8(4))) & T.uint8(15), dtype
                    )
                T.gemm(A_shared, B_local, total, transpose_B=True)
            T.copy(total, C[by * block_M, bx * block_N])

    return packed_matmul_kernel


def packed_matmul_reference(a, b):
    """The product with B unpacked, in float64."""
    unpacked = torch.stack((b & 15, b >> 4), -1).flatten(1)
    return (a.double() @ unpacked.double().T).float()


def dequantize(N, K, group=32, block_N=16, dtype="float32"):
    """`W[n, k]` of packed 4-bit numbers, a scale and a zero point per group of a row."""

    @T.prim_func
    def dequantize_kernel(
        B: T.Tensor((N, K // 2), "uint8"),
        scale: T.Tensor((N, K // group), dtype),
        zero: T.Tensor((N, K // group), dtype),
        W: T.Tensor((N, K), dtype),
    ):
        with T.Kernel(K // group, T.ceildiv(N, block_N), threads=128) as (bx, by):
            B_shared = T.alloc_shared((block_N, group // 2), "uint8")
            out = T.alloc_fragment((block_N, group), dtype)
            T.copy(B[by * block_N, bx * group // 2], B_shared)
            for i, j in T.Parallel(block_N, group):
                number = (B_shared[i, j // 2] >> (T.cast(j % 2, "uint8") * T.uint8(4))) & T.uint8(15)
                out[i, j] = (T.cast(number, dtype) - zero[by * block_N + i, bx]) * scale[by * block_N + i, bx]
            T.copy(out, W[by * block_N, bx * group])

    return dequantize_kernel


def dequantize_reference(b, scale, zero):
    """The same of all groups at once."""
    group = b.shape[1] * 2 // scale.shape[1]
    unpacked = torch.stack((b & 15, b >> 4), -1).flatten(1).to(scale.dtype)
    return (unpacked - zero.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1)
