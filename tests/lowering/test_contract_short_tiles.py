"""Kernels that were once lowered to wrong results where tiles are short: right, or refused."""

import tilelang.language as T
import torch

from .every_layout import accepted, check


def test_tiles_are_whole_blocks_at_every_level_of_a_split():
    @T.prim_func
    def kernel(A: T.Tensor((10,)), C: T.Tensor((10,))):
        with T.Kernel(T.ceildiv(10, 3), threads=32) as bx:
            for i in T.Parallel(3):
                C[bx * 3 + i] = A[bx * 3 + i] + T.cast(bx, "float32")

    a = torch.randn(10)
    check(kernel, [a], a + torch.arange(10) // 3)


def test_tiles_added_as_they_lie_do_not_add_their_padding():
    @T.prim_func
    def kernel(A: T.Tensor((7, 8)), C: T.Tensor((8,))):
        with T.Kernel(7, threads=32) as bx:
            T.atomic_add(C[0:8], A[bx, 0:8])

    a = torch.randn(7, 8)
    check(kernel, [a], a.sum(0))


def test_what_lies_past_the_end_survives_a_cut():
    @T.prim_func
    def kernel(A: T.Tensor((4, 6)), W: T.Tensor((6, 5)), B: T.Tensor((5,)), C: T.Tensor((4,))):
        with T.Kernel(1, threads=32):
            bias = T.alloc_fragment((8,), "float32")
            A_shared = T.alloc_shared((4, 2), "float32")
            W_shared = T.alloc_shared((2, 8), "float32")
            scores = T.alloc_fragment((4, 8), "float32")
            largest = T.alloc_fragment((4,), "float32")
            for j in T.Parallel(8):
                bias[j] = T.if_then_else(j < 5, B[j] - 100.0, -1e30)
            T.clear(scores)
            for ko in T.serial(3):
                T.copy(A[0, ko * 2], A_shared)
                T.copy(W[ko * 2, 0], W_shared)
                T.gemm(A_shared, W_shared, scores)
            for i, j in T.Parallel(4, 8):
                scores[i, j] = T.min(scores[i, j] + bias[j], 0.0)
            T.reduce_max(scores, largest, dim=1)
            T.copy(largest, C)

    a, w, b = torch.randn(4, 6), torch.randn(6, 5), torch.randn(5)
    check(kernel, [a, w, b], (a @ w + b - 100).clamp_max(0).amax(1))


def test_an_index_into_a_whole_dim_stays_inside_where_the_tile_is_short():
    @T.prim_func
    def kernel(A: T.Tensor((8, 8)), C: T.Tensor((8, 8)), D: T.Tensor((8, 8))):
        with T.Kernel(1, threads=32):
            for i in T.serial(8):
                for j in T.Parallel(8):
                    C[i, j] = A[i, j]
                for j in T.Parallel(8):
                    D[i, j] = A[j, i]

    a = torch.randn(8, 8)
    check(kernel, [a], (a, a.mT))


def test_zero_times_infinity_past_a_tile_does_not_count():
    @T.prim_func
    def kernel(A: T.Tensor((12,)), B: T.Tensor((12,)), C: T.Tensor((1,))):
        with T.Kernel(1, threads=32):
            a = T.alloc_fragment((4,), "float32")
            b = T.alloc_fragment((4,), "float32")
            ratio = T.alloc_fragment((4,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.clear(total)
            for ko in T.serial(3):
                T.copy(A[ko * 4], a)
                T.copy(B[ko * 4], b)
                for i in T.Parallel(4):
                    ratio[i] = a[i] * (1.0 / b[i])
                T.reduce_sum(ratio, total, dim=0, clear=False)
            T.copy(total, C)

    a, b = torch.randn(12), torch.randn(12).abs() + 1
    check(kernel, [a, b], (a / b).sum().reshape(1))


def test_an_overflow_past_the_end_is_no_error():
    @T.prim_func
    def kernel(A: T.Tensor((10,)), C: T.Tensor((1,))):
        with T.Kernel(1, threads=32):
            a = T.alloc_fragment((4,), "float32")
            powers = T.alloc_fragment((4,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.clear(total)
            for ko in T.serial(3):
                for i in T.Parallel(4):
                    a[i] = T.if_then_else(ko * 4 + i < 10, A[ko * 4 + i], 1000.0)
                for i in T.Parallel(4):
                    powers[i] = T.if_then_else(ko * 4 + i < 10, T.exp(a[i]), 0.0 * T.exp(-T.exp(a[i])))
                T.reduce_sum(powers, total, dim=0, clear=False)
            T.copy(total, C)

    a = torch.randn(10)
    check(kernel, [a], a.exp().sum().reshape(1))


def test_loops_whose_length_depends_on_a_short_tile_stay_inside():
    @T.prim_func
    def kernel(A: T.Tensor((8, 8)), C: T.Tensor((8,))):
        with T.Kernel(4, threads=32) as by:
            total = T.alloc_fragment((2,), "float32")
            T.clear(total)
            for k in T.serial((by + 1) * 2):
                for i in T.Parallel(2):
                    if k <= by * 2 + i:
                        total[i] += A[by * 2 + i, k]
            T.copy(total, C[by * 2])

    a = torch.randn(8, 8)
    check(kernel, [a], a.tril().sum(1))


def test_updates_past_the_end_that_change_nothing_do_not_keep_a_dim_whole():
    @T.prim_func
    def kernel(A: T.Tensor((5, 7)), C: T.Tensor((5,)), S: T.Tensor((1,))):
        with T.Kernel(3, threads=32) as by:
            tile = T.alloc_fragment((2, 2), "float32")
            total = T.alloc_fragment((2,), "float32")
            T.clear(total)
            for k in T.serial(4):
                T.copy(A[by * 2, k * 2], tile)
                for i, j in T.Parallel(2, 2):
                    tile[i, j] = tile[i, j] * T.cast(k + by, "float32")
                T.reduce_sum(tile, total, dim=1, clear=False)
            T.copy(total, C[by * 2])
            for i in T.serial(2):
                if by * 2 + i < 5:
                    T.atomic_add(S[0], total[i])

    a = torch.randn(5, 7)
    total = (a * (torch.arange(7) // 2 + torch.arange(5)[:, None] // 2)).sum(1)
    check(kernel, [a], (total, total.sum().reshape(1)))
    assert accepted(kernel, {"x": 2}, {"A": {"x": 0}}) == {"m": "sum", "k": "sum", "l": "parallel"}
