"""Products that clear a block or read what was only copied, those that must not, and that results are the
interpreter's."""

import re

import numpy as np
import pytest
import tilelang.language as T
import torch

from mesh_tensor.targets.cpu.build import c_source
from mesh_tensor.targets.cpu.kernel import compile_for_cpu
from mesh_tensor.targets.interpreter import interpret

ROWS, COLUMNS, STEPS = 40, 32, 3


def around(statement):
    """A kernel that does `statement` with blocks a (of X), b (of Y) and c (all 2); then c is added to Z."""

    @T.prim_func
    def around_kernel(
        X: T.Tensor((ROWS, COLUMNS)), Y: T.Tensor((COLUMNS, COLUMNS)), Z: T.Tensor((ROWS, COLUMNS)), n: T.int32
    ):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((ROWS, COLUMNS), "float32")
            b = T.alloc_shared((COLUMNS, COLUMNS), "float32")
            c = T.alloc_fragment((ROWS, COLUMNS), "float32")
            d = T.alloc_fragment((ROWS, COLUMNS), "float32")
            T.copy(X, a)
            T.copy(Y, b)
            T.fill(c, 2)
            T.fill(d, 3)
            statement(a, b, c, d, n)
            for i, j in T.Parallel(ROWS, COLUMNS):
                Z[i, j] = Z[i, j] + c[i, j]

    return around_kernel


@T.macro
def cleared(a, b, c, d, n):
    T.clear(c)
    T.gemm(a, b, c)


@T.macro
def cleared_before_a_loop(a, b, c, d, n):
    T.clear(c)
    for ko in T.serial(STEPS):
        T.gemm(a, b, c)
        b[0, ko] = 1.5


@T.macro
def cleared_before_a_loop_that_may_do_nothing(a, b, c, d, n):
    T.clear(c)
    for _ in T.serial(n):
        T.gemm(a, b, c)


@T.macro
def cleared_before_a_product_that_may_not_happen(a, b, c, d, n):
    T.clear(c)
    for ko in T.serial(STEPS):
        if ko >= n + 1:
            T.gemm(a, b, c)


@T.macro
def cleared_before_a_loop_that_is_left(a, b, c, d, n):
    T.clear(c)
    for _ in T.serial(STEPS):
        if n == 0:
            T.loop_break()
        T.gemm(a, b, c)


@T.macro
def cleared_where_a_loop_may_be_left(a, b, c, d, n):
    for ko in T.serial(STEPS):
        T.clear(c)
        if ko >= n:
            T.loop_break()
        T.gemm(a, b, c)


@T.macro
def cleared_and_read_as_a_bound(a, b, c, d, n):
    first = T.alloc_local((1,), "int32")
    T.clear(c)
    for ko in T.serial(T.cast(c[0, 0], "int32"), T.cast(c[0, 0], "int32") + 2):
        first[0] = ko + n
    d[0, 0] = first[0]
    T.gemm(d, b, c)


@T.macro
def cleared_with_minus_zero(a, b, c, d, n):
    T.fill(c, -0.0)
    T.gemm(a, b, c)


@T.macro
def cleared_for_a_part(a, b, c, d, n):
    T.clear(c)
    T.gemm(a[0:16, 0:COLUMNS], b, c[0:16, 0:COLUMNS])


@T.macro
def cleared_and_read_first(a, b, c, d, n):
    T.clear(c)
    for _ in T.serial(STEPS):
        for i, j in T.Parallel(ROWS, COLUMNS):
            d[i, j] = d[i, j] + c[i, j]
        T.gemm(a, b, c)
    T.copy(d, c)


@T.macro
def cleared_as_a_factor(a, b, c, d, n):
    T.clear(d)
    T.gemm(d, b, d)
    T.gemm(d, b, c)


@T.macro
def copied(a, b, c, d, n):
    e = T.alloc_shared((ROWS, COLUMNS), "float32")
    for i, j in T.Parallel(ROWS, COLUMNS):
        a[i, j] = a[i, j] * 2
    T.copy(a, e)
    T.gemm(e, b, c)


