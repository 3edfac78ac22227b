"""RMSNorm over the rows of a matrix: row held in a block, and in two passes over column blocks."""

import tilelang.language as T


def rms_norm(M, N, eps=1e-6, block_M=16, dtype="float32", accum_dtype="float32"):
    """`Y[m, n] = X[m, n] / sqrt(mean_n(X[m, n]^2) + eps) * weight[n]`; a block holds whole rows."""

    @T.prim_func
    def rms_norm_kernel(X: T.Tensor((M, N), dtype), weight: T.Tensor((N,), dtype), Y: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            x = T.alloc_fragment((block_M, N), accum_dtype)
            squares = T.alloc_fragment((block_M, N), accum_dtype)
            scale = T.alloc_fragment((block_M,), accum_dtype)
            weight_shared = T.alloc_shared((N,), dtype)
            T.copy(X[bx * block_M, 0], x)
            T.copy(weight, weight_shared)
            for i, j in T.Parallel(block_M, N):
                squares[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(squares, scale, dim=1)
            for i in T.Parallel(block_M):
                scale[i] = T.rsqrt(scale[i] / N + eps)
            for i, j in T.Parallel(block_M, N):
                x[i, j] = x[i, j] * scale[i] * weight_shared[j]
            T.copy(x, Y[bx * block_M, 0])

    return rms_norm_kernel


def padded_rms_norm(M, N, eps=1e-6, block_M=16, dtype="float32", accum_dtype="float32"):
    """The same, of rows in blocks as long as the next power of 2: zeros lie behind a row's end."""
    length = 1 << (N - 1).bit_length() if N else 1

    @T.prim_func
    def padded_rms_norm_kernel(X: T.Tensor((M, N), dtype), weight: T.Tensor((N,), dtype), Y: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            x = T.alloc_fragment((block_M, length), accum_dtype)
            squares = T.alloc_fragment((block_M, length), accum_dtype)
            scale = T.alloc_fragment((block_M,), accum_dtype)
            T.copy(X[bx * block_M, 0], x)
            for i, j in T.Parallel(block_M, length):
                squares[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(squares, scale, dim=1)
            for i, j in T.Parallel(block_M, length):
                if bx * block_M + i < M and j < N:
                    Y[bx * block_M + i, j] = x[i, j] * T.rsqrt(scale[i] / N + eps) * weight[j]

    return padded_rms_norm_kernel


def rms_norm_backward(M, N, eps=1e-6, block_M=16, dtype="float32", accum_dtype="float32"):
    """The gradients of `rms_norm`: one kernel for X, one for the weight, to which every block of rows adds its part."""

    @T.prim_func
    def rms_norm_d_X_kernel(
        X: T.Tensor((M, N), dtype),
        weight: T.Tensor((N,), dtype),
        d_Y: T.Tensor((M, N), dtype),
        d_X: T.Tensor((M, N), dtype),
    ):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            x = T.alloc_fragment((block_M, N), accum_dtype)
            gradient = T.alloc_fragment((block_M, N), accum_dtype)
            product = T.alloc_fragment((block_M, N), accum_dtype)
            scale = T.alloc_fragment((block_M,), accum_dtype)
            along = T.alloc_fragment((block_M,), accum_dtype)
            weight_shared = T.alloc_shared((N,), dtype)
            T.copy(X[bx * block_M, 0], x)
            T.copy(d_Y[bx * block_M, 0], gradient)
            T.copy(weight, weight_shared)
            for i, j in T.Parallel(block_M, N):
                product[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(product, scale, dim=1)
            for i in T.Parallel(block_M):
                scale[i] = T.rsqrt(scale[i] / N + eps)
            for i, j in T.Parallel(block_M, N):
                gradient[i, j] = gradient[i, j] * weight_shared[j]
            for i, j in T.Parallel(block_M, N):
                product[i, j] = gradient[i, j] * x[i, j]
            T.reduce_sum(product, along, dim=1)
            for i, j in T.Parallel(block_M, N):
                x[i, j] = scale[i] * (gradient[i, j] - x[i, j] * scale[i] * scale[i] * along[i] / N)
            T.copy(x, d_X[bx * block_M, 0])

    @T.prim_func
    def rms_norm_d_weight_kernel(
        X: T.Tensor((M, N), dtype),
        d_Y: T.Tensor((M, N), dtype),
        d_weight: T.Tensor((N,), dtype),
    ):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            x = T.alloc_fragment((block_M, N), accum_dtype)
            gradient = T.alloc_fragment((block_M, N), accum_dtype)
            squares = T.alloc_fragment((block_M, N), accum_dtype)
            scale = T.alloc_fragment((block_M,), accum_dtype)
            total = T.alloc_fragment((N,), accum_dtype)
            T.copy(X[bx * block_M, 0], x)
            T.copy(d_Y[bx * block_M, 0], gradient)
            for i, j in T.Parallel(block_M, N):
                squares[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(squares, scale, dim=1)
            for i, j in T.Parallel(block_M, N):
                gradient[i, j] = gradient[i, j] * x[i, j] * T.rsqrt(scale[i] / N + eps)
            T.reduce_sum(gradient, total, dim=0)
            T.atomic_add(d_weight[0], total)

    return rms_norm_d_X_kernel, rms_norm_d_weight_kernel


def two_pass_rms_norm(M, N, eps=1e-6, block_M=16, block_N=64, dtype="float32", accum_dtype="float32"):
    """RMSNorm over column blocks: the first pass adds up squares element by element of a block, and reduces once."""

    @T.prim_func
    def two_pass_rms_norm_kernel(
        X: T.Tensor((M, N), dtype),
        weight: T.Tensor((N,), dtype),
        Y: T.Tensor((M, N), dtype),
    ):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            X_shared = T.alloc_shared((block_M, block_N), dtype)
            weight_shared = T.alloc_shared((block_N,), dtype)
            squares = T.alloc_fragment((block_M, block_N), accum_dtype)
            y = T.alloc_fragment((block_M, block_N), accum_dtype)
            scale = T.alloc_fragment((block_M,), accum_dtype)
            T.clear(squares)
            for ko in T.Pipelined(T.ceildiv(N, block_N), num_stages=1):
                T.copy(X[bx * block_M, ko * block_N], X_shared)
                for i, j in T.Parallel(block_M, block_N):
                    squares[i, j] += T.cast(X_shared[i, j], accum_dtype) * T.cast(X_shared[i, j], accum_dtype)
            T.reduce_sum(squares, scale, dim=1)
            for i in T.Parallel(block_M):
                scale[i] = T.rsqrt(scale[i] / N + eps)
            for ko in T.Pipelined(T.ceildiv(N, block_N), num_stages=1):
                T.copy(X[bx * block_M, ko * block_N], X_shared)
                T.copy(weight[ko * block_N], weight_shared)
                for i, j in T.Parallel(block_M, block_N):
                    y[i, j] = T.cast(X_shared[i, j], accum_dtype) * scale[i] * T.cast(weight_shared[j], accum_dtype)
                T.copy(y, Y[bx * block_M, ko * block_N])

    return two_pass_rms_norm_kernel


def rms_norm_reference(x, weight, eps=1e-6):
    """RMSNorm over the last dim."""
    wide = x.double()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()).to(x.dtype)
