"""A condition around all that a program does: what its loop reduces is completed before it is used under it."""

import pytest
import tilelang.language as T
import torch

from tests.other_machines import machine

from .every_layout import check
from .support import lowered, outline, run

GROUPS, ROWS, N, K, BLOCK = 3, 12, 10, 14, 4
K_SPLIT = {"A": {"x": 2}, "B": {"x": 1}}


def grouped(otherwise, asks="rows"):
    """`C[g] = relu(A[g] @ B[g]) * scale[g]` of the blocks of rows that a group has; the others are 0, or stay."""

    @T.prim_func
    def grouped_kernel(
        A: T.Tensor((GROUPS, ROWS, K), "float32"),
        B: T.Tensor((GROUPS, K, N), "float32"),
        scale: T.Tensor((GROUPS,), "float32"),
        rows: T.Tensor((GROUPS,), "int32"),
        C: T.Tensor((GROUPS, ROWS, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(N, BLOCK), T.ceildiv(ROWS, BLOCK), GROUPS, threads=32) as (bx, by, bz):
            a = T.alloc_shared((BLOCK, BLOCK), "float32")
            b = T.alloc_shared((BLOCK, BLOCK), "float32")
            acc = T.alloc_fragment((BLOCK, BLOCK), "float32")
            last = T.alloc_var("int32")
            factor = scale[bz]
            last = rows[bz]
            if by * BLOCK < (rows[bz] if asks == "rows" else last):
                if asks == "changes":
                    last = 0
                T.clear(acc)
                for k in T.Pipelined(T.ceildiv(K, BLOCK), num_stages=2):
                    T.copy(A[bz, by * BLOCK, k * BLOCK], a)
                    T.copy(B[bz, k * BLOCK, bx * BLOCK], b)
                    T.gemm(a, b, acc)
                for i, j in T.Parallel(BLOCK, BLOCK):
                    if bx * BLOCK + j < N:
                        C[bz, by * BLOCK + i, bx * BLOCK + j] = T.max(acc[i, j], 0) * factor + last
            elif otherwise:
                for i, j in T.Parallel(BLOCK, BLOCK):
                    if bx * BLOCK + j < N:
                        C[bz, by * BLOCK + i, bx * BLOCK + j] = -1

    return grouped_kernel


def made():
    rows = torch.tensor([5, 0, 12], dtype=torch.int32)
    a, b, scale = torch.randn(GROUPS, ROWS, K), torch.randn(GROUPS, K, N), torch.randn(GROUPS)
    blocks = torch.arange(ROWS)[None] // BLOCK * BLOCK < rows[:, None]
    return [a, b, scale, rows], (a @ b).relu() * scale[:, None, None], blocks[..., None]


@pytest.mark.parametrize("asks", ["rows", "variable"])
def test_what_is_reduced_under_a_condition(asks):
    inputs, product, is_there = made()
    func, expected = grouped(True, asks), torch.where(is_there, product + inputs[3][:, None, None], -1.0)
    steps = outline(lowered(func, {"x": 2}, K_SPLIT, strict=True))
    assert len(steps) == 3, "the sums are completed once"
    assert "all_reduce" in steps[1]
    torch.testing.assert_close(run(func, {"x": 2}, K_SPLIT, *inputs), expected, rtol=1e-5, atol=1e-5)


def test_in_every_layout():
    inputs, product, is_there = made()
    with machine(1):
        check(grouped(True), inputs, torch.where(is_there, product + inputs[3][:, None, None], -1.0), [{"x": 3}])


def test_without_another_branch():
    inputs, product, is_there = made()
    found = run(grouped(False), {"x": 2}, K_SPLIT, *inputs)
    expected = product + inputs[3][:, None, None]
    torch.testing.assert_close(
        found[is_there.expand_as(found)], expected[is_there.expand_as(found)], rtol=1e-5, atol=1e-5
    )


def test_a_condition_that_changes_on_the_way():
    inputs, product, is_there = made()
    found = run(grouped(True, "changes"), {"x": 2}, K_SPLIT, *inputs)
    torch.testing.assert_close(found, torch.where(is_there, product, -1.0), rtol=1e-5, atol=1e-5)
