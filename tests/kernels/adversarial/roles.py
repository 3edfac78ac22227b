"""Tensors with more than one role, dims of size 1, and dims that several loops walk."""

import tilelang.language as T

from kernels.catalogue.case import EXACT, KernelCase, Tolerance, normal, tensors
from kernels.catalogue.sizes import MN
from kernels.matmul import matmul, matmul_reference


def gram(M, K, block=8):
    """`C[i, j] = sum_k A[i, k] * A[j, k]`: A's rows index both dims of C."""

    @T.prim_func
    def gram_kernel(A: T.Tensor((M, K)), C: T.Tensor((M, M))):
        with T.Kernel(T.ceildiv(M, block), T.ceildiv(M, block), threads=128) as (bx, by):
            rows = T.alloc_shared((block, block), "float32")
            columns = T.alloc_shared((block, block), "float32")
            C_local = T.alloc_fragment((block, block), "float32")
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(K, block), num_stages=2):
                T.copy(A[by * block, ko * block], rows)
                T.copy(A[bx * block, ko * block], columns)
                T.gemm(rows, columns, C_local, transpose_B=True)
            T.copy(C_local, C[by * block, bx * block])

    return gram_kernel


def square(N, block=8):
    """`C = A @ A`: both of A's dims are contracted, one per use."""

    @T.prim_func
    def square_kernel(A: T.Tensor((N, N)), C: T.Tensor((N, N))):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(N, block), threads=128) as (bx, by):
            left = T.alloc_shared((block, block), "float32")
            right = T.alloc_shared((block, block), "float32")
            C_local = T.alloc_fragment((block, block), "float32")
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(N, block), num_stages=2):
                T.copy(A[by * block, ko * block], left)
                T.copy(A[ko * block, bx * block], right)
                T.gemm(left, right, C_local)
            T.copy(C_local, C[by * block, bx * block])

    return square_kernel


def symmetrise(N, block=8):
    """`B = A + A^T`."""

    @T.prim_func
    def symmetrise_kernel(A: T.Tensor((N, N)), B: T.Tensor((N, N))):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(N, block), threads=128) as (bx, by):
            tile = T.alloc_shared((block, block), "float32")
            mirrored = T.alloc_shared((block, block), "float32")
            out = T.alloc_fragment((block, block), "float32")
            T.copy(A[by * block, bx * block], tile)
            T.copy(A[bx * block, by * block], mirrored)
            for i, j in T.Parallel(block, block):
                out[i, j] = tile[i, j] + mirrored[j, i]
            T.copy(out, B[by * block, bx * block])

    return symmetrise_kernel


def two_products(M, N, K, L, block=8):
    """`C = A @ B + D @ E`: one accumulator, two contractions of different lengths."""

    @T.prim_func
    def two_products_kernel(
        A: T.Tensor((M, K)), B: T.Tensor((K, N)), D: T.Tensor((M, L)), E: T.Tensor((L, N)), C: T.Tensor((M, N))
    ):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            left = T.alloc_shared((block, block), "float32")
            right = T.alloc_shared((block, block), "float32")
            C_local = T.alloc_fragment((block, block), "float32")
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(K, block), num_stages=2):
                T.copy(A[by * block, ko * block], left)
                T.copy(B[ko * block, bx * block], right)
                T.gemm(left, right, C_local)
            for lo in T.Pipelined(T.ceildiv(L, block), num_stages=2):
                T.copy(D[by * block, lo * block], left)
                T.copy(E[lo * block, bx * block], right)
                T.gemm(left, right, C_local)
            T.copy(C_local, C[by * block, bx * block])

    return two_products_kernel


def two_products_reference(a, b, d, e):
    return (a.double() @ b.double() + d.double() @ e.double()).float()


def chained_products(M, N, K, block=8):
    """`C = (A @ B) @ E` for one block of rows at a time; the middle result never leaves the program."""

    @T.prim_func
    def chained_products_kernel(A: T.Tensor((M, K)), B: T.Tensor((K, N)), E: T.Tensor((N, K)), C: T.Tensor((M, K))):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            A_shared = T.alloc_shared((block, K), "float32")
            B_shared = T.alloc_shared((K, block), "float32")
            E_shared = T.alloc_shared((block, K), "float32")
            middle = T.alloc_fragment((block, block), "float32")
            C_local = T.alloc_fragment((block, K), "float32")
            T.copy(A[by * block, 0], A_shared)
            T.clear(C_local)
            for no in T.serial(T.ceildiv(N, block)):
                T.copy(B[0, no * block], B_shared)
                T.copy(E[no * block, 0], E_shared)
                T.clear(middle)
                T.gemm(A_shared, B_shared, middle)
                T.gemm(middle, E_shared, C_local)
            T.copy(C_local, C[by * block, 0])

    return chained_products_kernel


def second_half_sum(M, N, block=8):
    """`B[m] = sum of A[m, N // 2 :]`: only a part of a dim is read."""
    start = N // 2

    @T.prim_func
    def second_half_sum_kernel(A: T.Tensor((M, N)), B: T.Tensor((M,))):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            tile = T.alloc_fragment((block, N - start), "float32")
            total = T.alloc_fragment((block,), "float32")
            T.copy(A[by * block, start], tile)
            T.reduce_sum(tile, total, dim=1)
            T.copy(total, B[by * block])

    return second_half_sum_kernel


