"""What is known of rows after one pass over them, and what is nearest to points."""

import tilelang.language as T
import torch


def row_statistics(M, N, dtype="float32"):
    """Of every row of `A[m, n]`: its sum, its least, its largest and the place of that, and how many are above 0."""

    @T.prim_func
    def row_statistics_kernel(
        A: T.Tensor((M, N), dtype),
        Sum: T.Tensor((M,), dtype),
        Low: T.Tensor((M,), dtype),
        High: T.Tensor((M,), dtype),
        At: T.Tensor((M,), "int32"),
        Above: T.Tensor((M,), "int32"),
    ):
        with T.Kernel(M, threads=32) as row:
            total = T.alloc_var(dtype)
            low = T.alloc_var(dtype)
            high = T.alloc_var(dtype)
            at = T.alloc_var("int32")
            above = T.alloc_var("int32")
            total = 0.0
            low = T.infinity(dtype)
            high = -T.infinity(dtype)
            at = -1
            above = 0
            for j in T.serial(N):
                total += A[row, j]
                low = T.min(low, A[row, j])
                if A[row, j] > high:
                    high = A[row, j]
                    at = j
                if A[row, j] > 0.0:
                    above += 1
            Sum[row] = total
            Low[row] = low
            High[row] = high
            At[row] = at
            Above[row] = above

    return row_statistics_kernel


def row_statistics_reference(a):
    """Of equals, the first is the largest."""
    return a.sum(1), a.amin(1), a.amax(1), a.argmax(1).int(), (a > 0).sum(1).int()


def nearest_points(M, N, dim=3, block=16, dtype="float32"):
    """`D[m]` is how far (squared) `P[m]` is from the nearest of the points `Q`, and `At[m]` which one that is."""

    @T.prim_func
    def nearest_points_kernel(
        P: T.Tensor((M, dim), dtype),
        Q: T.Tensor((N, dim), dtype),
        D: T.Tensor((M,), dtype),
        At: T.Tensor((M,), "int32"),
    ):
        with T.Kernel(T.ceildiv(M, block), threads=32) as b:
            for i in T.Parallel(block):
                nearest = T.alloc_var(dtype)
                at = T.alloc_var("int32")
                apart = T.alloc_var(dtype)
                if b * block + i < M:
                    nearest = T.infinity(dtype)
                    at = -1
                    for k in T.serial(N):
                        apart = 0.0
                        for c in T.serial(dim):
                            apart += (P[b * block + i, c] - Q[k, c]) * (P[b * block + i, c] - Q[k, c])
                        if apart < nearest:
                            nearest = apart
                            at = k
                    D[b * block + i] = nearest
                    At[b * block + i] = at

    return nearest_points_kernel


def nearest_points_reference(p, q):
    """Of points that are equally near, the first."""
    apart = (p[:, None] - q[None]).square().sum(2)
    return apart.amin(1), apart.argmin(1).int()


def row_norms(M, N, block=8, dtype="float32"):
    """`B[m, n] = A[m, n] / norm(A[m, :])`, a row per iteration of a parallel loop."""

    @T.prim_func
    def row_norms_kernel(A: T.Tensor((M, N), dtype), B: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(M, block), threads=32) as b:
            for i in T.Parallel(block):
                total = T.alloc_var(dtype)
                if b * block + i < M:
                    total = 1e-12
                    for k in T.serial(N):
                        total += A[b * block + i, k] * A[b * block + i, k]
                    for k in T.serial(N):
                        B[b * block + i, k] = A[b * block + i, k] * T.rsqrt(total)

    return row_norms_kernel


def row_norms_reference(a):
    return torch.nn.functional.normalize(a, dim=1)
