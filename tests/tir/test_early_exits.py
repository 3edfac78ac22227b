"""What is given up early becomes a condition around the rest."""

import tilelang.language as T
from tvm import ir

from mesh_tensor.tir.plain_statements import without_early_exits


def exits():
    @T.prim_func
    def kernel(A: T.Tensor((8, 9), "float32"), L: T.Tensor((1,), "int32"), Y: T.Tensor((8, 9), "float32")):
        with T.Kernel(8, threads=32) as b:
            if b >= L[0]:
                T.thread_return()
            for i in T.serial(9):
                if A[b, i] < 0.0:
                    Y[b, i] = 0.0
                    continue
                Y[b, i] = A[b, i]
            Y[b, 0] = Y[b, 0] + 1.0

    return kernel


def conditions():
    @T.prim_func
    def kernel(A: T.Tensor((8, 9), "float32"), L: T.Tensor((1,), "int32"), Y: T.Tensor((8, 9), "float32")):
        with T.Kernel(8, threads=32) as b:
            if not b >= L[0]:
                for i in T.serial(9):
                    if A[b, i] < 0.0:
                        Y[b, i] = 0.0
                    else:
                        Y[b, i] = A[b, i]
                Y[b, 0] = Y[b, 0] + 1.0

    return kernel


def inner():
    """The rest of the iteration is not all that stands behind the exit in its branch."""

    @T.prim_func
    def kernel(A: T.Tensor((8, 9), "float32"), Y: T.Tensor((8, 9), "float32")):
        with T.Kernel(8, threads=32) as b:
            for i in T.serial(9):
                if i > 3:
                    if A[b, i] < 0.0:
                        continue
                    Y[b, i] = A[b, i]
                Y[b, i] = Y[b, i] + 1.0

    return kernel


def test_what_follows_an_exit_is_the_other_branch():
    made = without_early_exits(exits())
    assert ir.structural_equal(made.body, conditions().body, map_free_vars=True)


def test_an_exit_out_of_the_middle_stays():
    func = inner()
    assert ir.structural_equal(without_early_exits(func).body, func.body)


def test_a_kernel_without_exits_is_the_same():
    func = conditions()
    assert without_early_exits(func).same_as(func)
