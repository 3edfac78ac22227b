"""Loop-carried values that are no plain reduction, and values that depend on where block borders lie."""

import tilelang.language as T
import torch

from kernels.catalogue.case import FLOAT32, KernelCase, normal, tensors
from kernels.catalogue.sizes import MN, MNK
from kernels.matmul import matmul_reference


def cumulative_sum(M, N, block=8):
    """`B[m, n] = sum of A[m, :n + 1]` with TileLang's own scan; a block holds whole rows."""

    @T.prim_func
    def cumulative_sum_kernel(A: T.Tensor((M, N)), B: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            A_shared = T.alloc_shared((block, N), "float32")
            T.copy(A[by * block, 0], A_shared)
            T.cumsum(A_shared, dim=1)
            T.copy(A_shared, B[by * block, 0])

    return cumulative_sum_kernel


def carried_cumulative_sum(M, N, block=8):
    """The same over column blocks, with a carry from each to the next."""

    @T.prim_func
    def carried_cumulative_sum_kernel(A: T.Tensor((M, N)), B: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            tile = T.alloc_shared((block, block), "float32")
            carry = T.alloc_fragment((block,), "float32")
            T.clear(carry)
            for ko in T.serial(T.ceildiv(N, block)):
                T.copy(A[by * block, ko * block], tile)
                for j in T.serial(block):
                    for i in T.Parallel(block):
                        carry[i] += tile[i, j]
                        tile[i, j] = carry[i]
                T.copy(tile, B[by * block, ko * block])

    return carried_cumulative_sum_kernel


def clipped_running_sum(M, N, block=8):
    """`s = max(s + A[m, n], 0)` along each row: the steps do not commute."""

    @T.prim_func
    def clipped_running_sum_kernel(A: T.Tensor((M, N)), B: T.Tensor((M,))):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            A_shared = T.alloc_shared((block, N), "float32")
            state = T.alloc_fragment((block,), "float32")
            T.copy(A[by * block, 0], A_shared)
            T.clear(state)
            for j in T.serial(N):
                for i in T.Parallel(block):
                    state[i] = T.max(state[i] + A_shared[i, j], 0.0)
            T.copy(state, B[by * block])

    return clipped_running_sum_kernel


def clipped_running_sum_reference(a):
    state = torch.zeros(a.shape[0], dtype=torch.float64)
    for column in a.double().unbind(1):
        state = (state + column).clamp_min(0)
    return state.float()


def decayed_sum(M, N, block=8):
    """`s = 0.5 * s + A[m, n]` along each row: a linear recurrence."""

    @T.prim_func
    def decayed_sum_kernel(A: T.Tensor((M, N)), B: T.Tensor((M,))):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            A_shared = T.alloc_shared((block, block), "float32")
            state = T.alloc_fragment((block,), "float32")
            T.clear(state)
            for ko in T.serial(T.ceildiv(N, block)):
                T.copy(A[by * block, ko * block], A_shared)
                for j in T.serial(block):
                    for i in T.Parallel(block):
                        if ko * block + j < N:
                            state[i] = 0.5 * state[i] + A_shared[i, j]
            T.copy(state, B[by * block])

    return decayed_sum_kernel


def decayed_sum_reference(a):
    powers = 0.5 ** torch.arange(a.shape[1] - 1, -1, -1, dtype=torch.float64)
    return (a.double() @ powers).float()


def largest_block_sum(M, N, block=8):
    """The largest sum of any block of 8 columns: where blocks begin is part of the result."""

    @T.prim_func
    def largest_block_sum_kernel(A: T.Tensor((M, N)), B: T.Tensor((M,))):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            tile = T.alloc_fragment((block, block), "float32")
            total = T.alloc_fragment((block,), "float32")
            largest = T.alloc_fragment((block,), "float32")
            T.fill(largest, -T.infinity("float32"))
            for ko in T.serial(T.ceildiv(N, block)):
                T.copy(A[by * block, ko * block], tile)
                T.reduce_sum(tile, total, dim=1)
                for i in T.Parallel(block):
                    largest[i] = T.max(largest[i], total[i])
            T.copy(largest, B[by * block])

    return largest_block_sum_kernel


def largest_block_sum_reference(a, block=8):
    return torch.stack([part.double().sum(1) for part in a.split(block, 1)]).amax(0).float()


def sum_and_block_count(M, N, block=8):
    """`B[m] = sum_n A[m, n] + the number of column blocks`: every step adds one more than its data."""

    @T.prim_func
    def sum_and_block_count_kernel(A: T.Tensor((M, N)), B: T.Tensor((M,))):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            tile = T.alloc_fragment((block, block), "float32")
            total = T.alloc_fragment((block,), "float32")
            T.clear(total)
            for ko in T.serial(T.ceildiv(N, block)):
                T.copy(A[by * block, ko * block], tile)
                T.reduce_sum(tile, total, dim=1, clear=False)
                for i in T.Parallel(block):
                    total[i] = total[i] + 1.0
            T.copy(total, B[by * block])

    return sum_and_block_count_kernel


def sum_and_block_count_reference(a, block=8):
    return a.sum(1) + -(-a.shape[1] // block)


def normalised_blocks(M, N, block=8):
    """Every block of 8 x 8 elements is divided by its own largest absolute value (quantisation's scales)."""

    @T.prim_func
    def normalised_blocks_kernel(A: T.Tensor((M, N)), B: T.Tensor((M, N)), scales: T.Tensor((M, T.ceildiv(N, block)))):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            tile = T.alloc_fragment((block, block), "float32")
            largest = T.alloc_fragment((block,), "float32")
            T.copy(A[by * block, bx * block], tile)
            T.reduce_absmax(tile, largest, dim=1)
            for i, j in T.Parallel(block, block):
                tile[i, j] = tile[i, j] / T.max(largest[i], 1e-6)
            T.copy(tile, B[by * block, bx * block])
            for i in T.Parallel(block):
                if by * block + i < M:
                    scales[by * block + i, bx] = largest[i]

    return normalised_blocks_kernel


def normalised_blocks_reference(a, block=8):
    parts = a.split(block, 1)
    scales = torch.stack([part.abs().amax(1) for part in parts], 1)
    return torch.cat([part / scale[:, None] for part, scale in zip(parts, scales.unbind(1), strict=True)], 1), scales


def triangular_matmul(M, N, K, block=8):
    """`C = tril(A) @ B`, whose loop over K ends at the diagonal of the program's rows."""
    steps = -(-K // block)

    @T.prim_func
    def triangular_matmul_kernel(A: T.Tensor((M, K)), B: T.Tensor((K, N)), C: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block, block), "float32")
            B_shared = T.alloc_shared((block, block), "float32")
            C_local = T.alloc_fragment((block, block), "float32")
            T.clear(C_local)
            for ko in T.serial(T.min(by + 1, steps)):
                T.copy(A[by * block, ko * block], A_shared)
                T.copy(B[ko * block, bx * block], B_shared)
                for i, k in T.Parallel(block, block):
                    A_shared[i, k] = T.if_then_else(by * block + i >= ko * block + k, A_shared[i, k], 0.0)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C[by * block, bx * block])

    return triangular_matmul_kernel


def read_back(M, N, block=8):
    """B is written, then read again by the same program, and its row sums go to C."""

    @T.prim_func
    def read_back_kernel(A: T.Tensor((M, N)), B: T.Tensor((M, N)), C: T.Tensor((M,))):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            tile = T.alloc_fragment((block, N), "float32")
            total = T.alloc_fragment((block,), "float32")
            T.copy(A[by * block, 0], tile)
            for i, j in T.Parallel(block, N):
                tile[i, j] = tile[i, j] * tile[i, j]
            T.copy(tile, B[by * block, 0])
            T.copy(B[by * block, 0], tile)
            T.reduce_sum(tile, total, dim=1)
            T.copy(total, C[by * block])

    return read_back_kernel


def _rows_case(kernel, reference, outputs=("B",), tolerance=FLOAT32):
    return KernelCase(kernel.__name__, kernel, reference, MN, tensors(normal("M N")), outputs, tolerance)


ORDER_CASES = (
    _rows_case(cumulative_sum, lambda a: a.cumsum(1)),
    _rows_case(carried_cumulative_sum, lambda a: a.cumsum(1)),
    _rows_case(clipped_running_sum, clipped_running_sum_reference),
    _rows_case(decayed_sum, decayed_sum_reference),
    _rows_case(largest_block_sum, largest_block_sum_reference),
    _rows_case(sum_and_block_count, sum_and_block_count_reference),
    _rows_case(normalised_blocks, normalised_blocks_reference, ("B", "scales")),
    _rows_case(read_back, lambda a: (a * a, (a * a).sum(1)), ("B", "C")),
    KernelCase(
        "triangular_matmul",
        triangular_matmul,
        lambda a, b: matmul_reference(a.tril(), b),
        MNK,
        tensors(normal("M K"), normal("K N")),
        ("C",),
    ),
)
