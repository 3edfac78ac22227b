"""Each tile operation of TileLang kernels, interpreted, against numpy."""

import ml_dtypes
import numpy as np
import pytest
import tilelang.language as T

from mesh_tensor.targets.interpreter import interpret, poisoned

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def normal(*shape, dtype=np.float32):
    return np.random.standard_normal(shape).astype(dtype)


def whole(compute, n_in, shape, out_shape=None, dtype="float32", out_dtype=None):
    """A kernel of one block that copies `n_in` inputs on chip, calls `compute(*inputs, out)` and copies `out` back."""
    out_shape, out_dtype = out_shape or shape, out_dtype or dtype

    if n_in == 1:

        @T.prim_func
        def unary(X: T.Tensor(shape, dtype), Y: T.Tensor(out_shape, out_dtype)):
            with T.Kernel(1, threads=128) as _:
                x, y = T.alloc_fragment(shape, dtype), T.alloc_fragment(out_shape, out_dtype)
                T.copy(X, x)
                T.copy(Y, y)
                compute(x, y)
                T.copy(y, Y)

        return unary

    @T.prim_func
    def binary(X0: T.Tensor(shape, dtype), X1: T.Tensor(shape, dtype), Y: T.Tensor(out_shape, out_dtype)):
        with T.Kernel(1, threads=128) as _:
            x0, x1 = T.alloc_fragment(shape, dtype), T.alloc_fragment(shape, dtype)
            y = T.alloc_fragment(out_shape, out_dtype)
            T.copy(X0, x0)
            T.copy(X1, x1)
            T.copy(Y, y)
            compute(x0, x1, y)
            T.copy(y, Y)

    return binary


def test_matmul_over_grid_and_ragged_blocks():
    @T.prim_func
    def func(A: T.Tensor((30, 7), "float32"), B: T.Tensor((7, 13), "float32"), C: T.Tensor((30, 13), "float32")):
        with T.Kernel(T.ceildiv(13, 8), T.ceildiv(30, 8), threads=128) as (bx, by):
            a, b = T.alloc_shared((8, 4), "float32"), T.alloc_shared((4, 8), "float32")
            c = T.alloc_fragment((8, 8), "float32")
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(7, 4), num_stages=2):
                T.copy(A[by * 8, k * 4], a)
                T.copy(B[k * 4, bx * 8], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 8, bx * 8])

    a, b, c = normal(30, 7), normal(7, 13), poisoned((30, 13), "float32")
    interpret(func, [a, b, c], poison=True)
    np.testing.assert_allclose(c, a @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "accum"),
    [
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float16", "float16"),
        ("int8", "int32"),
        ("float64", "float64"),
    ],
)
@pytest.mark.parametrize(("trans_a", "trans_b"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("clear", [False, True])
def test_gemm(dtype, accum, trans_a, trans_b, clear):
    a_shape, b_shape = (5, 4) if trans_a else (4, 5), (6, 5) if trans_b else (5, 6)

    @T.prim_func
    def func(A: T.Tensor(a_shape, dtype), B: T.Tensor(b_shape, dtype), C: T.Tensor((4, 6), accum)):
        with T.Kernel(1, threads=128) as _:
            a, b = T.alloc_shared(a_shape, dtype), T.alloc_shared(b_shape, dtype)
            c = T.alloc_fragment((4, 6), accum)
            T.copy(A, a)
            T.copy(B, b)
            T.copy(C, c)
            T.gemm(a, b, c, transpose_A=trans_a, transpose_B=trans_b, clear_accum=clear)
            T.copy(c, C)

    small = np.arange(-10, 10).astype(np.dtype(dtype))
    a, b = np.random.choice(small, a_shape), np.random.choice(small, b_shape)
    c = np.random.choice(small, (4, 6)).astype(accum)
    left, right = (m.astype(np.float64) for m in (a.T if trans_a else a, b.T if trans_b else b))
    expected = left @ right + (0 if clear else c.astype(np.float64))
    interpret(func, [a, b, c])
    np.testing.assert_array_equal(c.astype(np.float64), expected)  # small integers: exact in every dtype


REDUCTIONS = {
    "sum": np.add.reduce,
    "abssum": lambda x, axis: np.abs(x).sum(axis),
    "max": np.maximum.reduce,
    "min": np.minimum.reduce,
    "absmax": lambda x, axis: np.abs(x).max(axis),
    "bitand": np.bitwise_and.reduce,
    "bitor": np.bitwise_or.reduce,
    "bitxor": np.bitwise_xor.reduce,
}
COMBINES = {"sum": np.add, "abssum": np.add, "min": np.minimum, "bitand": np.bitwise_and, "bitor": np.bitwise_or}
COMBINES |= {"max": np.maximum, "absmax": np.maximum, "bitxor": np.bitwise_xor}


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, "int32") for op in REDUCTIONS] + [("sum", "float32"), ("max", "float16"), ("min", "bfloat16")],
)
@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_reduce(op, dtype, clear, dim):
    reduce = getattr(T, f"reduce_{op}")
    always_clear = op in ("abssum", "absmax")
    out_shape = (6,) if dim == 0 else (4,)

    def compute(x, y):
        if always_clear:
            reduce(x, y, dim=dim)
        else:
            reduce(x, y, dim=dim, clear=clear)

    x = np.random.randint(-20, 20, (4, 6)).astype(np.dtype(dtype))
    y = np.random.randint(-20, 20, out_shape).astype(np.dtype(dtype))
    expected = REDUCTIONS[op](x, axis=dim).astype(np.dtype(dtype))
    if not (clear or always_clear):
        expected = COMBINES[op](expected, y)
    interpret(whole(compute, 1, (4, 6), out_shape, dtype), [x, y])
    np.testing.assert_array_equal(y, expected)


