"""Bounds tests that always hold are left out; rows longer than what is walked, to spare banks of memory, are as long as
that."""

import pytest
import tilelang.language as T
import torch
from tvm import ir, tirx

import mesh_tensor as mt
from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.plain_statements import without_idle_guards


def scaled(M, N=24, block=4, *, test=lambda i, j, M, N: i < M):
    """B = 2 * A under a test of positions; where it fails, B stays."""

    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(M, block), threads=32) as bx:
            for i, j in T.Parallel(block, N):
                if test(bx * block + i, j, M, N):
                    B[bx * block + i, j] = A[bx * block + i, j] * 2.0

    return kernel


def guards(func):
    return [guard.condition for guard in nodes(without_idle_guards(func).body, tirx.IfThenElse)]


def test_a_test_that_always_holds_goes():
    assert guards(scaled(16)) == []
    assert guards(scaled(16, test=lambda i, j, M, N: T.And(i < M, j < N))) == []


def test_a_test_that_may_fail_stays():
    func = scaled(14)
    assert without_idle_guards(func).same_as(func)


def test_what_may_fail_of_a_test_stays():
    (left,) = guards(scaled(16, test=lambda i, j, M, N: T.And(i < M, j < 20)))
    assert isinstance(left, tirx.LT)
    assert int(left.b) == 20


def test_a_test_of_data_stays():
    @T.prim_func
    def positive(A: T.Tensor((16,), "float32"), B: T.Tensor((16,), "float32")):
        with T.Kernel(16, threads=32) as bx:
            if A[bx] > 0.0:
                B[bx] = A[bx]

    ir.assert_structural_equal(without_idle_guards(positive), positive)


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}, {"x": 5}])
@pytest.mark.parametrize("M", [16, 14])
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_under_tests_are_right(mesh, M, dim):
    func = mt.annotate(scaled(M), mesh, {"A": {"x": dim}, "B": {"x": dim}})
    a = torch.randn(M, 24)
    torch.testing.assert_close(mt.compile(func, target="interpret", poison=True)(a, torch.zeros(M, 24)), 2 * a)


def staged_sums(M, N, *, spare, block_M=4, block_N=8):
    """Running sums of rows, by blocks of columns that are staged in rows which are `spare` longer."""

    @T.prim_func
    def kernel(X: T.Tensor((M, N), "float32"), Y: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(M, block_M), threads=32) as bx:
            staged = T.alloc_shared((block_M, block_N + spare), "float32")
            sums = T.alloc_fragment((block_M, block_N), "float32")
            total = T.alloc_fragment((block_M,), "float32")
            T.clear(total)
            for k in T.serial(N // block_N):
                for i, j in T.Parallel(block_M, block_N):
                    if bx * block_M + i < M:
                        staged[i, j] = X[bx * block_M + i, k * block_N + j]
                for i in T.Parallel(block_M):
                    for j in T.serial(block_N):
                        total[i] = total[i] + staged[i, j]
                        sums[i, j] = total[i]
                for i, j in T.Parallel(block_M, block_N):
                    if bx * block_M + i < M:
                        Y[bx * block_M + i, k * block_N + j] = sums[i, j]

    return kernel


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_longer_rows_are_no_state_of_a_loop(spare, devices):
    layouts = {"X": {"x": 1}, "Y": {"x": 1}}
    large = mt.annotate(staged_sums(1024, 8192, spare=spare, block_N=128), {"x": 4}, layouts)
    assert sum(step.bytes for step in mt.compile(large, target="interpret").program.steps) <= 3 * 1024 * 4
    func = mt.annotate(staged_sums(16, 48, spare=spare), {"x": devices}, layouts)
    x = torch.randn(16, 48)
    torch.testing.assert_close(mt.compile(func, target="interpret", poison=True)(x), x.cumsum(1), rtol=1e-4, atol=1e-4)
