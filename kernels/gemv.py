"""Matrix times vector, and vector times matrix."""

import tilelang.language as T


def gemv(M, K, block_M=32, block_K=64, dtype="float32", accum_dtype="float32"):
    """`y[m] = sum_k A[m, k] * x[k]`: products of a block are reduced along its rows."""

    @T.prim_func
    def gemv_kernel(A: T.Tensor((M, K), dtype), x: T.Tensor((K,), dtype), y: T.Tensor((M,), dtype)):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            A_shared = T.alloc_shared((block_M, block_K), dtype)
            x_shared = T.alloc_shared((block_K,), dtype)
            products = T.alloc_fragment((block_M, block_K), accum_dtype)
            y_local = T.alloc_fragment((block_M,), accum_dtype)
            T.clear(y_local)
            for ko in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[bx * block_M, ko * block_K], A_shared)
                T.copy(x[ko * block_K], x_shared)
                for i, k in T.Parallel(block_M, block_K):
                    products[i, k] = T.cast(A_shared[i, k], accum_dtype) * T.cast(x_shared[k], accum_dtype)
                T.reduce_sum(products, y_local, dim=1, clear=False)
            T.copy(y_local, y[bx * block_M])

    return gemv_kernel


def gevm(K, N, block_K=32, block_N=64, dtype="float32", accum_dtype="float32"):
    """`y[n] = sum_k x[k] * B[k, n]`: a serial loop over the rows of a block adds to every column's sum."""

    @T.prim_func
    def gevm_kernel(x: T.Tensor((K,), dtype), B: T.Tensor((K, N), dtype), y: T.Tensor((N,), dtype)):
        with T.Kernel(T.ceildiv(N, block_N), threads=128) as bx:
            B_shared = T.alloc_shared((block_K, block_N), dtype)
            x_shared = T.alloc_shared((block_K,), dtype)
            y_local = T.alloc_fragment((block_N,), accum_dtype)
            T.clear(y_local)
            for ko in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(B[ko * block_K, bx * block_N], B_shared)
                T.copy(x[ko * block_K], x_shared)
                for k in T.serial(block_K):
                    for j in T.Parallel(block_N):
                        y_local[j] += T.cast(x_shared[k], accum_dtype) * T.cast(B_shared[k, j], accum_dtype)
            T.copy(y_local, y[bx * block_N])

    return gevm_kernel


def gemv_reference(a, b):
    """The product of a matrix and a vector, whichever comes first."""
    return (a.double() @ b.double()).to(a.dtype)
