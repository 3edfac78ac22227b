"""Embedding lookup: rows of a table gathered by ids."""

import tilelang.language as T


def embedding(tokens, vocabulary, features, block_M=32, block_N=64, dtype="float32"):
    """`out[t, d] = table[ids[t], d]`."""

    @T.prim_func
    def embedding_kernel(
        ids: T.Tensor((tokens,), "int32"),
        table: T.Tensor((vocabulary, features), dtype),
        out: T.Tensor((tokens, features), dtype),
    ):
        with T.Kernel(T.ceildiv(features, block_N), T.ceildiv(tokens, block_M), threads=128) as (bx, by):
            ids_shared = T.alloc_shared((block_M,), "int32")
            T.copy(ids[by * block_M], ids_shared)
            for i, j in T.Parallel(block_M, block_N):
                if by * block_M + i < tokens and bx * block_N + j < features:
                    out[by * block_M + i, bx * block_N + j] = table[ids_shared[i], bx * block_N + j]

    return embedding_kernel


def embedding_backward(tokens, vocabulary, features, block_M=32, block_N=64, dtype="float32"):
    """The gradient of `embedding`: `d_table[ids[t], d] += d_out[t, d]`."""

    @T.prim_func
    def embedding_backward_kernel(
        ids: T.Tensor((tokens,), "int32"),
        d_out: T.Tensor((tokens, features), dtype),
        d_table: T.Tensor((vocabulary, features), dtype),
    ):
        with T.Kernel(T.ceildiv(features, block_N), T.ceildiv(tokens, block_M), threads=128) as (bx, by):
            ids_shared = T.alloc_shared((block_M,), "int32")
            T.copy(ids[by * block_M], ids_shared)
            for i, j in T.Parallel(block_M, block_N):
                if by * block_M + i < tokens and bx * block_N + j < features:
                    T.atomic_add(d_table[ids_shared[i], bx * block_N + j], d_out[by * block_M + i, bx * block_N + j])

    return embedding_backward_kernel


def embedding_reference(ids, table):
    """`table[ids]`."""
    return table[ids.long()]
