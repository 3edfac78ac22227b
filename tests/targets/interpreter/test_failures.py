"""What the interpreter refuses, and that its messages say what, where and why."""

from functools import partial

import numpy as np
import pytest
import tilelang.language as T
from tvm import ir, tirx

from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.lowering.lower import register
from mesh_tensor.targets.interpreter import interpret, poisoned
from tests.refusals import refusal

refused = partial(refusal, interpret)


@T.prim_func
def scale(X: T.Tensor((8, 4), "float32"), Y: T.Tensor((8, 4), "float32"), by: T.float32):
    with T.Kernel(1, threads=128) as _:
        for i, j in T.Parallel(8, 4):
            Y[i, j] = X[i, j] * by


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


def test_wrong_arguments():
    x = ones(8, 4)
    assert "takes 3 arguments, not 2" in refused(scale, [x, x])
    assert "'X' takes a numpy array, not list" in refused(scale, [[1.0], x, 2.0])
    message = refused(scale, [x, ones(8, 4, dtype="float64"), 2.0])
    assert "'Y' has dtype float32, the array given has float64" in message
    assert "'Y' has 2 dims, the array given has shape (8,)" in refused(scale, [x, ones(8), 2.0])
    message = refused(scale, [ones(8, 5), x, 2.0])
    assert "'X'" in message
    assert "[8, 4]" in message
    assert "(8, 5)" in message
    assert "scalar parameter 'by' was given an array" in refused(scale, [x, x, x])


def test_symbolic_sizes_that_disagree():
    n = T.dynamic("n")

    @T.prim_func
    def func(X: T.Tensor((n, 4), "float32"), Y: T.Tensor(((n + 1) // 2, n), "float32")):
        with T.Kernel(1, threads=128) as _:
            Y[0, 0] = X[0, 0]

    interpret(func, [ones(5, 4), ones(3, 5)])
    message = refused(func, [ones(5, 4), ones(2, 5)])
    assert "'Y'" in message
    assert "(3, 5)" in message
    assert "(2, 5)" in message


def outside(lanes):
    kind = T.Parallel if lanes else T.serial

    @T.prim_func
    def func(X: T.Tensor((8, 4), "float32"), Y: T.Tensor((8, 4), "float32"), start: T.int32, to: T.int32):
        with T.Kernel(1, threads=128) as _:
            total = T.alloc_var("float32")
            total = 0
            for i in kind(4):
                if i != 1:
                    Y[2, i + to] = X[start + i, 3]
                    if not lanes:
                        total = total + X[start + i, 3]

    return func


@pytest.mark.parametrize("lanes", [True, False])
def test_poisoned_accesses_outside_a_parameter(lanes):
    func = outside(lanes)
    interpret(func, [ones(8, 4), ones(8, 4), 4, 0], poison=True)
    message = refused(func, [ones(8, 4), ones(8, 4), 6, 0], poison=True)
    assert "reads X[8, 3]" in message
    assert "shape (8, 4)" in message
    message = refused(func, [ones(8, 4), ones(8, 4), -1, 0], poison=True)
    assert "reads X[-1, 3]" in message
    message = refused(func, [ones(8, 4), ones(8, 4), 0, 2], poison=True)
    assert "writes Y[2, 4]" in message
    interpret(func, [ones(8, 4), ones(8, 4), 6, 2])


@pytest.mark.parametrize("poison", [True, False])
def test_accesses_outside_an_on_chip_buffer_always_raise(poison):
    @T.prim_func
    def elements(X: T.Tensor((8,), "float32"), at: T.int32):
        with T.Kernel(1, threads=128) as _:
            x = T.alloc_shared((8,), "float32")
            for i in T.Parallel(8):
                x[i + at] = X[i]

    interpret(elements, [ones(8), 0], poison=poison)
    assert "writes x[8]" in refused(elements, [ones(8), 1], poison=poison)

    @T.prim_func
    def boxes(X: T.Tensor((8, 8), "float32"), at: T.int32):
        with T.Kernel(1, threads=128) as _:
            x, y = T.alloc_shared((8, 8), "float32"), T.alloc_fragment((4, 4), "float32")
            T.copy(X, x)
            T.fill(x[at : at + 4, 0], 1)
            T.gemm(x[at : at + 4, 0:4], x[0:4, 0:4], y)

    interpret(boxes, [ones(8, 8), 4], poison=poison)
    message = refused(boxes, [ones(8, 8), 6], poison=poison)
    assert "[6, 0]" in message
    assert "of x" in message
    assert "(8, 8)" in message


def test_poison_reaches_the_result():
    @T.prim_func
    def func(Y: T.Tensor((4, 4), "float32"), Z: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=128) as _:
            y, z = T.alloc_fragment((4, 4), "float32"), T.alloc_fragment((4,), "int32")
            for i in T.Parallel(3):
                y[i, 0] = 1
                z[i] = 1
            T.copy(y, Y)
            T.copy(z, Z)

    y, z = ones(4, 4), ones(4, dtype="int32")
    interpret(func, [y, z], poison=True)
    assert np.isnan(y).sum() == 16 - 3
    assert z.tolist() == [1, 1, 1, np.iinfo(np.int32).min]
    interpret(func, [y, z])
    assert y.sum() == z.sum() == 3


def test_poisoned_arrays():
    assert np.isnan(poisoned((2, 3), "bfloat16").astype(np.float32)).all()
    assert np.isnan(poisoned((2,), np.dtype("float16"))).all()
    assert (poisoned((2,), "int8") == -128).all()
    assert (poisoned((2,), "uint8") == 255).all()
    assert poisoned((2, 0), "bool").shape == (2, 0)
    with pytest.raises(MeshTensorError, match="no numpy dtype for 'custom8'"):
        poisoned((1,), "custom8")


def test_thread_indices():
    @T.prim_func
    def func(Y: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=128) as _:
            Y[T.get_thread_binding()] = 1

    message = refused(func, [ones(128, dtype="int32")])
    assert "'tx'" in message
    assert "thread" in message


def evaluate(name, dtype="handle"):
    return tirx.PrimFunc([], tirx.Evaluate(tirx.Call(dtype, ir.Op.get(name), [])))


def test_unknown_operations_are_named():
    assert "tl.sync_grid" in refused(evaluate("tl.sync_grid"), [])
    register()
    message = refused(evaluate("mesh.all_reduce"), [])
    assert "mesh.all_reduce" in message
    assert "collective" in message


def test_vectors_in_several_dims():
    """Of as many rows as columns the diagonal was stored, and nothing else."""

    @T.prim_func
    def squares(X: T.Tensor((8, 4), "float32"), Y: T.Tensor((8, 4), "float32")):
        with T.Kernel(2, threads=128) as bx:
            Y[bx * 4 : bx * 4 + 4, 0:4] = X[bx * 4 : bx * 4 + 4, 0:4]

    message = refused(squares, [ones(8, 4), ones(8, 4)])
    assert "'Y' has vectors in several dims" in message
    assert "T.copy" in message


def test_division_by_zero():
    @T.prim_func
    def func(Y: T.Tensor((4,), "int32"), n: T.int32):
        with T.Kernel(1, threads=128) as bx:
            Y[0] = (bx + 3) // n

    assert "divides an integer by zero" in refused(func, [ones(4, dtype="int32"), 0])
