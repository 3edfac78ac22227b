"""The gradient of a grouped product with respect to its weights: sums over rows of groups that lie packed."""

import tilelang.language as T
import torch


def grouped_weight_gradient(groups, rows, N, K, block_N=16, block_K=16, block_rows=16):
    """`dB[g] = A[i].T @ dC[i]` for the rows i of group g, which are from `offsets[g]` on, up to `offsets[g + 1]`."""
    starts = groups + 1

    @T.prim_func
    def grouped_weight_gradient_kernel(
        A: T.Tensor((rows, K), "float32"),
        dC: T.Tensor((rows, N), "float32"),
        offsets: T.Tensor((starts,), "int32"),
        dB: T.Tensor((groups, K, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(K, block_K), groups, threads=128) as (bx, by, bz):
            first = offsets[bz]
            last = offsets[bz + 1]
            a = T.alloc_shared((block_rows, block_K), "float32")
            d = T.alloc_shared((block_rows, block_N), "float32")
            total = T.alloc_fragment((block_K, block_N), "float32")
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(last - first, block_rows), num_stages=2):
                for i, j in T.Parallel(block_rows, block_K):
                    row = offsets[bz] + k * block_rows + i
                    a[i, j] = T.if_then_else(
                        (row < offsets[bz + 1]) & (by * block_K + j < K), A[row, by * block_K + j], 0
                    )
                for i, j in T.Parallel(block_rows, block_N):
                    row = offsets[bz] + k * block_rows + i
                    d[i, j] = T.if_then_else(
                        (row < offsets[bz + 1]) & (bx * block_N + j < N), dC[row, bx * block_N + j], 0
                    )
                T.gemm(a, d, total, transpose_A=True)
            T.copy(total, dB[bz, by * block_K, bx * block_N])

    return grouped_weight_gradient_kernel


def grouped_weight_gradient_reference(a, dc, offsets):
    """Group by group."""
    starts = offsets.tolist()
    return torch.stack([a[i:j].T @ dc[i:j] for i, j in zip(starts, starts[1:], strict=False)])
