"""Blocks that shrink or go once loops are joined, those that must stay, and that results are the interpreter's."""

import re

import numpy as np
import pytest
import tilelang.language as T
import torch

from mesh_tensor.targets.cpu.build import c_source
from mesh_tensor.targets.cpu.kernel import compile_for_cpu
from mesh_tensor.targets.interpreter import interpret

ROWS, COLUMNS = 5, 96


def over_rows(statement, dtype="float32"):
    """A kernel that copies X to a block `a`, does `statement`, twice, and copies a block `b` to Y. Before, b is 1."""

    @T.prim_func
    def over_rows_kernel(X: T.Tensor((ROWS, COLUMNS), dtype), Y: T.Tensor((ROWS, COLUMNS), dtype)):
        with T.Kernel(1, threads=128):
            a = T.alloc_fragment((ROWS, COLUMNS), dtype)
            b = T.alloc_fragment((ROWS, COLUMNS), dtype)
            total = T.alloc_fragment((ROWS,), dtype)
            T.fill(b, 1)
            T.fill(total, 0)
            for step in T.serial(2):
                T.copy(X, a)
                statement(X, Y, a, b, total, step)
            T.copy(b, Y)

    return over_rows_kernel


@T.macro
def passes_on(X, Y, a, b, total, step):
    for i, j in T.Parallel(ROWS, COLUMNS):
        a[i, j] = a[i, j] * 0.3
    T.reduce_sum(a, total, dim=1)
    for i, j in T.Parallel(ROWS, COLUMNS):
        b[i, j] = b[i, j] + total[i]


@T.macro
def sums_squares(X, Y, a, b, total, step):
    squares = T.alloc_fragment((ROWS, COLUMNS), a.dtype)
    for i, j in T.Parallel(ROWS, COLUMNS):
        squares[i, j] = a[i, j] * a[i, j]
    T.reduce_sum(squares, total, dim=1, clear=False)
    for i, j in T.Parallel(ROWS, COLUMNS):
        b[i, j] = a[i, j] - total[i]


@T.macro
def reads_last_step(X, Y, a, b, total, step):
    kept = T.alloc_fragment((ROWS, COLUMNS), a.dtype)
    for i, j in T.Parallel(ROWS, COLUMNS):
        kept[i, j] = T.if_then_else(step == 0, a[i, j], kept[i, j] * 2)
    for i, j in T.Parallel(ROWS, COLUMNS):
        b[i, j] = kept[i, j]


@T.macro
def sets_some_columns(X, Y, a, b, total, step):
    for i, j in T.Parallel(ROWS, COLUMNS):
        if j < COLUMNS - 40 * step:
            b[i, j] = a[i, j] + step
    for i, j in T.Parallel(ROWS, COLUMNS):
        b[i, j] = b[i, j] * 2


@T.macro
def reads_the_next_column(X, Y, a, b, total, step):
    for i, j in T.Parallel(ROWS, COLUMNS):
        b[i, j] = a[i, j] + a[i, (j + 1) % COLUMNS]


@T.macro
def reads_the_row_before(X, Y, a, b, total, step):
    for i, j in T.Parallel(ROWS, COLUMNS):
        b[i, j] = a[(i + ROWS - 1) % ROWS, j]


@T.macro
def writes_its_source(X, Y, a, b, total, step):
    for i, j in T.Parallel(ROWS, COLUMNS):
        b[i, j] = a[i, j]
        a[i, j] = 7
        b[i, j] = b[i, j] + a[i, j]


@T.macro
def writes_what_may_be_its_source(X, Y, a, b, total, step):
    for i, j in T.Parallel(ROWS, COLUMNS):
        a[i, j] = X[i, j] + 1
        Y[i, j] = 7
        b[i, j] = a[i, j]


@T.macro
def sees_it_as_a_row(X, Y, a, b, total, step):
    row = T.reshape(a, (ROWS * COLUMNS,))
    for i, j in T.Parallel(ROWS, COLUMNS):
        a[i, j] = a[i, j] + 1
    for i, j in T.Parallel(ROWS, COLUMNS):
        b[i, j] = row[i * COLUMNS + j]


STATEMENTS = (
    passes_on,
    sums_squares,
    reads_last_step,
    sets_some_columns,
    reads_the_next_column,
    reads_the_row_before,
    writes_its_source,
    writes_what_may_be_its_source,
    sees_it_as_a_row,
)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda macro: macro.name)
def test_results_are_the_interpreters(statement, dtype, in_place):
    func = over_rows(statement, dtype)
    x = torch.randn(ROWS, COLUMNS).to(getattr(torch, dtype))
    x[0, 3], x[2, 95] = torch.nan, -torch.inf
    wanted_x, actual_x = x.numpy().copy(), x.clone()
    wanted, actual = (wanted_x, actual_x) if in_place else (np.zeros_like(wanted_x), torch.zeros_like(x))
    interpret(func, [wanted_x, wanted])
    compile_for_cpu(func)(actual_x, actual)
    rough = 2e-2 if dtype == "float16" else 1e-5
    torch.testing.assert_close(actual, torch.from_numpy(wanted), rtol=rough, atol=rough, equal_nan=True)


def test_blocks_go_or_shrink():
    """`a` goes, or is one row on the stack, where nothing stays in it; `b` has all rows, since they stay."""
    assert blocks(passes_on) == ["b"]
    assert blocks(sums_squares) == ["b"]
    assert f"float a[{COLUMNS}]" in c_source(over_rows(sums_squares))
    assert blocks(reads_last_step) == ["b", "kept"]
    assert blocks(reads_the_row_before) == ["a", "b"]


def blocks(statement):
    """The blocks that have memory besides the stack."""
    source = c_source(over_rows(statement))
    return sorted(set(re.findall(r"mt_block\d+_(\w+)", source)))


def test_a_place_that_moves_between_the_store_and_the_read():
    """A ring of two: what is read is what the iteration before stored."""

    @T.prim_func
    def delayed(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            ring = T.alloc_local((2,), "float32")
            last = T.alloc_local((1,), "float32")
            at = T.alloc_var("int32")
            ring[0] = 0.0
            ring[1] = 0.0
            at = 0
            for i in T.serial(8):
                ring[at % 2] = 1.0 * i
                at = at + 1
                last[0] = ring[at % 2]
                Y[i] = last[0] + X[i]

    x, y = torch.randn(8), torch.empty(8)
    compile_for_cpu(delayed)(x, y)
    torch.testing.assert_close(y, x + torch.tensor([0.0, 0, 1, 2, 3, 4, 5, 6]))
