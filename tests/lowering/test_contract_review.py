"""Kernels that were once lowered to wrong results, each for a reason of its own: right, or refused."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt

from .every_layout import accepted, check


def test_a_buffer_that_only_one_iteration_fills_is_carried():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), B: T.Tensor((8, 4)), C: T.Tensor((8, 4))):
        with T.Kernel(1, threads=32):
            row = T.alloc_fragment((4,), "float32")
            for o in T.serial(8):
                for _ in T.serial(2):
                    if o == 0:
                        for i in T.Parallel(4):
                            row[i] = B[0, i]
                for i in T.Parallel(4):
                    C[o, i] = row[i] + A[o]

    a, b = torch.randn(8), torch.randn(8, 4)
    check(kernel, [a, b], b[0] + a[:, None])


def test_a_condition_on_a_bound_value_overwrites_a_part():
    @T.prim_func
    def kernel(A: T.Tensor((8, 4)), C: T.Tensor((8, 4))):
        with T.Kernel(1, threads=32):
            last = T.alloc_fragment((4,), "float32")
            T.clear(last)
            for o in T.serial(8):
                for i in T.Parallel(4):
                    v = A[o, i]
                    if v > 0.0:
                        last[i] = v
                for i in T.Parallel(4):
                    C[o, i] = last[i]

    a = torch.randn(8, 4)
    expected, last = torch.empty(8, 4), torch.zeros(4)
    for o in range(8):
        last = torch.where(a[o] > 0, a[o], last)
        expected[o] = last
    check(kernel, [a], expected)


def test_a_bound_value_outlives_the_buffer_it_came_from():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), C: T.Tensor((1,))):
        with T.Kernel(1, threads=32):
            s = T.alloc_fragment((1,), "float32")
            t = T.alloc_fragment((1,), "float32")
            for o in T.serial(8):
                s[0] = A[o]
                v = s[0]
                s[0] = 0.0
                t[0] = v
            C[0] = t[0]

    a = torch.randn(8)
    check(kernel, [a], a[-1:])


def test_an_accumulator_cleared_in_every_block_keeps_the_last_one():
    @T.prim_func
    def kernel(A: T.Tensor((8, 16)), B: T.Tensor((16, 8)), C: T.Tensor((8, 8))):
        with T.Kernel(1, threads=32):
            A_shared = T.alloc_shared((8, 4), "float32")
            B_shared = T.alloc_shared((4, 8), "float32")
            C_local = T.alloc_fragment((8, 8), "float32")
            for ko in T.serial(4):
                T.copy(A[0, ko * 4], A_shared)
                T.copy(B[ko * 4, 0], B_shared)
                T.gemm(A_shared, B_shared, C_local, clear_accum=True)
            T.copy(C_local, C)

    a, b = torch.randn(8, 16), torch.randn(16, 8)
    check(kernel, [a, b], a[:, 12:] @ b[12:])


def test_a_reduction_started_anew_in_every_block_keeps_the_last_one():
    @T.prim_func
    def kernel(A: T.Tensor((8, 16)), C: T.Tensor((8,))):
        with T.Kernel(1, threads=32):
            tile = T.alloc_fragment((8, 4), "float32")
            total = T.alloc_fragment((8,), "float32")
            for ko in T.serial(4):
                T.copy(A[0, ko * 4], tile)
                T.reduce_sum(tile, total, dim=1)
            T.copy(total, C)

    a = torch.randn(8, 16)
    check(kernel, [a], a[:, 12:].sum(1))


def test_one_block_that_starts_its_accumulator_anew_is_split():
    @T.prim_func
    def kernel(A: T.Tensor((8, 16)), C: T.Tensor((8,))):
        with T.Kernel(1, threads=32):
            tile = T.alloc_fragment((8, 16), "float32")
            total = T.alloc_fragment((8,), "float32")
            for ko in T.serial(1):
                T.copy(A[0, ko * 16], tile)
                T.reduce_sum(tile, total, dim=1)
            T.copy(total, C)

    a = torch.randn(8, 16)
    check(kernel, [a], a.sum(1))
    assert accepted(kernel, {"x": 2}, {"A": {"x": 1}}) == {"m": "parallel", "k": "sum"}


@pytest.mark.parametrize("dependent", [False, True])
def test_a_sum_repeated_by_another_loop_over_the_same_dim(dependent):
    @T.prim_func
    def kernel(A: T.Tensor((8,)), B: T.Tensor((8,)), C: T.Tensor((1,))):
        with T.Kernel(1, threads=32):
            total = T.alloc_fragment((1,), "float32")
            here = T.alloc_fragment((1,), "float32")
            T.clear(total)
            for o in T.serial(8):
                B[o] = A[o] * 2.0
                here[0] = A[o] if dependent else 1.0
                for k in T.serial(8):
                    total[0] += A[k] * here[0]
            T.copy(total, C)

    a = torch.randn(8)
    total = a.sum() * (a.sum() if dependent else 8.0)
    check(kernel, [a], (a * 2, total.reshape(1)))


def test_a_maximum_repeated_by_another_loop_over_the_same_dim():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), B: T.Tensor((8,)), C: T.Tensor((1,))):
        with T.Kernel(1, threads=32):
            largest = T.alloc_fragment((1,), "float32")
            here = T.alloc_fragment((1,), "float32")
            T.fill(largest, -T.infinity("float32"))
            for o in T.serial(8):
                here[0] = A[o]
                B[o] = here[0]
                for k in T.serial(8):
                    largest[0] = T.max(largest[0], A[k] * here[0])
            T.copy(largest, C)

    a = torch.randn(8)
    check(kernel, [a], (a, torch.outer(a, a).max().reshape(1)))


def test_a_total_broadcast_over_the_dim_it_sums():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), D: T.Tensor((8,))):
        with T.Kernel(1, threads=32):
            values = T.alloc_fragment((8,), "float32")
            total = T.alloc_fragment((1,), "float32")
            everywhere = T.alloc_fragment((8,), "float32")
            T.copy(A, values)
            T.reduce_sum(values, total, dim=0)
            for k in T.Parallel(8):
                everywhere[k] = total[0]
            for k in T.Parallel(8):
                values[k] = values[k] - everywhere[k]
            T.copy(values, D)

    a = torch.randn(8)
    check(kernel, [a], a - a.sum())


@pytest.mark.parametrize("axis", ["data parallel", "for", "2d", "x-y", "µ", "int"])
def test_axes_may_have_any_name(axis):
    @T.prim_func
    def kernel(A: T.Tensor((6, 7)), C: T.Tensor((6,))):
        with T.Kernel(6, threads=32) as bx:
            C[bx] = T.cast(bx, "float32")
            for j in T.serial(7):
                C[bx] += A[bx, j]

    a = torch.randn(6, 7)
    func = mt.annotate(kernel, mt.Mesh({axis: 2}), {"A": {axis: 0}, "C": {axis: 0}})
    assert mt.lower(func).script()
    result = mt.compile(func, target="c")(a, torch.zeros(6))
    torch.testing.assert_close(result, a.sum(1) + torch.arange(6))
