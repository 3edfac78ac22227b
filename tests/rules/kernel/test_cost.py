"""What kernels compute, counted."""

import tilelang.language as T

from mesh_tensor.rules.kernel.cost import count_flops, flops_function


def test_loops_count_as_often_as_they_certainly_run():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), N: T.Tensor((1,), "int32"), C: T.Tensor((8,))):
        with T.Kernel(1, threads=32):
            last = T.alloc_var("int32", init=0)
            last = N[0] + 1
            for i in T.serial(8):
                C[i] = A[i] * 2.0
            for i in T.serial(N[0]):
                C[i] = A[i] * 3.0 + 1.0
            for i in T.serial(N[0] + 2, last):
                C[i] = A[i] + 1.0

    assert count_flops(kernel) == 8 + 2 + 1


def test_sizes_are_symbols():
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((n,)), N: T.Tensor((1,), "int32"), C: T.Tensor((n,))):
        with T.Kernel(T.ceildiv(n, 4), threads=32) as bx:
            for i in T.Parallel(4):
                C[bx * 4 + i] = A[bx * 4 + i] * 2.0
            for i in T.serial(N[0] * n):
                C[i] = A[i] * 3.0

    assert flops_function(kernel, [n])([10]) == 12 + 3
