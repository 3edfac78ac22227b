"""Kernels in which a coordinate is data: masks, iota, parities, labels."""

import tilelang.language as T
import torch

from kernels.catalogue.case import EXACT, FLOAT32, KernelCase, integers, normal, tensors
from kernels.catalogue.sizes import MN


def lower_triangle(M, N, block=8):
    """`B[m, n] = A[m, n]` where n <= m, else 0."""

    @T.prim_func
    def lower_triangle_kernel(A: T.Tensor((M, N)), B: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            tile = T.alloc_fragment((block, block), "float32")
            T.copy(A[by * block, bx * block], tile)
            for i, j in T.Parallel(block, block):
                tile[i, j] = T.if_then_else(bx * block + j <= by * block + i, tile[i, j], 0.0)
            T.copy(tile, B[by * block, bx * block])

    return lower_triangle_kernel


def iota(M, N, block=8):
    """`B[m, n] = m * N + n`: a kernel without inputs."""

    @T.prim_func
    def iota_kernel(B: T.Tensor((M, N), "int32")):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            for i, j in T.Parallel(block, block):
                if by * block + i < M and bx * block + j < N:
                    B[by * block + i, bx * block + j] = (by * block + i) * N + bx * block + j

    return iota_kernel


def scale_even_rows(M, N, block=8):
    """Rows of even position are doubled, rows whose block is odd are negated."""

    @T.prim_func
    def scale_even_rows_kernel(A: T.Tensor((M, N)), B: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            tile = T.alloc_fragment((block, N), "float32")
            T.copy(A[by * block, 0], tile)
            for i, j in T.Parallel(block, N):
                if (by * block + i) % 2 == 0:
                    tile[i, j] = 2.0 * tile[i, j]
            if by % 2 == 1:
                for i, j in T.Parallel(block, N):
                    tile[i, j] = -tile[i, j]
            T.copy(tile, B[by * block, 0])

    return scale_even_rows_kernel


def scale_even_rows_reference(a, block=8):
    row = torch.arange(a.shape[0])[:, None]
    doubled = torch.where(row % 2 == 0, 2 * a, a)
    return torch.where(row // block % 2 == 1, -doubled, doubled)


def masked_row_sum(M, N, block=8):
    """`B[m] = sum of A[m, n] over n < lengths[m]`: the mask comes from data."""

    @T.prim_func
    def masked_row_sum_kernel(A: T.Tensor((M, N)), lengths: T.Tensor((M,), "int32"), B: T.Tensor((M,))):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            tile = T.alloc_fragment((block, block), "float32")
            lengths_shared = T.alloc_shared((block,), "int32")
            total = T.alloc_fragment((block,), "float32")
            T.copy(lengths[by * block], lengths_shared)
            T.clear(total)
            for ko in T.serial(T.ceildiv(N, block)):
                T.copy(A[by * block, ko * block], tile)
                for i, j in T.Parallel(block, block):
                    tile[i, j] = T.if_then_else(ko * block + j < lengths_shared[i], tile[i, j], 0.0)
                T.reduce_sum(tile, total, dim=1, clear=False)
            T.copy(total, B[by * block])

    return masked_row_sum_kernel


def masked_row_sum_reference(a, lengths):
    kept = torch.arange(a.shape[1]) < lengths[:, None]
    return torch.where(kept, a.double(), 0).sum(1).float()


def one_hot(M, N, block=8):
    """`B[m, n] = 1 if ids[m] == n else 0`."""

    @T.prim_func
    def one_hot_kernel(ids: T.Tensor((M,), "int32"), B: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            ids_shared = T.alloc_shared((block,), "int32")
            tile = T.alloc_fragment((block, block), "float32")
            T.copy(ids[by * block], ids_shared)
            for i, j in T.Parallel(block, block):
                tile[i, j] = T.if_then_else(ids_shared[i] == bx * block + j, 1.0, 0.0)
            T.copy(tile, B[by * block, bx * block])

    return one_hot_kernel


def one_hot_reference(ids, columns):
    return (ids[:, None] == torch.arange(columns)).float()


def argmax_rows(M, N, block=8):
    """The largest value of each row and the first position where it is."""

    @T.prim_func
    def argmax_rows_kernel(A: T.Tensor((M, N)), values: T.Tensor((M,)), positions: T.Tensor((M,), "int32")):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            A_shared = T.alloc_shared((block, N), "float32")
            best = T.alloc_fragment((block,), "float32")
            where = T.alloc_fragment((block,), "int32")
            T.copy(A[by * block, 0], A_shared)
            T.fill(best, -T.infinity("float32"))
            T.clear(where)
            for j in T.serial(N):
                for i in T.Parallel(block):
                    if A_shared[i, j] > best[i]:
                        best[i] = A_shared[i, j]
                        where[i] = j
            T.copy(best, values[by * block])
            T.copy(where, positions[by * block])

    return argmax_rows_kernel


def argmax_rows_reference(a):
    values, positions = a.max(dim=1)
    return values, positions.int()


def cross_entropy(M, N, block=8):
    """`loss[m] = logsumexp(X[m, :]) - X[m, labels[m]]`, the label's logit picked by comparing positions."""

    @T.prim_func
    def cross_entropy_kernel(X: T.Tensor((M, N)), labels: T.Tensor((M,), "int32"), loss: T.Tensor((M,))):
        with T.Kernel(T.ceildiv(M, block), threads=128) as by:
            x = T.alloc_fragment((block, N), "float32")
            picked = T.alloc_fragment((block, N), "float32")
            labels_shared = T.alloc_shared((block,), "int32")
            row_max = T.alloc_fragment((block,), "float32")
            row_sum = T.alloc_fragment((block,), "float32")
            logit = T.alloc_fragment((block,), "float32")
            T.copy(X[by * block, 0], x)
            T.copy(labels[by * block], labels_shared)
            T.reduce_max(x, row_max, dim=1)
            for i, j in T.Parallel(block, N):
                picked[i, j] = T.if_then_else(j == labels_shared[i], x[i, j], 0.0)
            T.reduce_sum(picked, logit, dim=1)
            for i, j in T.Parallel(block, N):
                x[i, j] = T.exp(x[i, j] - row_max[i])
            T.reduce_sum(x, row_sum, dim=1)
            for i in T.Parallel(block):
                logit[i] = T.log(row_sum[i]) + row_max[i] - logit[i]
            T.copy(logit, loss[by * block])

    return cross_entropy_kernel


def cross_entropy_reference(x, labels):
    return torch.nn.functional.cross_entropy(x.double(), labels.long(), reduction="none").float()


_ONE_HOT_SIZES = tuple({"M": size["M"], "N": 24} for size in MN)

INDEX_VALUE_CASES = (
    KernelCase("lower_triangle", lower_triangle, torch.tril, MN, tensors(normal("M N")), ("B",), EXACT),
    *(
        KernelCase(
            f"iota_{rows}x{columns}",
            iota,
            lambda m=rows, n=columns: torch.arange(m * n, dtype=torch.int32).reshape(m, n),
            ({"M": rows, "N": columns},),
            tensors(),
            ("B",),
            EXACT,
        )
        for rows, columns in ((24, 48), (13, 30))
    ),
    KernelCase(
        "scale_even_rows", scale_even_rows, scale_even_rows_reference, MN, tensors(normal("M N")), ("B",), EXACT
    ),
    KernelCase(
        "masked_row_sum",
        masked_row_sum,
        masked_row_sum_reference,
        MN,
        tensors(normal("M N"), integers("M", 0, "N")),
        ("B",),
    ),
    KernelCase(
        "one_hot",
        one_hot,
        lambda ids: one_hot_reference(ids, 24),
        _ONE_HOT_SIZES,
        tensors(integers("M", 0, 24)),
        ("B",),
        EXACT,
    ),
    KernelCase(
        "argmax_rows", argmax_rows, argmax_rows_reference, MN, tensors(normal("M N")), ("values", "positions"), EXACT
    ),
    KernelCase(
        "cross_entropy",
        cross_entropy,
        cross_entropy_reference,
        MN,
        tensors(normal("M N"), integers("M", 0, "N")),
        ("loss",),
        FLOAT32,
    ),
)
