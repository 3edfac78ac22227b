"""Reductions that leave their programs through atomics, into tensors that hold something already."""

import tilelang.language as T
import torch

from kernels.catalogue.case import EXACT, FLOAT32, KernelCase, integers, normal, tensors
from kernels.catalogue.sizes import MN


def atomic_row_sum(M, N, block=8):
    """`B[m] += sum_n A[m, n]`: one program per block, which adds its part with an element's atomic."""

    @T.prim_func
    def atomic_row_sum_kernel(A: T.Tensor((M, N)), B: T.Tensor((M,))):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            tile = T.alloc_fragment((block, block), "float32")
            total = T.alloc_fragment((block,), "float32")
            T.copy(A[by * block, bx * block], tile)
            T.reduce_sum(tile, total, dim=1)
            for i in T.Parallel(block):
                if by * block + i < M:
                    T.atomic_add(B[by * block + i], total[i])

    return atomic_row_sum_kernel


def atomic_column_max(M, N, block=8):
    """`B[n] = max(B[n], max_m A[m, n])` with an element's atomic."""

    @T.prim_func
    def atomic_column_max_kernel(A: T.Tensor((M, N)), B: T.Tensor((N,))):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            for i, j in T.Parallel(block, block):
                if by * block + i < M and bx * block + j < N:
                    T.atomic_max(B[bx * block + j], A[by * block + i, bx * block + j])

    return atomic_column_max_kernel


def atomic_total(M, N, block=8):
    """`B[0] += sum A`: everything goes to one element."""

    @T.prim_func
    def atomic_total_kernel(A: T.Tensor((M, N)), B: T.Tensor((1,))):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            tile = T.alloc_fragment((block, block), "float32")
            rows = T.alloc_fragment((block,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(A[by * block, bx * block], tile)
            T.reduce_sum(tile, rows, dim=1)
            T.reduce_sum(rows, total, dim=0)
            T.atomic_add(B[0], total[0])

    return atomic_total_kernel


def atomic_twice(M, N, block=8):
    """`B += 2 * A`, because two programs add every block."""

    @T.prim_func
    def atomic_twice_kernel(A: T.Tensor((M, N), "int32"), B: T.Tensor((M, N), "int32")):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), 2, threads=128) as (bx, by, _):
            tile = T.alloc_fragment((block, block), "int32")
            T.copy(A[by * block, bx * block], tile)
            T.atomic_add(B[by * block, bx * block], tile)

    return atomic_twice_kernel


def _inout_case(kernel, reference, output, tolerance=FLOAT32):
    inputs = tensors(normal("M N"), normal(output))
    return KernelCase(kernel.__name__, kernel, reference, MN, inputs, ("B",), tolerance, inouts=("B",))


ATOMIC_CASES = (
    _inout_case(atomic_row_sum, lambda a, b: b + a.sum(1), "M"),
    _inout_case(atomic_column_max, lambda a, b: torch.maximum(b, a.amax(0)), "N", EXACT),
    _inout_case(atomic_total, lambda a, b: (b.double() + a.double().sum()).float(), "1"),
    KernelCase(
        "atomic_twice",
        atomic_twice,
        lambda a, b: b + 2 * a,
        MN,
        tensors(integers("M N", -100, 100), integers("M N", -100, 100)),
        ("B",),
        EXACT,
        inouts=("B",),
    ),
)
