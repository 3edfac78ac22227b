"""Reductions of a matrix or a 3-D tensor over one dim, with every operator that TileLang reduces with."""

import tilelang.language as T
import torch

REDUCE = {
    "sum": T.reduce_sum,
    "max": T.reduce_max,
    "min": T.reduce_min,
    "abssum": T.reduce_abssum,
    "absmax": T.reduce_absmax,
    "bitand": T.reduce_bitand,
    "bitor": T.reduce_bitor,
    "bitxor": T.reduce_bitxor,
}


def neutral(op, dtype):
    """The value that does not change what `op` reduces."""
    if op == "max":
        return T.min_value(dtype) if dtype.startswith("int") else -T.infinity(dtype)
    if op == "min":
        return T.max_value(dtype) if dtype.startswith("int") else T.infinity(dtype)
    return {"prod": 1, "bitand": -1}.get(op, 0)


def reduce_rows(M, N, op="sum", block_M=32, dtype="float32"):
    """`B[m] = op_n A[m, n]`; a block holds whole rows."""
    reduce_op = REDUCE[op]

    @T.prim_func
    def reduce_rows_kernel(A: T.Tensor((M, N), dtype), B: T.Tensor((M,), dtype)):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            A_local = T.alloc_fragment((block_M, N), dtype)
            B_local = T.alloc_fragment((block_M,), dtype)
            T.copy(A[bx * block_M, 0], A_local)
            reduce_op(A_local, B_local, dim=1)
            T.copy(B_local, B[bx * block_M])

    return reduce_rows_kernel


def reduce_columns(M, N, op="sum", block_N=32, dtype="float32"):
    """`B[n] = op_m A[m, n]`; a block holds whole columns."""
    reduce_op = REDUCE[op]

    @T.prim_func
    def reduce_columns_kernel(A: T.Tensor((M, N), dtype), B: T.Tensor((N,), dtype)):
        with T.Kernel(T.ceildiv(N, block_N), threads=128) as bx:
            A_local = T.alloc_fragment((M, block_N), dtype)
            B_local = T.alloc_fragment((block_N,), dtype)
            T.copy(A[0, bx * block_N], A_local)
            reduce_op(A_local, B_local, dim=0)
            T.copy(B_local, B[bx * block_N])

    return reduce_columns_kernel


def reduce_row_blocks(M, N, op="sum", block_M=32, block_N=32, dtype="float32"):
    """`B[m] = op_n A[m, n]` over column blocks; what lies past the last column is set to `op`'s neutral element."""
    reduce_op, start = REDUCE[op], neutral(op, dtype)

    @T.prim_func
    def reduce_row_blocks_kernel(A: T.Tensor((M, N), dtype), B: T.Tensor((M,), dtype)):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            A_local = T.alloc_fragment((block_M, block_N), dtype)
            B_local = T.alloc_fragment((block_M,), dtype)
            T.fill(B_local, start)
            for ko in T.Pipelined(T.ceildiv(N, block_N), num_stages=1):
                T.copy(A[bx * block_M, ko * block_N], A_local)
                for i, j in T.Parallel(block_M, block_N):
                    A_local[i, j] = T.if_then_else(ko * block_N + j < N, A_local[i, j], T.cast(start, dtype))
                reduce_op(A_local, B_local, dim=1, clear=False)
            T.copy(B_local, B[bx * block_M])

    return reduce_row_blocks_kernel


def product_rows(M, N, block_M=32, dtype="float32"):
    """`B[m] = prod_n A[m, n]` by a serial loop over the columns (TileLang has no product reduction)."""

    @T.prim_func
    def product_rows_kernel(A: T.Tensor((M, N), dtype), B: T.Tensor((M,), dtype)):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            A_shared = T.alloc_shared((block_M, N), dtype)
            B_local = T.alloc_fragment((block_M,), dtype)
            T.copy(A[bx * block_M, 0], A_shared)
            T.fill(B_local, 1)
            for j in T.serial(N):
                for i in T.Parallel(block_M):
                    B_local[i] = B_local[i] * A_shared[i, j]
            T.copy(B_local, B[bx * block_M])

    return product_rows_kernel


def reduce_3d(L, M, N, dim=1, op="sum", block=16, dtype="float32"):
    """A (L, M, N) without its dim `dim`, which a block holds whole."""
    reduce_op = REDUCE[op]
    kept = tuple(extent for d, extent in enumerate((L, M, N)) if d != dim)
    block_shape = tuple(extent if d == dim else block for d, extent in enumerate((L, M, N)))

    @T.prim_func
    def reduce_3d_kernel(A: T.Tensor((L, M, N), dtype), B: T.Tensor(kept, dtype)):
        with T.Kernel(T.ceildiv(kept[1], block), T.ceildiv(kept[0], block), threads=128) as (bx, by):
            A_local = T.alloc_fragment(block_shape, dtype)
            B_local = T.alloc_fragment((block, block), dtype)
            if dim == 0:
                T.copy(A[0, by * block, bx * block], A_local)
            elif dim == 1:
                T.copy(A[by * block, 0, bx * block], A_local)
            else:
                T.copy(A[by * block, bx * block, 0], A_local)
            reduce_op(A_local, B_local, dim=dim)
            T.copy(B_local, B[by * block, bx * block])

    return reduce_3d_kernel


def reduce_reference(x, dim, op="sum"):
    """`x` reduced over `dim` with `op`, in float64 or exactly."""
    wide = x.double() if x.is_floating_point() else x
    if op.startswith("bit"):
        fold = {"bitand": torch.bitwise_and, "bitor": torch.bitwise_or, "bitxor": torch.bitwise_xor}[op]
        result = wide.select(dim, 0)
        for index in range(1, x.shape[dim]):
            result = fold(result, wide.select(dim, index))
        return result
    wide = wide.abs() if op.startswith("abs") else wide
    reduce = {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "prod": torch.prod}[op.removeprefix("abs")]
    return reduce(wide, dim).to(x.dtype)
