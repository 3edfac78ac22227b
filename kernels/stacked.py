"""Tensors of all layers, of which a kernel uses one: a product with one layer's weights, and a cache that one layer's
rows go into."""

import tilelang.language as T


def layer_product(M, N, K, layers, layer, block_M=64, block_N=64, block_K=32, dtype="float32", accum_dtype="float32"):
    """`C[m, n] = sum_k A[m, k] W[layer, k, n]`, of the weights W of all layers."""

    @T.prim_func
    def layer_product_kernel(
        A: T.Tensor((M, K), dtype), W: T.Tensor((layers, K, N), dtype), C: T.Tensor((M, N), dtype)
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), dtype)
            W_shared = T.alloc_shared((block_K, block_N), dtype)
            C_local = T.alloc_fragment((block_M, block_N), accum_dtype)
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[by * block_M, ko * block_K], A_shared)
                T.copy(W[layer, ko * block_K, bx * block_N], W_shared)
                T.gemm(A_shared, W_shared, C_local)
            T.copy(C_local, C[by * block_M, bx * block_N])

    return layer_product_kernel


def layer_product_reference(A, W, layer):
    return A @ W[layer]


def put_layer(layers, layer, tokens, features, block_T=16, block_F=64, dtype="float32"):
    """`cache[layer, t, f] = X[t, f]`; other layers stay as they are."""

    @T.prim_func
    def put_layer_kernel(X: T.Tensor((tokens, features), dtype), cache: T.Tensor((layers, tokens, features), dtype)):
        with T.Kernel(T.ceildiv(features, block_F), T.ceildiv(tokens, block_T), threads=128) as (bx, by):
            rows = T.alloc_shared((block_T, block_F), dtype)
            T.copy(X[by * block_T, bx * block_F], rows)
            T.copy(rows, cache[layer, by * block_T, bx * block_F])

    return put_layer_kernel


def put_layer_reference(X, cache, layer):
    after = cache.clone()
    after[layer] = X
    return after
