"""Control flow, loops and buffers of TileLang kernels, interpreted, against numpy."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tilelang.language as T

from mesh_tensor.targets.interpreter import interpret, poisoned


def normal(*shape, dtype=np.float32):
    return np.random.standard_normal(shape).astype(dtype)


def test_shapes_bind_symbolic_sizes():
    m, n = T.dynamic("m"), T.dynamic("n")

    @T.prim_func
    def func(X: T.Tensor((m, n), "float32"), Y: T.Tensor(((m + 1) // 2, n), "float32"), rows: T.int32):
        with T.Kernel(T.ceildiv(m, 8), threads=128) as bx:
            for i, j in T.Parallel(4, n):
                row = bx * 4 + i
                if row * 2 < rows:
                    Y[row, j] = X[row * 2, j]

    for size in (7, 16):
        x, y = normal(size, 5), np.zeros(((size + 1) // 2, 5), np.float32)
        interpret(func, [x, y, 4], poison=True)
        np.testing.assert_array_equal(y[:2], x[:4:2])
        assert not y[2:].any()


def test_serial_reduction_under_parallel_loops():
    @T.prim_func
    def func(X: T.Tensor((6, 20), "float16"), Y: T.Tensor((6,), "float16"), Z: T.Tensor((6,), "float16")):
        with T.Kernel(1, threads=128) as _:
            for i in T.Parallel(6):
                Y[i] = 0
                for k in T.serial(20):
                    Y[i] = Y[i] + X[i, k]
            for i, j in T.Parallel(6, 20):
                Z[i] += X[i, j]

    x, y, z = normal(6, 20, dtype=np.float16), np.zeros(6, np.float16), np.ones(6, np.float16)
    expected, more = np.zeros(6, np.float16), np.ones(6, np.float16)
    for k in range(20):
        expected, more = expected + x[:, k], more + x[:, k]
    interpret(func, [x, y, z])
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(z, more)


def test_loop_carried_values_keep_their_order():
    @T.prim_func
    def func(X: T.Tensor((20,), "int32"), Y: T.Tensor((20,), "int32")):
        with T.Kernel(1, threads=128) as _:
            for i in T.serial(1, 20):
                X[i] = X[i - 1] * 2 + X[i]
            for i in T.Parallel(20):
                Y[i // 3] = i

    x, y = np.random.randint(0, 3, 20, np.int32), np.full(20, -1, np.int32)
    expected = x.copy()
    for i in range(1, 20):
        expected[i] += expected[i - 1] * 2
    interpret(func, [x, y])
    np.testing.assert_array_equal(x, expected)
    np.testing.assert_array_equal(y, [2, 5, 8, 11, 14, 17, 19] + [-1] * 13)


def test_steps_reversed_loops_while_and_break():
    @T.prim_func
    def func(X: T.Tensor((24,), "int32"), Y: T.Tensor((24,), "int32")):
        with T.Kernel(3, threads=128) as bx:
            left = T.alloc_var("int32")
            left = 8
            for i in T.serial(8):
                Y[bx * 8 + 7 - i] = X[bx * 8 + i]
            for i in T.serial(0, 8, 3):
                Y[bx * 8 + i] = -1
            while left > 5:
                left = left - 1
                Y[bx * 8 + left] = left
            for i in T.serial(8):
                if i == 2:
                    T.loop_break()
                Y[bx * 8 + i] += 100

    x, y = np.random.randint(0, 9, 24, np.int32), np.zeros(24, np.int32)
    expected = x.reshape(3, 8)[:, ::-1].copy()
    expected[:, ::3] = -1
    expected[:, 5:] = [5, 6, 7]
    expected[:, :2] += 100
    interpret(func, [x, y], poison=True)
    np.testing.assert_array_equal(y.reshape(3, 8), expected)


def test_ragged_inner_loops():
    @T.prim_func
    def func(X: T.Tensor((8, 8), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=128) as _:
            for i in T.Parallel(8):
                Y[i] = 0
                for k in T.serial(i, 8):
                    Y[i] += X[i, k]

    x, y = normal(8, 8), np.zeros(8, np.float32)
    interpret(func, [x, y], poison=True)
    np.testing.assert_allclose(y, np.triu(x).sum(1), rtol=1e-5)


def test_views_and_vectors():
    @T.prim_func
    def func(X: T.Tensor((4, 6), "float32"), Y: T.Tensor((24,), "float32")):
        with T.Kernel(1, threads=128) as _:
            x = T.alloc_shared((4, 6), "float32")
            T.copy(X, x)
            flat = T.reshape(x, (24,))
            for i in T.Parallel(24):
                flat[i] = flat[i] + i
            x[0, 0:4] = x[1, 0:4]
            T.copy(flat, Y)

    x, y = normal(4, 6), np.zeros(24, np.float32)
    interpret(func, [x, y], poison=True)
    expected = x + np.arange(24, dtype=np.float32).reshape(4, 6)
    expected[0, :4] = expected[1, :4]
    np.testing.assert_array_equal(y, expected.reshape(24))


def test_gather_swizzle_and_fused_indices():
    @T.prim_func
    def func(Table: T.Tensor((9, 6), "float32"), Ids: T.Tensor((8,), "int32"), Y: T.Tensor((8, 6), "float32")):
        with T.Kernel(4, threads=128) as bx:
            row = T.bitwise_xor(bx, 1)
            for f in T.Parallel(12):
                Y[row * 2 + f // 6, f % 6] = Table[Ids[row * 2 + f // 6], f % 6]

    table, ids, y = normal(9, 6), np.random.randint(0, 9, 8, np.int32), poisoned((8, 6), "float32")
    interpret(func, [table, ids, y], poison=True)
    np.testing.assert_array_equal(y, table[ids])


def test_empty_tensors():
    n = T.dynamic("n")

    @T.prim_func
    def func(X: T.Tensor((n, 4), "float32"), Y: T.Tensor((n, 4), "float32"), Sum: T.Tensor((4,), "float32")):
        with T.Kernel(T.ceildiv(n, 8) + 1, threads=128) as bx:
            x, s = T.alloc_fragment((8, 4), "float32"), T.alloc_fragment((4,), "float32")
            T.copy(X[bx * 8, 0], x)
            T.reduce_sum(x, s, dim=0)
            T.copy(s, Sum)
            for i, j in T.Parallel(n, 4):
                Y[i, j] = X[i, j]
            for i, j in T.Parallel(8, 4):
                Y[bx * 8 + i, j] = x[i, j]

    x, y, total = np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float32), np.ones(4, np.float32)
    interpret(func, [x, y, total])
    assert not total.any()


def test_thread_loops_run_every_thread():
    @T.prim_func
    def func(X: T.Tensor((8, 16), "float32"), Y: T.Tensor((8, 16), "float32")):
        for bx in T.thread_binding(8, "blockIdx.x"):
            for tx in T.thread_binding(16, "threadIdx.x"):
                Y[bx, tx] = X[bx, 15 - tx]

    x, y = normal(8, 16), poisoned((8, 16), "float32")
    interpret(func, [x, y], poison=True)
    np.testing.assert_array_equal(y, x[:, ::-1])


def test_one_compiled_function_runs_in_several_threads():
    @T.prim_func
    def func(X: T.Tensor((64, 8), "float32"), Y: T.Tensor((64, 8), "float32"), add: T.float32):
        with T.Kernel(16, threads=128) as bx:
            x = T.alloc_fragment((4, 8), "float32")
            T.copy(X[bx * 4, 0], x)
            for i, j in T.Parallel(4, 8):
                if i + j > bx:
                    x[i, j] = x[i, j] + add
            T.copy(x, Y[bx * 4, 0])

    x, outputs = normal(64, 8), [np.zeros((64, 8), np.float32) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: interpret(func, [x, outputs[n], n], poison=True), range(8)))
    row, column = np.indices((64, 8))
    for n, y in enumerate(outputs):
        np.testing.assert_array_equal(y, np.where(row % 4 + column > row // 4, x + np.float32(n), x))


def test_old_values_of_atomics():
    @T.prim_func
    def func(X: T.Tensor((9,), "int32"), Y: T.Tensor((9,), "int32"), Z: T.Tensor((3,), "int32")):
        with T.Kernel(1, threads=128) as _:
            for i in T.serial(9):
                if X[i] > 0:
                    p = T.atomic_add(Z[0], 1, return_prev=True)
                    Y[p] = T.atomic_max(Z[1], X[i], return_prev=True)
                elif T.atomic_min(Z[2], X[i], return_prev=True) > X[i]:
                    Y[8] += 100

    x = np.array([3, 0, 1, -2, 5, -1, 4, -3, 6], np.int32)
    y, z = np.zeros(9, np.int32), np.array([0, 2, 0], np.int32)
    interpret(func, [x, y, z], poison=True)
    np.testing.assert_array_equal(y, [2, 3, 3, 5, 5, 0, 0, 0, 200])
    np.testing.assert_array_equal(z, [5, 6, -3])


def test_a_program_that_returns():
    @T.prim_func
    def func(X: T.Tensor((9,), "int32"), Y: T.Tensor((9,), "int32")):
        with T.Kernel(9, threads=128) as bx:
            if X[bx] > 4:
                T.thread_return()
            Y[bx] = X[bx]

    x, y = np.random.randint(0, 9, 9, np.int32), np.full(9, -1, np.int32)
    interpret(func, [x, y])
    np.testing.assert_array_equal(y, np.where(x > 4, -1, x))
