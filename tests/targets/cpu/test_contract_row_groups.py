"""Which blocks are made a few rows at a time, which are not, and that results are the interpreter's."""

import numpy as np
import pytest
import tilelang.language as T
import torch

from mesh_tensor.targets.cpu.build import c_source
from mesh_tensor.targets.cpu.kernel import compile_for_cpu
from mesh_tensor.targets.interpreter import interpret

ROWS, DEPTH, COLUMNS, SIZE = 192, 64, 40, 150


def made_for_products(statement, rows=ROWS):
    """A kernel whose block `a`, of X with its rows turned around and a margin of zeros, is a factor; Y is a view."""

    @T.prim_func
    def made_kernel(X: T.Tensor((SIZE, DEPTH)), Y: T.Tensor((DEPTH, 2, COLUMNS // 2)), Z: T.Tensor((ROWS, COLUMNS))):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((rows, DEPTH), "float32")
            b = T.alloc_shared((DEPTH, COLUMNS), "float32")
            c = T.alloc_fragment((rows, COLUMNS), "float32")
            flat = T.Tensor((DEPTH, COLUMNS), "float32", Y.data)
            T.copy(flat, b)
            T.fill(c, 1)
            T.fill(a, 3)
            for step in T.serial(2):
                statement(X, a, b, c, Z, step)
            T.copy(c, Z[0:rows, 0:COLUMNS])

    return made_kernel


@T.macro
def patches(X, a, b, c, Z, step):
    e = T.alloc_shared(a.shape, "float32")
    for i, j in T.Parallel(a.shape[0], DEPTH):
        e[i, j] = T.if_then_else(i + step < SIZE, X[SIZE - 1 - i - step, j], 0)
    T.gemm(e, b, c)


@T.macro
def patches_of_what_is_written_between(X, a, b, c, Z, step):
    e = T.alloc_shared((ROWS, DEPTH), "float32")
    for i, j in T.Parallel(ROWS, DEPTH):
        e[i, j] = X[i % SIZE, j] + b[j, 3]
    for i, j in T.Parallel(DEPTH, COLUMNS):
        b[i, j] = b[i, j] * 0.5
    T.gemm(e, b, c)


@T.macro
def patches_of_a_parameter_that_may_be_written(X, a, b, c, Z, step):
    e = T.alloc_shared((ROWS, DEPTH), "float32")
    for i, j in T.Parallel(ROWS, DEPTH):
        e[i, j] = X[i % SIZE, j]
    for i in T.Parallel(COLUMNS):
        Z[0, i] = 5
    T.gemm(e, b, c)


@T.macro
def patches_of_the_sums(X, a, b, c, Z, step):
    e = T.alloc_shared((ROWS, DEPTH), "float32")
    for i, j in T.Parallel(ROWS, DEPTH):
        e[i, j] = c[ROWS - 1 - i, j % COLUMNS] * 0.1
    T.gemm(e, b, c)


@T.macro
def some_rows(X, a, b, c, Z, step):
    for i, j in T.Parallel(SIZE, DEPTH):
        a[i, j] = X[i, j]
    T.gemm(a, b, c)


@T.macro
def read_by_a_part(X, a, b, c, Z, step):
    e = T.alloc_shared((ROWS, DEPTH), "float32")
    for i, j in T.Parallel(ROWS, DEPTH):
        e[i, j] = X[i % SIZE, j]
    T.gemm(e[64:ROWS, 0:DEPTH], b, c[64:ROWS, 0:COLUMNS])


STATEMENTS = (
    patches,
    patches_of_what_is_written_between,
    patches_of_a_parameter_that_may_be_written,
    patches_of_the_sums,
    some_rows,
    read_by_a_part,
)


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda macro: macro.name)
def test_results_are_the_interpreters(statement):
    func = made_for_products(statement)
    x, y, z = torch.randn(SIZE, DEPTH), torch.randn(DEPTH, 2, COLUMNS // 2), torch.randn(ROWS, COLUMNS)
    x[7, 2] = torch.nan
    arrays = [t.numpy().copy() for t in (x, y, z)]
    interpret(func, arrays)
    compile_for_cpu(func)(x, y, z)
    torch.testing.assert_close(z, torch.from_numpy(np.asarray(arrays[2])), rtol=1e-4, atol=1e-3, equal_nan=True)


def test_parameters_that_are_the_same_memory():
    """What is written to one of them before the product must not reach the block."""
    func = made_for_products(patches_of_a_parameter_that_may_be_written)
    memory, y = torch.randn(ROWS * DEPTH), torch.randn(DEPTH, 2, COLUMNS // 2)
    array = memory.numpy().copy()
    x, z = array[: SIZE * DEPTH].reshape(SIZE, DEPTH), array[: ROWS * COLUMNS].reshape(ROWS, COLUMNS)
    interpret(func, [x, y.numpy(), z])
    compile_for_cpu(func)(memory, y, memory)
    torch.testing.assert_close(memory, torch.from_numpy(array), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("statement", "rows", "grouped"), [(patches, ROWS, True), (patches, 64, False)])
def test_what_is_grouped(statement, rows, grouped):
    """Only a block that is too large for the nearest cache."""
    assert ("group < " in c_source(made_for_products(statement, rows))) == grouped


@pytest.mark.parametrize("statement", STATEMENTS[1:], ids=lambda macro: macro.name)
def test_what_is_not_grouped(statement):
    assert "group < " not in c_source(made_for_products(statement))


def test_a_block_of_one_column():
    """Its rows have no loop over columns."""
    rows = 1 << 14

    @T.prim_func
    def outer(X: T.Tensor((rows, 1), "float16"), Y: T.Tensor((1, 16)), Z: T.Tensor((rows, 16))):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((rows, 1), "float32")
            b = T.alloc_shared((1, 16), "float32")
            c = T.alloc_fragment((rows, 16), "float32")
            T.copy(X, a)
            T.copy(Y, b)
            T.gemm(a, b, c, clear_accum=True)
            T.copy(c, Z)

    x, y, z = torch.randn(rows, 1).half(), torch.randn(1, 16), torch.empty(rows, 16)
    compile_for_cpu(outer)(x, y, z)
    torch.testing.assert_close(z, x.float() * y)