def scale_by_row_vector(M, N, block=8):
    """`C[m, n] = A[m, n] * B[0, n] + D[m, 0]`: broadcasting over dims of size 1."""

    @T.prim_func
    def scale_by_row_vector_kernel(A: T.Tensor((M, N)), B: T.Tensor((1, N)), D: T.Tensor((M, 1)), C: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            A_local = T.alloc_fragment((block, block), "float32")
            B_shared = T.alloc_shared((1, block), "float32")
            D_shared = T.alloc_shared((block, 1), "float32")
            T.copy(A[by * block, bx * block], A_local)
            T.copy(B[0, bx * block], B_shared)
            T.copy(D[by * block, 0], D_shared)
            for i, j in T.Parallel(block, block):
                A_local[i, j] = A_local[i, j] * B_shared[0, j] + D_shared[i, 0]
            T.copy(A_local, C[by * block, bx * block])

    return scale_by_row_vector_kernel


def scale_by_scalar(M, N, block=8):
    """`C = A * alpha[0]`, alpha a tensor of one element."""

    @T.prim_func
    def scale_by_scalar_kernel(A: T.Tensor((M, N)), alpha: T.Tensor((1,)), C: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            A_local = T.alloc_fragment((block, block), "float32")
            T.copy(A[by * block, bx * block], A_local)
            for i, j in T.Parallel(block, block):
                A_local[i, j] = A_local[i, j] * alpha[0]
            T.copy(A_local, C[by * block, bx * block])

    return scale_by_scalar_kernel


def outer_then_sum(M, N, block=8):
    """`C[m, n] = u[m] * v[n]` and `s[m] = u[m] * sum_n v[n]`, v walked by the same loop for both."""

    @T.prim_func
    def outer_then_sum_kernel(u: T.Tensor((M,)), v: T.Tensor((N,)), C: T.Tensor((M, N)), s: T.Tensor((M,))):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            u_shared = T.alloc_shared((block,), "float32")
            v_shared = T.alloc_shared((block,), "float32")
            tile = T.alloc_fragment((block, block), "float32")
            total = T.alloc_fragment((block,), "float32")
            T.copy(u[by * block], u_shared)
            T.clear(total)
            for no in T.serial(T.ceildiv(N, block)):
                T.copy(v[no * block], v_shared)
                for i, j in T.Parallel(block, block):
                    tile[i, j] = u_shared[i] * v_shared[j]
                T.copy(tile, C[by * block, no * block])
                T.reduce_sum(tile, total, dim=1, clear=False)
            T.copy(total, s[by * block])

    return outer_then_sum_kernel


def outer_then_sum_reference(u, v):
    return u[:, None] * v, (u.double() * v.double().sum()).float()


def small_matmul(M, N, K):
    """The library's matmul with small blocks, for sizes of 1."""
    return matmul(M, N, K, block_M=8, block_N=8, block_K=8)


_SQUARE = ({"N": 24}, {"N": 13}, {"N": 3})

ROLE_CASES = (
    KernelCase(
        "gram",
        gram,
        lambda a: matmul_reference(a, a, trans_B=True),
        ({"M": 24, "K": 48}, {"M": 13, "K": 30}, {"M": 3, "K": 7}),
        tensors(normal("M K")),
        ("C",),
    ),
    KernelCase("square", square, lambda a: matmul_reference(a, a), _SQUARE, tensors(normal("N N")), ("C",)),
    KernelCase("symmetrise", symmetrise, lambda a: a + a.mT, _SQUARE, tensors(normal("N N")), ("B",), EXACT),
    KernelCase(
        "two_products",
        two_products,
        two_products_reference,
        ({"M": 24, "N": 24, "K": 48, "L": 16}, {"M": 13, "N": 7, "K": 30, "L": 9}, {"M": 2, "N": 5, "K": 3, "L": 1}),
        tensors(normal("M K"), normal("K N"), normal("M L"), normal("L N")),
        ("C",),
    ),
    KernelCase(
        "chained_products",
        chained_products,
        lambda a, b, e: (a.double() @ b.double() @ e.double()).float(),
        ({"M": 24, "N": 24, "K": 16}, {"M": 13, "N": 7, "K": 10}, {"M": 3, "N": 5, "K": 2}),
        tensors(normal("M K"), normal("K N"), normal("N K")),
        ("C",),
        Tolerance(1e-5, 5e-5),  # sums of sums: terms of about 4, each with an error of its own
    ),
    KernelCase(
        "second_half_sum", second_half_sum, lambda a: a[:, a.shape[1] // 2 :].sum(1), MN, tensors(normal("M N")), ("B",)
    ),
    KernelCase(
        "scale_by_row_vector",
        scale_by_row_vector,
        lambda a, b, d: a * b + d,
        MN,
        tensors(normal("M N"), normal("1 N"), normal("M 1")),
        ("C",),
    ),
    KernelCase(
        "scale_by_scalar",
        scale_by_scalar,
        lambda a, alpha: a * alpha,
        MN,
        tensors(normal("M N"), normal("1")),
        ("C",),
        EXACT,
    ),
    KernelCase(
        "outer_then_sum",
        outer_then_sum,
        outer_then_sum_reference,
        MN,
        tensors(normal("M"), normal("N")),
        ("C", "s"),
    ),
    KernelCase(
        "matmul_size_one",
        small_matmul,
        matmul_reference,
        ({"M": 1, "N": 24, "K": 1}, {"M": 24, "N": 1, "K": 13}, {"M": 1, "N": 1, "K": 1}),
        tensors(normal("M K"), normal("K N")),
        ("C",),
    ),
)
