"""Expressions of TileLang kernels, interpreted, against numpy."""

import math

import numpy as np
import pytest
import tilelang.language as T
import torch

from mesh_tensor.targets.interpreter import interpret, poisoned


def normal(*shape, dtype=np.float32):
    return np.random.standard_normal(shape).astype(dtype)


FUNCTIONS = {
    "exp": (T.exp, np.exp),
    "exp2": (T.exp2, np.exp2),
    "log": (T.log, np.log),
    "log2": (T.log2, np.log2),
    "log1p": (T.log1p, np.log1p),
    "sqrt": (T.sqrt, np.sqrt),
    "rsqrt": (T.rsqrt, lambda x: 1 / np.sqrt(x)),
    "tanh": (T.tanh, np.tanh),
    "sigmoid": (T.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "erf": (T.erf, np.vectorize(math.erf)),
    "sin": (T.sin, np.sin),
    "cos": (T.cos, np.cos),
    "floor": (T.floor, np.floor),
    "ceil": (T.ceil, np.ceil),
    "round": (T.round, np.round),
    "abs": (T.abs, np.abs),
    "square": (lambda x: T.pow(x, T.cast(2, x.dtype)), np.square),
}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, dtype):
    function, reference = FUNCTIONS[name]

    @T.prim_func
    def func(X: T.Tensor((100,), dtype), Y: T.Tensor((100,), dtype), One: T.Tensor((1,), dtype)):
        with T.Kernel(1, threads=128) as _:
            for i in T.Parallel(100):
                Y[i] = function(X[i])
            One[0] = function(X[0])

    x = np.random.uniform(0.1, 3, 100).astype(dtype)
    y, one = np.zeros_like(x), np.zeros(1, dtype)
    interpret(func, [x, y, one])
    tolerance = {"float16": 1e-3, "float32": 2e-6, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(y, reference(x.astype(np.float64)).astype(dtype), rtol=tolerance, atol=tolerance)
    assert one[0] == y[0]


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint64"])
def test_leading_zeros(dtype):
    bits, limits = np.dtype(dtype).itemsize * 8, np.iinfo(dtype)

    @T.prim_func
    def func(X: T.Tensor((5,), dtype), Y: T.Tensor((5,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(5):
                Y[i] = T.clz(X[i])

    x, y = np.array([0, 1, 5, limits.max, limits.min], dtype), np.zeros(5, np.int32)
    interpret(func, [x, y])
    assert y.tolist() == [bits - (int(value) % 2**bits).bit_length() for value in x]


@pytest.mark.parametrize("scalar", [False, True])
def test_integer_division_rounds_as_tir_says(scalar):
    kind = T.serial if scalar else T.Parallel

    @T.prim_func
    def func(X: T.Tensor((21,), "int32"), Y: T.Tensor((4, 21), "int32")):
        with T.Kernel(1, threads=128) as _:
            v = T.alloc_var("int32")
            for i in kind(21):
                v = X[i] if scalar else 0
                Y[0, i] = (v if scalar else X[i]) // 4
                Y[1, i] = (v if scalar else X[i]) % 4
                Y[2, i] = T.truncdiv(v if scalar else X[i], 4)
                Y[3, i] = T.truncmod(v if scalar else X[i], 4)

    x, y = np.arange(-10, 11, dtype=np.int32), np.zeros((4, 21), np.int32)
    interpret(func, [x, y])
    np.testing.assert_array_equal(y, [x // 4, x % 4, np.trunc(x / 4), np.fmod(x, 4)])


def test_bits_casts_and_limits():
    @T.prim_func
    def func(X: T.Tensor((50,), "float32"), N: T.Tensor((5, 50), "int32"), F: T.Tensor((3, 50), "float32")):
        with T.Kernel(1, threads=128) as _:
            for i in T.Parallel(50):
                N[0, i] = T.cast(X[i], "int32")
                N[1, i] = T.reinterpret(X[i], "int32")
                N[2, i] = T.bitwise_xor(i << 3, T.bitwise_or(i >> 1, T.bitwise_and(i, 5)))
                N[3, i] = T.cast(T.cast(i * 10, "int8"), "int32")
                N[4, i] = T.min(T.max(i, 7), T.max_value("int32"))
                F[0, i] = T.if_then_else(T.isnan(X[i]), T.infinity("float32"), T.clamp(X[i], -1.0, 1.0))
                F[1, i] = T.Select(X[i] > 0, T.cast(T.cast(X[i], "bfloat16"), "float32"), T.min_value("float32"))
                F[2, i] = T.cast(X[i] > 0 and i < 40 or not i < 49, "float32")

    x, ints, floats = normal(50) * 10, np.zeros((5, 50), np.int32), np.zeros((3, 50), np.float32)
    x[3] = np.nan
    interpret(func, [x, ints, floats])
    i = np.arange(50, dtype=np.int32)
    valid = ~np.isnan(x)
    np.testing.assert_array_equal(ints[0][valid], np.trunc(x[valid]))
    np.testing.assert_array_equal(ints[1], x.view(np.int32))
    np.testing.assert_array_equal(ints[2], (i << 3) ^ ((i >> 1) | (i & 5)))
    np.testing.assert_array_equal(ints[3], (i * 10).astype(np.int8))
    np.testing.assert_array_equal(ints[4], np.maximum(i, 7))
    np.testing.assert_array_equal(floats[0], np.where(valid, np.clip(x, -1, 1), np.inf))
    rounded = torch.from_numpy(x).bfloat16().float().numpy()
    np.testing.assert_array_equal(floats[1], np.where(x > 0, rounded, np.finfo(np.float32).min))
    np.testing.assert_array_equal(floats[2], (x > 0) & (i < 40) | (i >= 49))


def test_branches_not_taken_read_nothing():
    @T.prim_func
    def func(X: T.Tensor((10,), "float32"), Y: T.Tensor((3, 16), "float32")):
        with T.Kernel(1, threads=128) as _:
            for i in T.Parallel(16):
                Y[0, i] = T.if_then_else(i < 10, X[i], 0.0)
                Y[1, i] = T.if_then_else(i >= 6 and X[i - 6] > 0, 1.0, 2.0)
                if i >= 3:
                    if i < 13:
                        Y[2, i] = X[i - 3]
                    else:
                        Y[2, i] = 5.0
                else:
                    Y[2, i] = 7.0

    x, y = normal(10), poisoned((3, 16), "float32")
    interpret(func, [x, y], poison=True)
    np.testing.assert_array_equal(y[0], np.concatenate([x, np.zeros(6)]))
    np.testing.assert_array_equal(y[1], np.concatenate([np.full(6, 2), np.where(x > 0, 1, 2)]))
    np.testing.assert_array_equal(y[2], np.concatenate([np.full(3, 7), x, np.full(3, 5)]))


def test_outside_a_parameter_reads_zero_and_writes_nothing():
    @T.prim_func
    def func(X: T.Tensor((10,), "float32"), Y: T.Tensor((10,), "float32")):
        with T.Kernel(1, threads=128) as _:
            for i in T.Parallel(16):
                Y[i - 2] = X[i - 4] + 1
            Y[X.shape[0] + 3] = X[T.int32(0) - 1]

    x, y = normal(10), np.zeros(10, np.float32)
    interpret(func, [x, y])
    np.testing.assert_array_equal(y, np.concatenate([np.ones(2), x[:8] + 1]))
