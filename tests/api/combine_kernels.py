"""Kernels whose states are numbers in variables, or in memory of one element."""

import tilelang.language as T


def in_variables(steps):
    """A decayed sum and the largest so far, in variables."""

    @T.prim_func
    def in_variables_kernel(
        X: T.Tensor((4, steps), "float32"), Y: T.Tensor((4, steps), "float32"), E: T.Tensor((4,), "float32")
    ):
        with T.Kernel(4, threads=32) as bx:
            state = T.alloc_var("float32")
            largest = T.alloc_var("float32")
            state = 0.0
            largest = -T.infinity("float32")
            for t in T.serial(steps):
                state = state * 0.5 + X[bx, t]
                largest = T.max(largest, X[bx, t])
                Y[bx, t] = state
            E[bx] = largest

    return in_variables_kernel


def in_local_memory(steps):
    """The same in registers of one element."""

    @T.prim_func
    def in_local_memory_kernel(
        X: T.Tensor((4, steps), "float32"), Y: T.Tensor((4, steps), "float32"), E: T.Tensor((4,), "float32")
    ):
        with T.Kernel(4, threads=32) as bx:
            state = T.alloc_local((1,), "float32")
            largest = T.alloc_local((1,), "float32")
            state[0] = 0.0
            largest[0] = -T.infinity("float32")
            for t in T.serial(steps):
                state[0] = state[0] * 0.5 + X[bx, t]
                largest[0] = T.max(largest[0], X[bx, t])
                Y[bx, t] = state[0]
            E[bx] = largest[0]

    return in_local_memory_kernel