@T.macro
def copied_and_changed(a, b, c, d, n):
    e = T.alloc_shared((ROWS, COLUMNS), "float32")
    T.copy(a, e)
    for i, j in T.Parallel(ROWS, COLUMNS):
        a[i, j] = 1
    T.gemm(e, b, c)
    T.gemm(a, b, c)


@T.macro
def copied_and_accumulated(a, b, c, d, n):
    T.copy(c, d)
    T.gemm(d, b, c)


@T.macro
def copied_and_read_again(a, b, c, d, n):
    for _ in T.serial(STEPS):
        T.gemm(d, b, c)
        T.copy(a, d)
        T.gemm(d, b, c)


@T.macro
def copied_where_it_holds(a, b, c, d, n):
    if n > 0:
        T.copy(a, d)
    T.gemm(d, b, c)


@T.macro
def into_its_second_factor(a, b, c, d, n):
    T.gemm(a[0:COLUMNS, 0:COLUMNS], b, b)
    T.gemm(a, b, c)


STATEMENTS = (
    cleared,
    cleared_before_a_loop,
    cleared_before_a_loop_that_may_do_nothing,
    cleared_before_a_product_that_may_not_happen,
    cleared_before_a_loop_that_is_left,
    cleared_where_a_loop_may_be_left,
    cleared_and_read_as_a_bound,
    cleared_with_minus_zero,
    cleared_for_a_part,
    cleared_and_read_first,
    cleared_as_a_factor,
    copied,
    copied_and_changed,
    copied_and_accumulated,
    copied_and_read_again,
    copied_where_it_holds,
    into_its_second_factor,
)


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda macro: macro.name)
def test_results_are_the_interpreters(statement, n):
    func = around(statement)
    x, y, z = torch.randn(ROWS, COLUMNS), torch.randn(COLUMNS, COLUMNS), torch.randn(ROWS, COLUMNS)
    x[1, 2], x[3, 4] = torch.nan, -torch.inf
    arrays = [t.numpy().copy() for t in (x, y, z)]
    interpret(func, [*arrays, np.int32(n)])
    compile_for_cpu(func)(x, y, z, n)
    torch.testing.assert_close(z, torch.from_numpy(arrays[2]), rtol=1e-4, atol=1e-3, equal_nan=True)


def test_what_is_cleared_and_copied():
    """The stores of a constant to `c`, and those to `e`, are gone where they can."""
    assert stores(cleared, "c", "0") == 0
    assert stores(cleared_before_a_loop, "c", "0") == 0
    assert stores(cleared_before_a_loop_that_may_do_nothing, "c", "0") == 1
    assert stores(cleared_before_a_product_that_may_not_happen, "c", "0") == 1
    assert stores(copied, "e", "mt_block") == 0
    assert stores(copied_and_changed, "e", "mt_block") == 1


def stores(statement, block, value):
    source = c_source(around(statement))
    return len(re.findall(rf"mt_block\d+_{block}\[.*\] = {value}", source))


def test_a_factor_that_is_copied_from_a_tensor_of_open_size():
    """Nobody knows how many rows there are of what a block is a copy of; it was a TypeError."""
    m = T.dynamic("m")

    @T.prim_func
    def squares(X: T.Tensor((m * 16, COLUMNS)), Y: T.Tensor((COLUMNS, COLUMNS)), Z: T.Tensor((m, 16, COLUMNS))):
        with T.Kernel(m, threads=128) as bx:
            a, b = T.alloc_shared((16, COLUMNS), "float32"), T.alloc_shared((COLUMNS, COLUMNS), "float32")
            c = T.alloc_fragment((16, COLUMNS), "float32")
            T.copy(X[bx * 16, 0], a)
            T.copy(Y, b)
            for i, j in T.Parallel(16, COLUMNS):
                a[i, j] = a[i, j] * a[i, j]
            T.clear(c)
            T.gemm(a, b, c)
            T.copy(c, Z[bx, 0, 0])

    x, y, z = torch.randn(3 * 16, COLUMNS), torch.randn(COLUMNS, COLUMNS), torch.empty(3, 16, COLUMNS)
    compile_for_cpu(squares)(x, y, z)
    torch.testing.assert_close(z.flatten(0, 1), x.square() @ y, rtol=1e-4, atol=1e-3)
