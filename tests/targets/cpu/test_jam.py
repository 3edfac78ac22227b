"""Which rows are reduced several at a time, and that each row's result stays what it is alone, to the last bit."""

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

ROWS, COLUMNS, ALONE = 13, 96, 3  # so few rows are not made a group


def row_by_row(body, rows=ROWS, first=0, columns=COLUMNS, dtype="float32", accum="float32"):
    """A kernel that goes through the rows of A in order; `body` has blocks of the kernel's for x and y."""

    @T.prim_func
    def row_by_row_kernel(
        A: T.Tensor((rows, columns), dtype), X: T.Tensor((columns,), dtype), Y: T.Tensor((rows,), accum)
    ):
        with T.Kernel(1, threads=128):
            x = T.alloc_shared((columns,), dtype)
            y = T.alloc_fragment((rows,), accum)
            T.copy(X, x)
            T.copy(Y, y)
            for row in T.serial(first, rows):
                body(A, X, Y, x, y, row)
            T.copy(y, Y)

    return row_by_row_kernel


@T.macro
def adds_products(A, X, Y, x, y, row):
    for j in T.serial(x.shape[0]):
        y[row] += T.cast(A[row, j], y.dtype) * T.cast(x[j], y.dtype)


@T.macro
def largest_distance(A, X, Y, x, y, row):
    for j in T.serial(x.shape[0]):
        y[row] = T.max(y[row], T.abs(A[row, j] - X[j]))


@T.macro
def has_a_state(A, X, Y, x, y, row):
    for j in T.serial(x.shape[0]):
        y[row] = y[row] * 0.5 + A[row, j] * x[COLUMNS - 1 - j]
    y[row] = y[row] * x[row]


@T.macro
def goes_on_from_the_last_row(A, X, Y, x, y, row):
    if row > 0:
        y[row] = y[row - 1]
    for j in T.serial(COLUMNS):
        y[row] += A[row, j] * x[j]


@T.macro
def reads_the_first_row(A, X, Y, x, y, row):
    for j in T.serial(COLUMNS):
        y[row] += A[row, j] * x[j] + y[0] * 0.01


@T.macro
def changes_what_rows_share(A, X, Y, x, y, row):
    for j in T.serial(COLUMNS):
        y[row] += A[row, j] * x[j]
    x[row] = y[row]


@T.macro
def adds_to_one_element(A, X, Y, x, y, row):
    for j in T.serial(COLUMNS):
        y[row // 2] += A[row, j] * x[j]


@T.macro
def goes_to_the_other_end(A, X, Y, x, y, row):
    for j in T.serial(COLUMNS):
        y[row] += A[row, j] * x[j]
    y[ROWS - 1 - row] = y[row] + 1


@T.macro
def writes_the_result(A, X, Y, x, y, row):
    for j in T.serial(COLUMNS):
        y[row] += A[row, j] * X[j]
    Y[row] = y[row]


@T.macro
def has_its_own_length(A, X, Y, x, y, row):
    for j in T.serial(row + 5):
        y[row] += A[row, j] * x[j]


@T.macro
def stops(A, X, Y, x, y, row):
    for j in T.serial(COLUMNS):
        y[row] += A[row, j] * x[j]
        if y[row] > 1:
            break


@T.macro
def shares_nothing(A, X, Y, x, y, row):
    for j in T.serial(COLUMNS):
        y[row] += A[row, j]


def is_grouped(func):
    """Whether a loop goes over groups of rows."""
    loops = [part for part in walk(retarget_for_cpu(func).body) if isinstance(part, tirx.For)]
    return any(loop.loop_var.name.endswith("_group") for loop in loops)


def numbers(rows=ROWS, columns=COLUMNS, dtype="float32", accum="float32"):
    generator = torch.Generator().manual_seed(3)
    shapes = [((rows, columns), dtype), ((columns,), dtype), ((rows,), accum)]
    return [
        (torch.randn(shape, generator=generator) * (8 if "int" in kind else 1)).to(getattr(torch, kind))
        for shape, kind in shapes
    ]


def check(func, data, tolerance=2e-5):
    wanted = [tensor.numpy().copy() for tensor in data]
    interpret(func, wanted)
    got = [tensor.clone() for tensor in data]
    compile_for_cpu(func)(*got)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [4, 7, 8, ROWS, 16])
@pytest.mark.parametrize("body", [adds_products, largest_distance, has_a_state], ids=["sum", "maximum", "state"])
def test_each_row_is_what_it_is_alone(body, rows):
    func = row_by_row(body, rows)
    assert is_grouped(func)
    a, x, y = numbers(rows)
    check(func, [a, x, y])
    together, alone = y.clone(), y.clone()
    compile_for_cpu(func)(a, x, together)
    if body is not has_a_state:  # a row's state takes an element of x by its number
        one = row_by_row(body, 1)
        assert not is_grouped(one)
        kernel = compile_for_cpu(one)
        for row in range(rows):
            kernel(a[row], x, alone[row])
        assert torch.equal(together, alone)


