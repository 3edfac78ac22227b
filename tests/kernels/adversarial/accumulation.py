"""Reductions that do not start at their neutral element, have more than one result, or scale by a global size."""

import tilelang.language as T
import torch
import torch.nn.functional as F

from kernels.catalogue.case import FLOAT16, FLOAT32, KernelCase, normal, tensors
from kernels.catalogue.sizes import MN, MNK


def accumulate_matmul(M, N, K, block=8, dtype="float32"):
    """`C += A @ B`, C loaded into the accumulator first; with float16, C is rounded once, at the end."""

    @T.prim_func
    def accumulate_matmul_kernel(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block, block), dtype)
            B_shared = T.alloc_shared((block, block), dtype)
            C_local = T.alloc_fragment((block, block), "float32")
            T.copy(C[by * block, bx * block], C_local)
            for ko in T.Pipelined(T.ceildiv(K, block), num_stages=2):
                T.copy(A[by * block, ko * block], A_shared)
                T.copy(B[ko * block, bx * block], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C[by * block, bx * block])

    return accumulate_matmul_kernel


def accumulate_matmul_reference(a, b, c):
    return (c.double() + a.double() @ b.double()).to(c.dtype)


def scaled_matmul(M, N, K, block=8, alpha=0.5, beta=2.0):
    """`D = alpha * A @ B + beta * C`, the C part added at the end."""

    @T.prim_func
    def scaled_matmul_kernel(A: T.Tensor((M, K)), B: T.Tensor((K, N)), C: T.Tensor((M, N)), D: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block, block), "float32")
            B_shared = T.alloc_shared((block, block), "float32")
            C_shared = T.alloc_shared((block, block), "float32")
            D_local = T.alloc_fragment((block, block), "float32")
            T.copy(C[by * block, bx * block], C_shared)
            T.clear(D_local)
            for ko in T.Pipelined(T.ceildiv(K, block), num_stages=2):
                T.copy(A[by * block, ko * block], A_shared)
                T.copy(B[ko * block, bx * block], B_shared)
                T.gemm(A_shared, B_shared, D_local)
            for i, j in T.Parallel(block, block):
                D_local[i, j] = alpha * D_local[i, j] + beta * C_shared[i, j]
            T.copy(D_local, D[by * block, bx * block])

    return scaled_matmul_kernel


def scaled_matmul_reference(a, b, c):
    return (0.5 * (a.double() @ b.double()) + 2.0 * c.double()).float()


def loaded_bias_matmul(M, N, K, block=8):
    """`C = relu(A @ B + bias)` in float16; the accumulator starts as loads of `bias`, which may lie past its end."""

    @T.prim_func
    def loaded_bias_matmul_kernel(
        A: T.Tensor((M, K)), B: T.Tensor((K, N)), bias: T.Tensor((N,)), C: T.Tensor((M, N), "float16")
    ):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block, block), "float32")
            B_shared = T.alloc_shared((block, block), "float32")
            C_local = T.alloc_fragment((block, block), "float32")
            for i, j in T.Parallel(block, block):
                C_local[i, j] = bias[bx * block + j]
            for ko in T.Pipelined(T.ceildiv(K, block), num_stages=2):
                T.copy(A[by * block, ko * block], A_shared)
                T.copy(B[ko * block, bx * block], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            for i, j in T.Parallel(block, block):
                C_local[i, j] = T.max(C_local[i, j], 0.0)
            T.copy(C_local, C[by * block, bx * block])

    return loaded_bias_matmul_kernel


def loaded_bias_matmul_reference(a, b, bias):
    return F.relu(a.double() @ b.double() + bias.double()).half()


def peeled_row_sum(M, N, block=8):
    """The first block of columns is copied, the others are added to it."""

    @T.prim_func
    def peeled_row_sum_kernel(A: T.Tensor((M, N)), B: T.Tensor((M,))):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            tile = T.alloc_fragment((block, block), "float32")
            total = T.alloc_fragment((block, block), "float32")
            row = T.alloc_fragment((block,), "float32")
            T.copy(A[by * block, 0], total)
            for ko in T.serial(1, T.ceildiv(N, block)):
                T.copy(A[by * block, ko * block], tile)
                for i, j in T.Parallel(block, block):
                    total[i, j] = total[i, j] + tile[i, j]
            T.reduce_sum(total, row, dim=1)
            T.copy(row, B[by * block])

    return peeled_row_sum_kernel


def max_and_sum(M, N, block=8):
    """Two results from one pass: each row's maximum and its sum."""

    @T.prim_func
    def max_and_sum_kernel(A: T.Tensor((M, N)), row_max: T.Tensor((M,)), row_sum: T.Tensor((M,))):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            tile = T.alloc_fragment((block, N), "float32")
            largest = T.alloc_fragment((block,), "float32")
            total = T.alloc_fragment((block,), "float32")
            T.copy(A[by * block, 0], tile)
            T.reduce_max(tile, largest, dim=1)
            T.reduce_sum(tile, total, dim=1)
            T.copy(largest, row_max[by * block])
            T.copy(total, row_sum[by * block])

    return max_and_sum_kernel


def matmul_and_row_sum(M, N, K, block=8):
    """`C = A @ B` and, of the same accumulator, `S[m] = sum_n relu(C[m, n])`: a reduction after another one."""

    @T.prim_func
    def matmul_and_row_sum_kernel(A: T.Tensor((M, K)), B: T.Tensor((K, N)), C: T.Tensor((M, N)), S: T.Tensor((M,))):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            A_shared = T.alloc_shared((block, block), "float32")
            B_shared = T.alloc_shared((block, N), "float32")
            C_local = T.alloc_fragment((block, N), "float32")
            total = T.alloc_fragment((block,), "float32")
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(K, block), num_stages=2):
                T.copy(A[by * block, ko * block], A_shared)
                T.copy(B[ko * block, 0], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C[by * block, 0])
            for i, j in T.Parallel(block, N):
                C_local[i, j] = T.max(C_local[i, j], 0.0)
            T.reduce_sum(C_local, total, dim=1)
            T.copy(total, S[by * block])

    return matmul_and_row_sum_kernel


