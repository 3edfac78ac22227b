"""Large blocks that repeat a parameter go, unless it may have changed meanwhile; results are the interpreter's."""

import re

import numpy as np
import pytest
import tilelang.language as T
import torch

from mesh_tensor.targets.cpu.build import c_source
from mesh_tensor.targets.cpu.kernel import compile_for_cpu
from mesh_tensor.targets.interpreter import interpret

BLOCKS, ROWS, COLUMNS = 2, 5, 1024


def over_blocks(statement, dtype="float32"):
    """A kernel that copies a block of X to `a`, and does `statement`, which goes on from there and writes Y and Z."""
    tall, flat = (BLOCKS * ROWS, COLUMNS), (BLOCKS * ROWS * COLUMNS,)

    @T.prim_func
    def over_blocks_kernel(X: T.Tensor(tall, dtype), Y: T.Tensor(tall, dtype), Z: T.Tensor(flat, dtype)):
        with T.Kernel(BLOCKS, threads=128) as bx:
            a = T.alloc_fragment((ROWS, COLUMNS), dtype)
            squares = T.alloc_fragment((ROWS, COLUMNS), "float32")
            total = T.alloc_fragment((ROWS,), "float32")
            T.copy(X[bx * ROWS, 0], a)
            statement(X, Y, Z, a, squares, total, bx)

    return over_blocks_kernel


@T.macro
def sums_squares_of(a, squares, total):
    for i, j in T.Parallel(ROWS, COLUMNS):
        squares[i, j] = T.cast(a[i, j], "float32") * T.cast(a[i, j], "float32")
    T.reduce_sum(squares, total, dim=1)


@T.macro
def scales(X, Y, Z, a, squares, total, bx):
    sums_squares_of(a, squares, total)
    for i, j in T.Parallel(ROWS, COLUMNS):
        Y[bx * ROWS + i, j] = a[i, j] * T.rsqrt(total[0])


@T.macro
def goes_row_by_row(X, Y, Z, a, squares, total, bx):
    total[0] = 0
    for i in T.serial(ROWS):
        for j in T.serial(COLUMNS):
            total[0] = total[0] * 0.5 + a[i, j]
        for j in T.serial(COLUMNS):
            Y[bx * ROWS + i, j] = a[i, j] - total[0]


@T.macro
def reads_any_place(X, Y, Z, a, squares, total, bx):
    sums_squares_of(a, squares, total)
    for i in T.serial(ROWS):
        total[i] = total[i] + a[(i + 2) % ROWS, 7 * i]
    for i, j in T.Parallel(ROWS, COLUMNS):
        Y[bx * ROWS + i, j] = a[i, j] * total[0]


@T.macro
def reads_the_next_column(X, Y, Z, a, squares, total, bx):
    sums_squares_of(a, squares, total)
    for i, j in T.Parallel(ROWS, COLUMNS):
        Y[bx * ROWS + i, j] = a[i, (j + 1) % COLUMNS] * total[0]


@T.macro
def writes_first(X, Y, Z, a, squares, total, bx):
    sums_squares_of(a, squares, total)
    for i, j in T.Parallel(ROWS, COLUMNS):
        Y[bx * ROWS + i, j] = total[0]
        Y[bx * ROWS + i, j] = a[i, j] + total[0]


@T.macro
def writes_another_row(X, Y, Z, a, squares, total, bx):
    sums_squares_of(a, squares, total)
    for i, j in T.Parallel(ROWS, COLUMNS):
        Y[bx * ROWS + ROWS - 1 - i, j] = a[i, j] + total[0]


@T.macro
def writes_before_it_reads(X, Y, Z, a, squares, total, bx):
    for i, j in T.Parallel(ROWS, COLUMNS):
        Y[bx * ROWS + i, j] = 7
    sums_squares_of(a, squares, total)
    for i in T.serial(ROWS):
        Y[bx * ROWS + i, 0] = total[i]


@T.macro
def writes_a_parameter_of_another_form(X, Y, Z, a, squares, total, bx):
    sums_squares_of(a, squares, total)
    for i, j in T.Parallel(ROWS, COLUMNS):
        Z[(bx * ROWS + i) * COLUMNS + COLUMNS - 1 - j] = a[i, j] + total[0]


@T.macro
def writes_its_source(X, Y, Z, a, squares, total, bx):
    for j in T.serial(COLUMNS):
        X[bx * ROWS, j] = 7
    sums_squares_of(a, squares, total)
    for i in T.serial(ROWS):
        Y[bx * ROWS + i, 0] = total[i]


@T.macro
def is_changed(X, Y, Z, a, squares, total, bx):
    a[1, 1] = 7
    sums_squares_of(a, squares, total)
    for i, j in T.Parallel(ROWS, COLUMNS):
        Y[bx * ROWS + i, j] = a[i, j] * total[0]