def test_float16_sum_is_rounded_once():
    x, y = np.full((1, 3000), 1, np.float16), np.zeros(1, np.float16)
    interpret(whole(lambda x, y: T.reduce_sum(x, y, dim=1), 1, (1, 3000), (1,), "float16"), [x, y])
    assert y[0] == 3000  # adding one by one in float16 would stop at 2048


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_cumsum(reverse, dim):
    def compute(x, y):
        T.cumsum(x, y, dim=dim, reverse=reverse)

    x, y = normal(4, 6), normal(4, 6)
    interpret(whole(compute, 1, (4, 6)), [x, y], poison=True)
    flip = (lambda a: np.flip(a, dim)) if reverse else (lambda a: a)
    np.testing.assert_allclose(y, flip(np.cumsum(flip(x), dim)), rtol=1e-6)


def test_cummax():
    x, y = normal(4, 6), normal(4, 6)
    interpret(whole(lambda x, y: T.cummax(x, y, dim=1), 1, (4, 6)), [x, y])
    np.testing.assert_array_equal(y, np.maximum.accumulate(x, 1))


@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (5, 1), (1, 1)])
def test_transpose_of_a_row(rows, columns):
    @T.prim_func
    def func(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((columns, rows), "float32")):
        with T.Kernel(1, threads=32) as _:
            x = T.alloc_shared((rows, columns), "float32")
            y = T.alloc_shared((columns, rows), "float32")
            T.copy(X, x)
            T.transpose(x, y)
            T.copy(y, Y)

    x, y = normal(rows, columns), np.zeros((columns, rows), np.float32)
    interpret(func, [x, y], poison=True)
    np.testing.assert_array_equal(y, x.T)


def test_transpose_tile_op():
    @T.prim_func
    def func(X: T.Tensor((10, 7), "float32"), Y: T.Tensor((7, 10), "float32")):
        with T.Kernel(3, threads=128) as bx:
            x, y = T.alloc_shared((4, 7), "float32"), T.alloc_shared((7, 4), "float32")
            T.copy(X[bx * 4, 0], x)
            T.transpose(x, y)
            T.copy(y, Y[0, bx * 4])

    x, y = normal(10, 7), poisoned((7, 10), "float32")
    interpret(func, [x, y], poison=True)
    np.testing.assert_array_equal(y, x.T)


@pytest.mark.parametrize(("op", "start"), [("add", 0), ("max", -9), ("min", 9)])
def test_tile_atomics_from_many_blocks(op, start):
    atomic = getattr(T, f"atomic_{op}")

    @T.prim_func
    def func(X: T.Tensor((10, 5), "float32"), Y: T.Tensor((4, 5), "float32")):
        with T.Kernel(3, threads=128) as bx:
            x = T.alloc_fragment((4, 5), "float32")
            T.copy(X[bx * 4, 0], x)
            if bx < 2:
                atomic(Y[0, 0], x)

    x, y = normal(10, 5), np.full((4, 5), start, np.float32)
    combine = {"add": np.add, "max": np.maximum, "min": np.minimum}[op]
    expected = combine(combine(y, x[:4]), x[4:8])
    interpret(func, [x, y])
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_element_atomics_that_collide():
    @T.prim_func
    def func(X: T.Tensor((40,), "int32"), Bins: T.Tensor((5,), "int32"), Most: T.Tensor((1,), "int32")):
        with T.Kernel(4, threads=128) as bx:
            for i in T.Parallel(10):
                T.atomic_add(Bins[X[bx * 10 + i]], 1)
                T.atomic_max(Most[0], X[bx * 10 + i] * 7)

    x, bins, most = np.random.randint(0, 5, 40, np.int32), np.ones(5, np.int32), np.zeros(1, np.int32)
    interpret(func, [x, bins, most], poison=True)
    np.testing.assert_array_equal(bins, 1 + np.bincount(x, minlength=5))
    assert most[0] == 7 * x.max()


def test_atomic_add_of_a_value_to_every_element():
    @T.prim_func
    def func(Y: T.Tensor((4, 5), "float32")):
        with T.Kernel(3, threads=128) as _:
            T.atomic_add(Y[0:4, 1:3], T.float32(2))

    y = np.zeros((4, 5), np.float32)
    interpret(func, [y])
    assert y[:, 1:3].min() == 6
    assert y.sum() == 6 * 8


def test_copy_clips_at_both_ends_and_drops_single_dims():
    @T.prim_func
    def func(X: T.Tensor((3, 10), "float32"), Y: T.Tensor((12,), "float16")):
        with T.Kernel(1, threads=128) as _:
            x = T.alloc_shared((8,), "float32")
            T.copy(X[1, -3:5], x)
            T.copy(x, Y[0:8])
            T.copy(X[2, 6:14], x)
            T.copy(x, Y[7:15])

    x, y = normal(3, 10), np.zeros(12, np.float16)
    interpret(func, [x, y], poison=True)
    expected = np.concatenate([np.zeros(3), x[1, :4], x[2, 6:10], np.zeros(1)]).astype(np.float16)
    np.testing.assert_array_equal(y, expected)


def test_dtype_of_arithmetic_is_the_operands():
    @T.macro
    def compute(x0, x1, y):
        for i in T.Parallel(64):
            y[i] = x0[i] * x1[i] + x0[i]

    for dtype in (np.float16, BFLOAT16, np.int8, np.uint8):
        x0, x1 = (np.random.randint(0, 100, 64).astype(dtype) for _ in range(2))
        y = np.zeros(64, dtype)
        interpret(whole(compute, 2, (64,), dtype=np.dtype(dtype).name), [x0, x1, y])
        np.testing.assert_array_equal(y, x0 * x1 + x0)
