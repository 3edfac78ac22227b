"""LayerNorm over rows: held in a block, also of a sum; in two passes over column blocks; and GroupNorm."""

import tilelang.language as T
import torch.nn.functional as F


def layer_norm(M, N, eps=1e-5, block_M=16, dtype="float32", accum_dtype="float32"):
    """`Y = (X - mean) / sqrt(var + eps) * weight + bias` per row; the variance is taken around the mean."""

    @T.prim_func
    def layer_norm_kernel(
        X: T.Tensor((M, N), dtype),
        weight: T.Tensor((N,), dtype),
        bias: T.Tensor((N,), dtype),
        Y: T.Tensor((M, N), dtype),
    ):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            x = T.alloc_fragment((block_M, N), accum_dtype)
            squares = T.alloc_fragment((block_M, N), accum_dtype)
            mean = T.alloc_fragment((block_M,), accum_dtype)
            variance = T.alloc_fragment((block_M,), accum_dtype)
            weight_shared = T.alloc_shared((N,), dtype)
            bias_shared = T.alloc_shared((N,), dtype)
            T.copy(weight, weight_shared)
            T.copy(bias, bias_shared)
            T.copy(X[bx * block_M, 0], x)
            T.reduce_sum(x, mean, dim=1)
            for i, j in T.Parallel(block_M, N):
                x[i, j] = x[i, j] - mean[i] / N
            for i, j in T.Parallel(block_M, N):
                squares[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(squares, variance, dim=1)
            for i, j in T.Parallel(block_M, N):
                x[i, j] = x[i, j] * T.rsqrt(variance[i] / N + eps) * weight_shared[j] + bias_shared[j]
            T.copy(x, Y[bx * block_M, 0])

    return layer_norm_kernel


def layer_norm_backward(M, N, eps=1e-5, block_M=16, dtype="float32", accum_dtype="float32"):
    """The gradients of `layer_norm`: one kernel for X, one for weight and bias, to which every block of rows adds."""

    @T.prim_func
    def layer_norm_d_X_kernel(
        X: T.Tensor((M, N), dtype),
        weight: T.Tensor((N,), dtype),
        d_Y: T.Tensor((M, N), dtype),
        d_X: T.Tensor((M, N), dtype),
    ):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            x = T.alloc_fragment((block_M, N), accum_dtype)
            gradient = T.alloc_fragment((block_M, N), accum_dtype)
            product = T.alloc_fragment((block_M, N), accum_dtype)
            mean = T.alloc_fragment((block_M,), accum_dtype)
            variance = T.alloc_fragment((block_M,), accum_dtype)
            total = T.alloc_fragment((block_M,), accum_dtype)
            along = T.alloc_fragment((block_M,), accum_dtype)
            weight_shared = T.alloc_shared((N,), dtype)
            T.copy(weight, weight_shared)
            T.copy(X[bx * block_M, 0], x)
            T.copy(d_Y[bx * block_M, 0], gradient)
            T.reduce_sum(x, mean, dim=1)
            for i, j in T.Parallel(block_M, N):
                x[i, j] = x[i, j] - mean[i] / N
            for i, j in T.Parallel(block_M, N):
                product[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(product, variance, dim=1)
            for i, j in T.Parallel(block_M, N):
                x[i, j] = x[i, j] * T.rsqrt(variance[i] / N + eps)
            for i, j in T.Parallel(block_M, N):
                gradient[i, j] = gradient[i, j] * weight_shared[j]
            T.reduce_sum(gradient, total, dim=1)
            for i, j in T.Parallel(block_M, N):
                product[i, j] = gradient[i, j] * x[i, j]
            T.reduce_sum(product, along, dim=1)
            for i, j in T.Parallel(block_M, N):
                gradient[i, j] = T.rsqrt(variance[i] / N + eps) * (
                    gradient[i, j] - total[i] / N - x[i, j] * along[i] / N
                )
            T.copy(gradient, d_X[bx * block_M, 0])

    @T.prim_func
    def layer_norm_d_weight_kernel(
        X: T.Tensor((M, N), dtype),
        d_Y: T.Tensor((M, N), dtype),
        d_weight: T.Tensor((N,), dtype),
        d_bias: T.Tensor((N,), dtype),
    ):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            x = T.alloc_fragment((block_M, N), accum_dtype)
            gradient = T.alloc_fragment((block_M, N), accum_dtype)
            squares = T.alloc_fragment((block_M, N), accum_dtype)
            mean = T.alloc_fragment((block_M,), accum_dtype)
            variance = T.alloc_fragment((block_M,), accum_dtype)
            total = T.alloc_fragment((N,), accum_dtype)
            T.copy(X[bx * block_M, 0], x)
            T.copy(d_Y[bx * block_M, 0], gradient)
            T.reduce_sum(gradient, total, dim=0)
            T.atomic_add(d_bias[0], total)
            T.reduce_sum(x, mean, dim=1)
            for i, j in T.Parallel(block_M, N):
                x[i, j] = x[i, j] - mean[i] / N
            for i, j in T.Parallel(block_M, N):
                squares[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(squares, variance, dim=1)
            for i, j in T.Parallel(block_M, N):
                gradient[i, j] = gradient[i, j] * x[i, j] * T.rsqrt(variance[i] / N + eps)
            T.reduce_sum(gradient, total, dim=0)
            T.atomic_add(d_weight[0], total)

    return layer_norm_d_X_kernel, layer_norm_d_weight_kernel


def two_pass_layer_norm(M, N, eps=1e-5, block_M=16, block_N=64, dtype="float32", accum_dtype="float32"):
    """LayerNorm over column blocks: the first pass sums values and squares, `var = mean(x^2) - mean(x)^2`."""

    @T.prim_func
    def two_pass_layer_norm_kernel(
        X: T.Tensor((M, N), dtype),
        weight: T.Tensor((N,), dtype),
        bias: T.Tensor((N,), dtype),
        Y: T.Tensor((M, N), dtype),
    ):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            x = T.alloc_fragment((block_M, block_N), accum_dtype)
            squares = T.alloc_fragment((block_M, block_N), accum_dtype)
            mean = T.alloc_fragment((block_M,), accum_dtype)
            scale = T.alloc_fragment((block_M,), accum_dtype)
            weight_shared = T.alloc_shared((block_N,), dtype)
            bias_shared = T.alloc_shared((block_N,), dtype)
            T.clear(mean)
            T.clear(scale)
            for ko in T.Pipelined(T.ceildiv(N, block_N), num_stages=1):
                T.copy(X[bx * block_M, ko * block_N], x)
                for i, j in T.Parallel(block_M, block_N):
                    squares[i, j] = x[i, j] * x[i, j]
                T.reduce_sum(x, mean, dim=1, clear=False)
                T.reduce_sum(squares, scale, dim=1, clear=False)
            for i in T.Parallel(block_M):
                mean[i] = mean[i] / N
            for i in T.Parallel(block_M):
                scale[i] = T.rsqrt(scale[i] / N - mean[i] * mean[i] + eps)
            for ko in T.Pipelined(T.ceildiv(N, block_N), num_stages=1):
                T.copy(X[bx * block_M, ko * block_N], x)
                T.copy(weight[ko * block_N], weight_shared)
                T.copy(bias[ko * block_N], bias_shared)
                for i, j in T.Parallel(block_M, block_N):
                    x[i, j] = (x[i, j] - mean[i]) * scale[i] * weight_shared[j] + bias_shared[j]
                T.copy(x, Y[bx * block_M, ko * block_N])

    return two_pass_layer_norm_kernel


def add_layer_norm(M, N, eps=1e-5, block_M=16, dtype="float32", accum_dtype="float32"):
    """`S = X + R` and its LayerNorm: what is squared on chip is no longer what is normalized, a copy of the sum is."""

    @T.prim_func
    def add_layer_norm_kernel(
        X: T.Tensor((M, N), dtype),
        R: T.Tensor((M, N), dtype),
        weight: T.Tensor((N,), dtype),
        bias: T.Tensor((N,), dtype),
        Y: T.Tensor((M, N), dtype),
        S: T.Tensor((M, N), dtype),
    ):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            x = T.alloc_fragment((block_M, N), dtype)
            r = T.alloc_fragment((block_M, N), dtype)
            total = T.alloc_fragment((block_M, N), accum_dtype)
            row = T.alloc_fragment((block_M,), accum_dtype)
            mean = T.alloc_fragment((block_M,), accum_dtype)
            scale = T.alloc_fragment((block_M,), accum_dtype)
            T.copy(X[bx * block_M, 0], x)
            T.copy(R[bx * block_M, 0], r)
            for i, j in T.Parallel(block_M, N):
                total[i, j] = x[i, j] + r[i, j]
            for i, j in T.Parallel(block_M, N):
                x[i, j] = total[i, j]
            T.reduce_sum(total, row, dim=1)
            for i in T.Parallel(block_M):
                mean[i] = row[i] / N
            for i, j in T.Parallel(block_M, N):
                total[i, j] = (total[i, j] - mean[i]) * (total[i, j] - mean[i])
            T.reduce_sum(total, row, dim=1)
            for i in T.Parallel(block_M):
                scale[i] = T.rsqrt(row[i] / N + eps)
            for i, j in T.Parallel(block_M, N):
                r[i, j] = (x[i, j] - mean[i]) * scale[i] * weight[j] + bias[j]
            T.copy(r, Y[bx * block_M, 0])
            T.copy(x, S[bx * block_M, 0])

    return add_layer_norm_kernel


def add_layer_norm_reference(x, r, weight, bias, eps=1e-5):
    """LayerNorm of x + r over the last dim, and x + r."""
    return layer_norm_reference(x + r, weight, bias, eps), x + r


def layer_norm_reference(x, weight, bias, eps=1e-5):
    """LayerNorm over the last dim."""
    return F.layer_norm(x.double(), x.shape[-1:], weight.double(), bias.double(), eps).to(x.dtype)


def group_norm(N, C, S, groups, eps=1e-5, dtype="float32", accum_dtype="float32"):
    """`Y = (X - mean) / sqrt(var + eps) * weight + bias` for images of `S` pixels, one block per image and group of
    channels; the variance is taken around the mean."""
    channels = C // groups
    count = channels * S

    @T.prim_func
    def group_norm_kernel(
        X: T.Tensor((N, C, S), dtype),
        weight: T.Tensor((C,), dtype),
        bias: T.Tensor((C,), dtype),
        Y: T.Tensor((N, C, S), dtype),
    ):
        with T.Kernel(groups, N, threads=128) as (bx, by):
            x = T.alloc_fragment((channels, S), accum_dtype)
            y = T.alloc_fragment((channels, S), accum_dtype)
            squares = T.alloc_fragment((channels, S), accum_dtype)
            sums = T.alloc_fragment((channels,), accum_dtype)
            mean = T.alloc_fragment((1,), accum_dtype)
            variance = T.alloc_fragment((1,), accum_dtype)
            weight_shared = T.alloc_shared((channels,), dtype)
            bias_shared = T.alloc_shared((channels,), dtype)
            T.copy(weight[bx * channels], weight_shared)
            T.copy(bias[bx * channels], bias_shared)
            T.copy(X[by, bx * channels : (bx + 1) * channels, 0:S], x)
            T.reduce_sum(x, sums, dim=1)
            T.reduce_sum(sums, mean, dim=0)
            for i, j in T.Parallel(channels, S):
                squares[i, j] = (x[i, j] - mean[0] / count) * (x[i, j] - mean[0] / count)
            T.reduce_sum(squares, sums, dim=1)
            T.reduce_sum(sums, variance, dim=0)
            for i, j in T.Parallel(channels, S):
                y[i, j] = (x[i, j] - mean[0] / count) * T.rsqrt(variance[0] / count + eps)
            for i, j in T.Parallel(channels, S):
                y[i, j] = y[i, j] * weight_shared[i] + bias_shared[i]
            T.copy(y, Y[by, bx * channels : (bx + 1) * channels, 0:S])

    return group_norm_kernel


def group_norm_reference(x, weight, bias, groups, eps=1e-5):
    """GroupNorm of images whose pixels are the last dim."""
    return F.group_norm(x.double(), groups, weight.double(), bias.double(), eps).to(x.dtype)


def layer_norm_gradient(M, N, rows=4, dtype="float32"):
    """`dX`, `dweight` and `dbias` of `Y = (X - mean) * rstd * weight + bias`; a program has some rows, one after the
    other, and adds what it has of `dweight` and `dbias` to those of all."""

    @T.prim_func
    def layer_norm_gradient_kernel(
        dY: T.Tensor((M, N), dtype),
        X: T.Tensor((M, N), dtype),
        weight: T.Tensor((N,), dtype),
        mean: T.Tensor((M,), "float32"),
        rstd: T.Tensor((M,), "float32"),
        dX: T.Tensor((M, N), dtype),
        dweight: T.Tensor((N,), "float32"),
        dbias: T.Tensor((N,), "float32"),
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=128) as bx:
            dy = T.alloc_shared((1, N), dtype)
            x = T.alloc_shared((1, N), dtype)
            dx = T.alloc_shared((1, N), dtype)
            w = T.alloc_shared((N,), dtype)
            normed = T.alloc_fragment((1, N), "float32")
            scaled = T.alloc_fragment((1, N), "float32")
            product = T.alloc_fragment((1, N), "float32")
            total = T.alloc_fragment((1,), "float32")
            along = T.alloc_fragment((1,), "float32")
            of_weight = T.alloc_fragment((N,), "float32")
            of_bias = T.alloc_fragment((N,), "float32")
            T.copy(weight, w)
            T.clear(of_weight)
            T.clear(of_bias)
            for r in T.serial(rows):
                T.copy(dY[bx * rows + r, 0], dy)
                T.copy(X[bx * rows + r, 0], x)
                for i, j in T.Parallel(1, N):
                    normed[i, j] = (x[i, j] - mean[bx * rows + r]) * rstd[bx * rows + r]
                    scaled[i, j] = dy[i, j] * w[j]
                    product[i, j] = scaled[i, j] * normed[i, j]
                T.reduce_sum(scaled, total, dim=1)
                T.reduce_sum(product, along, dim=1)
                for i, j in T.Parallel(1, N):
                    dx[i, j] = rstd[bx * rows + r] * (scaled[i, j] - total[0] / N - normed[i, j] * (along[0] / N))
                    of_weight[j] += dy[i, j] * normed[i, j]
                    of_bias[j] += dy[i, j]
                T.copy(dx, dX[bx * rows + r, 0])
            for j in T.Parallel(N):
                T.atomic_add(dweight[j], of_weight[j])
                T.atomic_add(dbias[j], of_bias[j])

    return layer_norm_gradient_kernel


def layer_norm_gradient_reference(dy, x, weight, mean, rstd, dweight, dbias):
    """What is in `dweight` and `dbias` counts."""
    normed = (x - mean[:, None]) * rstd[:, None]
    scaled = dy * weight
    dx = scaled - scaled.mean(1, keepdim=True) - normed * (scaled * normed).mean(1, keepdim=True)
    return rstd[:, None] * dx, dweight + (dy * normed).sum(0), dbias + dy.sum(0)