GO = (scales, reads_any_place)
STAY = (
    goes_row_by_row,  # one row, which is small
    reads_the_next_column,
    writes_first,
    writes_another_row,
    writes_before_it_reads,
    writes_a_parameter_of_another_form,
    writes_its_source,
    is_changed,
)


@pytest.mark.parametrize("same", ["none", "Y", "Z"])
@pytest.mark.parametrize("statement", GO + STAY, ids=lambda macro: macro.name)
def test_results_are_the_interpreters_whatever_memory_is_the_same(statement, same):
    func = over_blocks(statement)
    tall, generator = (BLOCKS * ROWS, COLUMNS), np.random.default_rng(5)
    x = generator.standard_normal(tall, np.float32)
    wanted = _arguments(x.copy(), same)
    interpret(func, wanted)
    actual = _arguments(x.copy(), same)
    compile_for_cpu(func)(*map(torch.from_numpy, actual))
    for ours, theirs in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def _arguments(x, same):
    y = x if same == "Y" else np.zeros_like(x)
    return [x, y, x.reshape(-1) if same == "Z" else np.zeros(x.size, np.float32)]


@pytest.mark.parametrize("statement", GO + STAY, ids=lambda macro: macro.name)
def test_what_repeats_a_parameter_is_not_made(statement):
    assert ("a" not in blocks(over_blocks(statement))) == (statement in GO)


def test_another_dtype_is_a_copy():
    @T.prim_func
    def widened(X: T.Tensor((ROWS, COLUMNS), "float16"), Y: T.Tensor((ROWS, COLUMNS), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_fragment((ROWS, COLUMNS), "float32")
            squares = T.alloc_fragment((ROWS, COLUMNS), "float32")
            total = T.alloc_fragment((ROWS,), "float32")
            T.copy(X, a)
            sums_squares_of(a, squares, total)
            for i, j in T.Parallel(ROWS, COLUMNS):
                Y[i, j] = a[i, j] * total[0]

    assert "a" in blocks(widened)


def some_columns(rows=16, columns=512, step=1, first=0):
    """Each program takes some columns of X, beginning with `first`, and every `step`th of its rows."""

    @T.prim_func
    def some_columns_kernel(X: T.Tensor((rows * step, 2 * columns)), Y: T.Tensor((rows, columns))):
        with T.Kernel(1, threads=128):
            a = T.alloc_fragment((rows, columns), "float32")
            total = T.alloc_fragment((rows,), "float32")
            for i, j in T.Parallel(rows, columns):
                a[i, j] = X[i * step, first + j]
            T.reduce_max(a, total, dim=1)
            for i, j in T.Parallel(rows, columns):
                Y[i, j] = a[i, j] - total[0]

    return some_columns_kernel


def test_rows_that_are_apart_are_brought_together():
    """A page apart, rows push each other out of the caches."""
    assert blocks(some_columns()) == ["a"]


def test_what_reaches_past_the_end_is_filled():
    """The second half of the block's columns isn't there."""
    func = some_columns(first=768)
    assert blocks(func) == ["a"]
    x = torch.randn(16, 1024) - 4
    wanted, actual = np.zeros((16, 512), np.float32), torch.zeros(16, 512)
    interpret(func, [x.numpy().copy(), wanted])
    compile_for_cpu(func)(x, actual)
    np.testing.assert_array_equal(actual.numpy(), wanted)


def test_a_block_that_is_copied_again_for_some_steps_only():
    """What is read in the second step is of the first one's place."""

    @T.prim_func
    def kept(X: T.Tensor((2 * ROWS, COLUMNS)), Y: T.Tensor((2 * ROWS, COLUMNS))):
        with T.Kernel(1, threads=128):
            a = T.alloc_fragment((ROWS, COLUMNS), "float32")
            for step in T.serial(2):
                if step == 0:
                    for i, j in T.Parallel(ROWS, COLUMNS):
                        a[i, j] = X[step * ROWS + i, j]
                for i, j in T.Parallel(ROWS, COLUMNS):
                    Y[step * ROWS + i, j] = a[i, j] + a[0, j]

    assert blocks(kept) == ["a"]
    x, y = torch.randn(2 * ROWS, COLUMNS), torch.zeros(2 * ROWS, COLUMNS)
    compile_for_cpu(kept)(x, y)
    torch.testing.assert_close(y, (x[:ROWS] + x[0]).repeat(2, 1))


def blocks(func):
    """The blocks that have memory besides the stack."""
    return sorted(set(re.findall(r"mt_block\d+_(\w+)", c_source(func))))