def matmul_and_row_sum_reference(a, b):
    c = a.double() @ b.double()
    return c.float(), F.relu(c).sum(1).float()


def mean_rows(M, N, block=8):
    """`B[m] = mean_n A[m, n]`, with the number of columns baked in."""

    @T.prim_func
    def mean_rows_kernel(A: T.Tensor((M, N)), B: T.Tensor((M,))):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            tile = T.alloc_fragment((block, block), "float32")
            total = T.alloc_fragment((block,), "float32")
            T.clear(total)
            for ko in T.serial(T.ceildiv(N, block)):
                T.copy(A[by * block, ko * block], tile)
                for i, j in T.Parallel(block, block):
                    tile[i, j] = tile[i, j] * (1.0 / N)
                T.reduce_sum(tile, total, dim=1, clear=False)
            T.copy(total, B[by * block])

    return mean_rows_kernel


def sum_plus_one(M, N, block=8):
    """`B[m] = sum_n (A[m, n] + 1)`: padding that reads as zero would count as one, so it is masked."""

    @T.prim_func
    def sum_plus_one_kernel(A: T.Tensor((M, N)), B: T.Tensor((M,))):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            tile = T.alloc_fragment((block, block), "float32")
            total = T.alloc_fragment((block,), "float32")
            T.clear(total)
            for ko in T.serial(T.ceildiv(N, block)):
                T.copy(A[by * block, ko * block], tile)
                for i, j in T.Parallel(block, block):
                    if ko * block + j < N:
                        tile[i, j] = tile[i, j] + 1.0
                    else:
                        tile[i, j] = 0.0
                T.reduce_sum(tile, total, dim=1, clear=False)
            T.copy(total, B[by * block])

    return sum_plus_one_kernel


def _accumulate_case(suffix, dtype, tolerance):
    def build(**sizes):
        return accumulate_matmul(**sizes, dtype=str(dtype).removeprefix("torch."))

    inputs = tensors(normal("M K", dtype), normal("K N", dtype), normal("M N", dtype))
    name = f"accumulate_matmul{suffix}"
    return KernelCase(name, build, accumulate_matmul_reference, MNK, inputs, ("C",), tolerance, inouts=("C",))


_AB = (normal("M K"), normal("K N"))

ACCUMULATION_CASES = (
    _accumulate_case("", torch.float32, FLOAT32),
    _accumulate_case("_float16", torch.float16, FLOAT16),
    KernelCase(
        "scaled_matmul", scaled_matmul, scaled_matmul_reference, MNK, tensors(*_AB, normal("M N")), ("D",), FLOAT32
    ),
    KernelCase(
        "loaded_bias_matmul",
        loaded_bias_matmul,
        loaded_bias_matmul_reference,
        MNK,
        tensors(*_AB, normal("N")),
        ("C",),
        FLOAT16,
        reads_padding=True,
    ),
    KernelCase(
        "matmul_and_row_sum", matmul_and_row_sum, matmul_and_row_sum_reference, MNK, tensors(*_AB), ("C", "S"), FLOAT32
    ),
    KernelCase("peeled_row_sum", peeled_row_sum, lambda a: a.sum(1), MN, tensors(normal("M N")), ("B",)),
    KernelCase("mean_rows", mean_rows, lambda a: a.mean(1), MN, tensors(normal("M N")), ("B",)),
    KernelCase("sum_plus_one", sum_plus_one, lambda a: (a + 1).sum(1), MN, tensors(normal("M N")), ("B",)),
    KernelCase(
        "max_and_sum", max_and_sum, lambda a: (a.amax(1), a.sum(1)), MN, tensors(normal("M N")), ("row_max", "row_sum")
    ),
)
