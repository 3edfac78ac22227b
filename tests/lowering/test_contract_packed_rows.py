"""Rows at places that data names: read, and written, on the device that has them."""

import pytest
import tilelang.language as T
import torch

from kernels.rope import packed_rope
from tests.other_machines import machine

from .every_layout import check
from .support import lowered, outline, run

ROWS, DIM = 7, 5
ROWS_OF = torch.tensor([0, 5, 5, -1, 7, 6, 99, 2]).int()  # row 5 twice, and three that there are not


def written(body, rows=ROWS):
    """What `body` makes of the row of A that a table names for a program; Out is written there, too."""

    @T.prim_func
    def kernel(
        A: T.Tensor((rows, DIM), "float32"),
        table: T.Tensor((8,), "int32"),
        Out: T.Tensor((rows, DIM), "float32"),
    ):
        with T.Kernel(8, threads=32) as bx:
            row = T.alloc_shared((DIM,), "float32")
            T.copy(A[table[bx], 0], row)
            body(A, table, Out, row, bx)

    return kernel


@T.macro
def copied(A, table, Out, row, bx):
    for j in T.Parallel(DIM):
        row[j] = row[j] * 2 + bx
    T.copy(row, Out[table[bx], 0])


@T.macro
def stored(A, table, Out, row, bx):
    for j in T.Parallel(DIM):
        Out[table[bx], j] = row[j] * 2 + bx


@T.macro
def added(A, table, Out, row, bx):
    for j in T.Parallel(DIM):
        Out[table[bx], j] += row[j] * 2 + bx


def expected(a, adds=False):
    """Program by program, as the kernel says it."""
    out = torch.zeros(ROWS, DIM)
    for n, at in enumerate(ROWS_OF.tolist()):
        if 0 <= at < ROWS:
            out[at] = a[at] * 2 + n + (out[at] if adds else 0)
    return out


@pytest.mark.parametrize("body", [copied, stored, added], ids=["copied", "stored", "added"])
def test_rows_are_read_and_written_where_they_lie(body):
    a, layouts = torch.randn(ROWS, DIM), {"A": {"x": 0}, "Out": {"x": 0}}
    assert outline(lowered(written(body), {"x": 3}, layouts, strict=True)) == ["kernel(A, table, Out)"]
    check(written(body), [a, ROWS_OF], expected(a, adds=body is added))


def test_packed_tokens_stay():
    func = packed_rope(8, 3, 4, 2, 4)
    rows = {"x": {"x": 0}, "out": {"x": 0}}
    assert len(outline(lowered(func, {"x": 2}, rows, strict=True))) == 1


@T.macro
def from_the_row_before(A, table, Out, row, bx):
    T.copy(row, Out[table[(bx + 1) % 8], 0])


@T.macro
def cleared_elsewhere(A, table, Out, row, bx):
    for j in T.Parallel(DIM):
        Out[(bx + 1) % ROWS, j] = 0.0
    T.copy(row, Out[table[bx], 0])


def test_rows_that_go_elsewhere_move():
    """A row that is read in one place and written in another, and one that is written in two."""
    a = torch.randn(ROWS, DIM)
    moved, cleared = torch.zeros(ROWS, DIM), torch.zeros(ROWS, DIM)
    for n, at in enumerate(ROWS_OF.tolist()):
        row, to = (a[at] if 0 <= at < ROWS else torch.zeros(DIM)), ROWS_OF.tolist()[(n + 1) % 8]
        if 0 <= to < ROWS:
            moved[to] = row
        cleared[(n + 1) % ROWS] = 0.0
        if 0 <= at < ROWS:
            cleared[at] = row
    for body, result in ((from_the_row_before, moved), (cleared_elsewhere, cleared)):
        with machine(1):
            steps = outline(lowered(written(body), {"x": 3}, {"A": {"x": 0}, "Out": {"x": 0}}))
            assert len(steps) > 1, steps
            check(written(body), [a, ROWS_OF], result)


def test_a_longer_table_has_rows_where_the_other_has_none():
    """Row 50 is none of A, and one of S: it is read there all the same."""

    @T.prim_func
    def kernel(
        A: T.Tensor((ROWS, DIM), "float32"),
        S: T.Tensor((100, DIM), "float32"),
        table: T.Tensor((2, 4), "int32"),
        Out: T.Tensor((2, DIM), "float32"),
    ):
        with T.Kernel(2, threads=32) as bx:
            row, more = T.alloc_shared((DIM,), "float32"), T.alloc_shared((DIM,), "float32")
            total = T.alloc_fragment((DIM,), "float32")
            T.clear(total)
            for k in T.serial(4):
                T.copy(A[table[bx, k], 0], row)
                T.copy(S[table[bx, k], 0], more)
                for j in T.Parallel(DIM):
                    total[j] += row[j] * 2 + more[j]
            T.copy(total, Out[bx, 0])

    a, s, table = torch.randn(ROWS, DIM), torch.randn(100, DIM), torch.tensor([[0, 50, 6, -1], [7, 99, 3, 100]]).int()
    longer = torch.cat([a, torch.zeros(93, DIM)]) * 2 + s
    inside = ((table >= 0) & (table < 100))[..., None]
    result = (longer[table.clamp(0, 99).long()] * inside).sum(1)
    with machine(1):
        steps = outline(lowered(kernel, {"x": 2}, {"A": {"x": 0}}))
        assert steps == ["kernel(A, S, table, Out)", "all_reduce(Out, sum, x)"]
        torch.testing.assert_close(run(kernel, {"x": 2}, {"A": {"x": 0}}, a, s, table), result, rtol=1e-5, atol=1e-5)
        check(kernel, [a, s, table], result)
