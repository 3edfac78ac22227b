"""Small kernels in global view, and what one device is expected to run of them, written by hand."""

import tilelang.language as T
from tvm import tirx

INF = float("inf")


def matmul(M, N, K, block=16, dtype="float32", accum="float32", out="float32", name="matmul"):
    """C = A @ B, accumulated in `accum`."""

    @T.prim_func
    def kernel(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), out)):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block, block), dtype)
            B_shared = T.alloc_shared((block, block), dtype)
            C_local = T.alloc_fragment((block, block), accum)
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(K, block), num_stages=2):
                T.copy(A[by * block, ko * block], A_shared)
                T.copy(B[ko * block, bx * block], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C[by * block, bx * block])

    return kernel.with_attr("global_symbol", name)


def row_sums(M, N, block=8, name="row_sums"):
    """B[m] = sum_n A[m, n], whole rows in a block."""

    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M,), "float32")):
        with T.Kernel(T.ceildiv(M, block), threads=32) as bx:
            a = T.alloc_fragment((block, N), "float32")
            b = T.alloc_fragment((block,), "float32")
            T.copy(A[bx * block, 0], a)
            T.reduce_sum(a, b, dim=1)
            T.copy(b, B[bx * block])

    return kernel.with_attr("global_symbol", name)


def scale(M, N, block=8, factor=2.0, name="scale"):
    """B = factor * A, with direct loads and stores."""

    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(M, block), T.ceildiv(N, block), threads=32) as (bx, by):
            for i, j in T.Parallel(block, block):
                B[bx * block + i, by * block + j] = A[bx * block + i, by * block + j] * factor

    return kernel.with_attr("global_symbol", name)


def gelu(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """The tanh approximation of gelu."""
    return 0.5 * value * (1.0 + T.tanh(0.7978845608 * (value + 0.044715 * value * value * value)))


def halved_sums():
    """A state that devices take turns at, beside a parameter that is not used."""

    @T.prim_func
    def with_unused(
        a: T.Tensor((3, 12), "float32"), unused: T.Tensor((3, 4), "float32"), out: T.Tensor((3,), "float32")
    ):
        with T.Kernel(3, threads=32) as i:
            state = T.alloc_fragment((1,), "float32")
            T.clear(state)
            for k in T.serial(12):
                state[0] = T.max(state[0], a[i, k]) * 0.5
            out[i] = state[0]

    return with_unused


def unused_parameter():
    """Two kernels in one function, neither of which uses one of its parameters."""

    @T.prim_func
    def with_unused(
        a: T.Tensor((6,), "float32"),
        unused: T.Tensor((3, 4), "float32"),
        first: T.Tensor((6,), "float32"),
        second: T.Tensor((6,), "float32"),
    ):
        with T.Kernel(6, threads=32) as i:
            first[i] = a[i] + 1.0
        with T.Kernel(6, threads=32) as i:
            second[i] = first[5 - i]

    return with_unused
