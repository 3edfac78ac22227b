"""Kernels that wait for their whole grid, as several."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.tir.grids import grids_of

ROWS, COLUMNS = 8, 12


def two_phases(between=None, after=None):
    """Programs sum parts of rows, wait for all others, and scale every row by the sum of another program's row.
    `between`: what else is around the barrier; `after`: how the second half starts."""

    @T.prim_func
    def kernel(
        A: T.Tensor((ROWS, COLUMNS), "float32"),
        S: T.Tensor((ROWS,), "float32"),
        B: T.Tensor((ROWS, COLUMNS), "float32"),
    ):
        with T.Kernel(ROWS, threads=32) as bx:
            row = T.alloc_fragment((COLUMNS,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(A[bx, 0], row)
            T.reduce_sum(row, total, dim=0)
            S[bx] = total[0]
            if between == "loop":
                for _ in T.serial(1):
                    T.sync_grid()
            else:
                T.sync_grid()
            if after == "kept":
                row[0] = 0.0
            elif after == "partly":
                for j in T.Parallel(COLUMNS - 1):
                    row[j] = A[bx, j]
            elif after == "reads itself":
                for j in T.Parallel(COLUMNS):
                    row[j] = row[j] + A[bx, j]
            elif after == "sometimes":
                if S[bx] > 0:
                    T.copy(A[bx, 0], row)
            else:
                T.copy(A[bx, 0], row)
            if after == "another barrier":
                T.sync_grid()
                T.copy(A[bx, 0], row)
            for j in T.Parallel(COLUMNS):
                B[bx, j] = row[j] * S[ROWS - 1 - bx]

    return kernel


def expected(a):
    return a * a.sum(1).flip(0)[:, None]


@pytest.mark.parametrize(
    ("after", "count"),
    [
        (None, 2),
        ("another barrier", 3),
        ("kept", 1),
        ("partly", 1),
        ("reads itself", 1),
        ("sometimes", 1),
    ],
)
def test_a_kernel_is_taken_apart_where_its_programs_keep_nothing(after, count):
    assert len(grids_of(two_phases(after=after)).funcs) == count


def test_a_barrier_in_a_loop_stays():
    func = two_phases(between="loop")
    assert len(grids_of(func).funcs) == 1
    with pytest.raises(MeshTensorError, match="sync_grid"):
        mt.compile(mt.annotate(func, mt.Mesh({"x": 2}), {}), target="interpret")(
            torch.randn(ROWS, COLUMNS), torch.zeros(ROWS)
        )


@pytest.mark.parametrize("target", ["interpret", "c"])
@pytest.mark.parametrize("after", [None, "another barrier"])
@pytest.mark.parametrize("layouts", [{}, {"A": {"x": 0}, "B": {"x": 0}}, {"A": {"x": 1}, "B": {"x": 1}}], ids=str)
def test_every_program_sees_what_others_wrote(layouts, after, target):
    """Program 0 reads what the last one leaves: one after the other, they would not have it yet."""
    annotated = mt.annotate(two_phases(after=after), mt.Mesh({"x": 2}), layouts)
    kernel = mt.compile(annotated, target=target, poison=target == "interpret")
    a = torch.randn(ROWS, COLUMNS)
    sums, b = kernel(a)
    torch.testing.assert_close(sums, a.sum(1))
    torch.testing.assert_close(b, expected(a))


def test_what_is_bound_before_is_bound_again():
    @T.prim_func
    def kernel(A: T.Tensor((ROWS,), "float32"), S: T.Tensor((ROWS,), "float32"), B: T.Tensor((ROWS,), "float32")):
        with T.Kernel(ROWS, threads=32) as bx:
            T.sync_grid()
            other = ROWS - 1 - bx
            T.sync_grid()
            S[other] = A[other] * 2.0
            T.sync_grid()
            B[bx] = S[other] + 1.0

    assert len(grids_of(kernel).funcs) == 2
    a = torch.randn(ROWS)
    sums, b = mt.compile(mt.annotate(kernel, mt.Mesh({"x": 2}), {}), target="interpret")(a, torch.zeros(ROWS))
    torch.testing.assert_close(sums, 2 * a)
    torch.testing.assert_close(b, (2 * a + 1).flip(0))


def test_what_is_loaded_before_keeps_a_kernel_whole():
    """By then it may be something else."""

    @T.prim_func
    def kernel(A: T.Tensor((ROWS,), "float32"), S: T.Tensor((ROWS,), "float32")):
        with T.Kernel(ROWS, threads=32) as bx:
            mine = A[bx]
            A[bx] = 0.0
            T.sync_grid()
            S[bx] = mine + A[ROWS - 1 - bx]

    assert len(grids_of(kernel).funcs) == 1


def test_a_program_that_may_end_early_keeps_a_kernel_whole():
    @T.prim_func
    def kernel(A: T.Tensor((ROWS,), "float32"), S: T.Tensor((ROWS,), "float32")):
        with T.Kernel(ROWS, threads=32) as bx:
            if bx == 0:
                T.thread_return()
            S[bx] = A[bx]
            T.sync_grid()
            A[bx] = S[ROWS - 1 - bx]

    assert len(grids_of(kernel).funcs) == 1