@pytest.mark.parametrize(
    ("dtype", "accum"),
    [
        ("float16", "float32"),
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("float64", "float64"),
        ("int8", "int32"),
        ("int32", "int32"),
        ("uint8", "uint8"),
    ],
)
def test_every_dtype_is_rounded_as_alone(dtype, accum):
    func = row_by_row(adds_products, dtype=dtype, accum=accum)
    assert is_grouped(func)
    a, x, y = numbers(dtype=dtype, accum=accum)
    together, alone = y.clone(), y.clone()
    compile_for_cpu(func)(a, x, together)
    kernel = compile_for_cpu(row_by_row(adds_products, 1, dtype=dtype, accum=accum))
    for row in range(ROWS):
        kernel(a[row], x, alone[row])
    assert torch.equal(together, alone)
    if accum in ("float64", "int32"):
        expected = y + (a.to(y.dtype) * x.to(y.dtype)).sum(1, dtype=y.dtype)
        torch.testing.assert_close(together, expected)


@pytest.mark.parametrize(
    "body",
    [
        goes_on_from_the_last_row,
        reads_the_first_row,
        changes_what_rows_share,
        adds_to_one_element,
        goes_to_the_other_end,
        writes_the_result,
        has_its_own_length,
        stops,
    ],
    ids=lambda body: body.name if hasattr(body, "name") else None,
)
def test_rows_that_stay_one_after_the_other(body):
    func = row_by_row(body)
    assert not is_grouped(func)
    check(func, numbers(), tolerance=1e-4)


def test_rows_that_share_nothing():
    assert not is_grouped(row_by_row(shares_nothing))


@pytest.mark.parametrize("rows", [1, 2, ALONE])
def test_few_rows(rows):
    func = row_by_row(adds_products, rows)
    assert not is_grouped(func)
    check(func, numbers(rows))


def test_rows_that_begin_somewhere():
    func = row_by_row(adds_products, first=2)
    assert is_grouped(func)
    check(func, numbers())


def test_parameters_that_are_the_same_memory():
    """The result is where the vector is: what a row writes, the next rows read."""

    @T.prim_func
    def square_kernel(A: T.Tensor((16, 16)), X: T.Tensor((16,)), Y: T.Tensor((16,))):
        with T.Kernel(1, threads=128):
            total = T.alloc_fragment((1,), "float32")
            for row in T.serial(16):
                total[0] = 0.0
                for j in T.serial(16):
                    total[0] += A[row, j] * X[j]
                Y[row] = total[0]

    assert not is_grouped(square_kernel)
    a, x = torch.randn(16, 16), torch.randn(16)
    expected = x.clone()
    for row in range(16):
        expected[row] = a[row] @ expected
    compile_for_cpu(square_kernel)(a, x, x)
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-4)


def test_rows_of_a_block_that_is_seen_in_another_form():
    @T.prim_func
    def views_kernel(A: T.Tensor((8, 64)), X: T.Tensor((64,)), Y: T.Tensor((8,))):
        with T.Kernel(1, threads=128):
            y = T.alloc_shared((8,), "float32")
            seen = T.view(y, (4, 2))
            T.clear(y)
            for row in T.serial(8):
                for j in T.serial(64):
                    y[row] += A[row, j] * X[j]
                seen[3 - row // 2, row % 2] = seen[3 - row // 2, row % 2] * 0.5
            T.copy(y, Y)

    assert not is_grouped(views_kernel)
    check(views_kernel, numbers(8, 64))


@pytest.mark.parametrize(("m", "k"), [(64, 256), (50, 200), (64, 2048), (13, 70)])
def test_a_matrix_times_a_vector(m, k):
    func = gemv(m, k)
    assert is_grouped(func)
    a, x, y = torch.randn(m, k), torch.randn(k), torch.empty(m)
    compile_for_cpu(func)(a, x, y)
    torch.testing.assert_close(y, a @ x, rtol=1e-4, atol=1e-4)


def test_groups_around_loops_of_columns():
    """A product that is written as loops: groups of rows of A with all of B."""

    @T.prim_func
    def loops_kernel(A: T.Tensor((10, 24)), B: T.Tensor((24, 20)), C: T.Tensor((10, 20))):
        with T.Kernel(1, threads=128):
            c = T.alloc_fragment((10, 20), "float32")
            T.clear(c)
            for i in T.serial(10):
                for k in T.serial(24):
                    for j in T.serial(20):
                        c[i, j] += A[i, k] * B[k, j]
            T.copy(c, C)

    assert is_grouped(loops_kernel)
    a, b, c = torch.randn(10, 24), torch.randn(24, 20), torch.empty(10, 20)
    compile_for_cpu(loops_kernel)(a, b, c)
    torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)
