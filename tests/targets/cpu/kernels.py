"""Kernels that several tests of the CPU runtime compile."""

import tilelang.language as T


def dynamic_scale(scale):
    M, N = T.dynamic("m"), T.dynamic("n")

    @T.prim_func
    def scale_kernel(X: T.Tensor((M, N)), Y: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(N, 32), T.ceildiv(M, 16), threads=128) as (bx, by):
            x = T.alloc_shared((16, 32), "float32")
            T.copy(X[by * 16, bx * 32], x)
            for i, j in T.Parallel(16, 32):
                x[i, j] = x[i, j] * scale
            T.copy(x, Y[by * 16, bx * 32])

    return scale_kernel
