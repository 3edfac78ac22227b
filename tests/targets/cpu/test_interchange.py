"""Which loops over rows are put outside of loops over blocks of columns, and that results stay the interpreter's."""

import numpy as np
import pytest
import tilelang.language as T
import torch
from tvm import tirx

from kernels.gemv import gemv
from mesh_tensor.targets.cpu.fuse import walk
from mesh_tensor.targets.cpu.kernel import compile_for_cpu
from mesh_tensor.targets.cpu.retarget import retarget_for_cpu
from mesh_tensor.targets.interpreter import interpret

ROWS, COLUMNS, WIDTH = 6, 1280, 64


def by_blocks(body, used_after=False, columns=COLUMNS):
    """A kernel that takes block after block of columns of A and X, and goes through the rows in each."""
    last = ROWS - 1 if used_after else ROWS  # which row gets an element of x at the end, if there is one

    @T.prim_func
    def by_blocks_kernel(A: T.Tensor((ROWS, columns)), X: T.Tensor((columns,)), Y: T.Tensor((ROWS,))):
        with T.Kernel(1, threads=128):
            x = T.alloc_shared((WIDTH,), "float32")
            y = T.alloc_fragment((ROWS,), "float32")
            T.clear(y)
            for block in T.serial(columns // WIDTH):
                for j in T.Parallel(WIDTH):
                    x[j] = X[block * WIDTH + j]
                for row in T.serial(ROWS):
                    body(A, X, Y, x, y, block, row)
            if last < ROWS:
                y[last] = x[3]
            T.copy(y, Y)

    return by_blocks_kernel


@T.macro
def adds_products(A, X, Y, x, y, block, row):
    for j in T.serial(WIDTH):
        y[row] += A[row, block * WIDTH + j] * x[j]


@T.macro
def scales_and_adds(A, X, Y, x, y, block, row):
    for j in T.serial(WIDTH):
        y[row] = y[row] * 0.5 + A[row, block * WIDTH + j] * x[(j + 1) % WIDTH]


@T.macro
def takes_the_next_row(A, X, Y, x, y, block, row):
    for j in T.serial(WIDTH):
        y[row] += A[row, block * WIDTH + j] * x[j] + y[(row + 1) % ROWS] * 0.01


@T.macro
def takes_the_last_row(A, X, Y, x, y, block, row):
    for j in T.serial(WIDTH):
        y[row] += A[row, block * WIDTH + j] * x[j]
    y[row] = y[row] * 0.9 + y[ROWS - 1] * 0.1


@T.macro
def changes_what_it_reads(A, X, Y, x, y, block, row):
    for j in T.serial(WIDTH):
        y[row] += A[row, block * WIDTH + j] * x[j]
    for j in T.serial(WIDTH):
        x[j] = x[j] * 0.5


@T.macro
def writes_its_source(A, X, Y, x, y, block, row):
    for j in T.serial(WIDTH):
        y[row] += A[row, block * WIDTH + j] * x[j]
    X[(block * WIDTH + row + WIDTH) % COLUMNS] = y[row]


@T.macro
def goes_by_the_block(A, X, Y, x, y, block, row):
    for j in T.serial(WIDTH):
        y[row] += A[row, block * WIDTH + j] * x[j]
    if row == block % ROWS:
        y[block % ROWS] = y[block % ROWS] * 0.5


@T.macro
def two_rows_go_to_one(A, X, Y, x, y, block, row):
    for j in T.serial(WIDTH):
        y[row // 2] = y[row // 2] * 0.99 + A[row, block * WIDTH + j] * x[j]


def is_interchanged(func):
    """Whether the loop over rows is around the one over blocks."""
    loops = [part for part in walk(retarget_for_cpu(func).body) if isinstance(part, tirx.For)]
    return any(
        "block" in inner.loop_var.name for loop in loops if "row" in loop.loop_var.name for inner in walk_loops(loop)
    )


def walk_loops(loop):
    return [part for part in walk(loop.body) if isinstance(part, tirx.For)]


def check(func, columns=COLUMNS):
    generator = np.random.default_rng(5)
    data = [generator.standard_normal(shape, np.float32) for shape in [(ROWS, columns), (columns,), (ROWS,)]]
    wanted = [array.copy() for array in data]
    interpret(func, wanted)
    got = [torch.from_numpy(array.copy()) for array in data]
    compile_for_cpu(func)(*got)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("body", [adds_products, scales_and_adds], ids=["sum", "scan"])
def test_rows_that_have_nothing_to_do_with_each_other(body):
    func = by_blocks(body)
    assert is_interchanged(func)
    check(func)


@pytest.mark.parametrize(
    "body",
    [
        takes_the_next_row,
        takes_the_last_row,
        changes_what_it_reads,
        writes_its_source,
        goes_by_the_block,
        two_rows_go_to_one,
    ],
    ids=["next row", "last row", "block changes", "source changes", "row of the block", "two rows"],
)
def test_rows_that_must_stay_inside(body):
    func = by_blocks(body)
    assert not is_interchanged(func)
    check(func)


def test_a_block_that_is_used_afterwards():
    func = by_blocks(adds_products, used_after=True)
    assert not is_interchanged(func)
    check(func)


def test_what_else_each_block_does():
    @T.prim_func
    def halved_kernel(A: T.Tensor((ROWS, COLUMNS)), X: T.Tensor((COLUMNS,)), Y: T.Tensor((ROWS,))):
        with T.Kernel(1, threads=128):
            x = T.alloc_shared((WIDTH,), "float32")
            more = T.alloc_shared((WIDTH,), "float32")
            y = T.alloc_fragment((ROWS,), "float32")
            half = T.alloc_fragment((1,), "float32")
            T.clear(y)
            T.clear(half)
            for block in T.serial(COLUMNS // WIDTH):
                for j in T.Parallel(WIDTH):
                    x[j] = X[block * WIDTH + j]
                    more[j] = X[block * WIDTH + j] * 2
                for _ in T.serial(2):
                    half[0] = half[0] * 0.5 + 1
                for row in T.serial(ROWS):
                    for j in T.serial(WIDTH):
                        y[row] += A[row, block * WIDTH + j] * x[j] + more[j]
            y[0] = y[0] + half[0]
            T.copy(y, Y)

    assert not is_interchanged(halved_kernel)
    check(halved_kernel)


def test_rows_that_lie_near_each_other():
    func = by_blocks(adds_products, columns=2 * WIDTH)
    assert not is_interchanged(func)
    check(func, 2 * WIDTH)


def test_a_matrix_times_a_vector_walks_each_row_once():
    a, x, y = torch.randn(64, 2048), torch.randn(2048), torch.empty(64)
    compile_for_cpu(gemv(64, 2048))(a, x, y)
    torch.testing.assert_close(y, a @ x, rtol=1e-4, atol=1e-4)
    loops = [part for part in walk(retarget_for_cpu(gemv(64, 2048)).body) if isinstance(part, tirx.For)]
    blocks = next(loop for loop in loops if loop.loop_var.name == "ko")
    assert any(blocks.same_as(part) for loop in loops if loop.loop_var.name == "i0_group" for part in walk(loop.body))
