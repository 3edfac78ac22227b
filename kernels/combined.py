"""Kernels whose loops carry states of their own kinds, with what their author says of them: variances in one pass, the
largest of every row with their places, the delta rule."""

import tilelang.language as T
import torch

import mesh_tensor as mt


def welford(before, after):
    """Counts, means and sums of squared distances of two parts, as those of both."""
    (count, mean, m2), (more, mean_after, m2_after) = before, after
    total = count + more
    share = T.if_then_else(total > 0, more / T.max(total, 1.0), 0.0)
    apart = mean_after - mean
    return total, mean + apart * share, m2 + m2_after + apart * apart * count * share


def one_pass_variance(M, N, with_=welford, start=0.0, block_M=4, block_N=8, dtype="float32"):
    """`V[m]` is the variance of `A[m, :]`, by Welford's algorithm. `with_`: how parts of a row are combined."""

    @T.prim_func
    def one_pass_variance_kernel(A: T.Tensor((M, N), dtype), V: T.Tensor((M,), dtype)):
        with T.Kernel(T.ceildiv(M, block_M), threads=32) as bx:
            a = T.alloc_fragment((block_M, block_N), dtype)
            count = T.alloc_fragment((block_M,), dtype)
            mean = T.alloc_fragment((block_M,), dtype)
            m2 = T.alloc_fragment((block_M,), dtype)
            before = T.alloc_fragment((block_M,), dtype)
            if with_ is not None:
                mt.combine(state=(count, mean, m2), with_=with_)
            T.fill(count, start)
            T.clear(mean)
            T.clear(m2)
            for ko in T.serial(T.ceildiv(N, block_N)):
                T.copy(A[bx * block_M, ko * block_N], a)
                for k in T.serial(block_N):
                    if ko * block_N + k < N:
                        T.copy(mean, before)
                        for i in T.Parallel(block_M):
                            count[i] = count[i] + 1.0
                        for i in T.Parallel(block_M):
                            mean[i] = before[i] + (a[i, k] - before[i]) / count[i]
                        for i in T.Parallel(block_M):
                            m2[i] = m2[i] + (a[i, k] - before[i]) * (a[i, k] - mean[i])
            for i in T.Parallel(block_M):
                m2[i] = m2[i] / N
            T.copy(m2, V[bx * block_M])

    return one_pass_variance_kernel


def one_pass_variance_reference(a):
    """The variance of every row."""
    return a.double().var(1, unbiased=False).to(a.dtype)


@T.macro
def insert(values, places, row, value, place, count):
    """Put a value in its place among the `count` largest of a row; of equals, the first comes first."""
    for n in T.serial(count):
        slot = count - 1 - n
        if value > values[row, slot]:
            if slot < count - 1:
                values[row, slot + 1] = values[row, slot]
                places[row, slot + 1] = places[row, slot]
            values[row, slot] = value
            places[row, slot] = place


@T.macro
def merge(before, after):
    """Two lists of the largest of rows, with their places, as one."""
    rows, count = before[0].shape
    for i in T.serial(rows):
        for n in T.serial(count):
            insert(before[0], before[1], i, after[0][i, n], after[1][i, n], count)


def largest_of_rows(M, N, with_=merge, count=3, block_M=4, block_N=8, dtype="float32"):
    """The `count` largest of every row, and where they are: -infinity and -1 where a row has fewer."""

    @T.prim_func
    def largest_of_rows_kernel(
        A: T.Tensor((M, N), dtype), V: T.Tensor((M, count), dtype), W: T.Tensor((M, count), "int32")
    ):
        with T.Kernel(T.ceildiv(M, block_M), threads=32) as bx:
            a = T.alloc_fragment((block_M, block_N), dtype)
            values = T.alloc_fragment((block_M, count), dtype)
            places = T.alloc_fragment((block_M, count), "int32")
            if with_ is not None:
                mt.combine(state=(values, places), with_=with_)
            T.fill(values, -T.infinity(dtype))
            T.fill(places, -1)
            for ko in T.serial(T.ceildiv(N, block_N)):
                T.copy(A[bx * block_M, ko * block_N], a)
                for i in T.serial(block_M):
                    for k in T.serial(block_N):
                        if ko * block_N + k < N:
                            insert(values, places, i, a[i, k], ko * block_N + k, count)
            T.copy(values, V[bx * block_M, 0])
            T.copy(places, W[bx * block_M, 0])

    return largest_of_rows_kernel


def largest_of_rows_reference(a, count=3):
    """The same by a stable sort."""
    order = torch.sort(a, dim=1, descending=True, stable=True)
    return order.values[:, :count].contiguous(), order.indices[:, :count].int().contiguous()


def of_linear_maps(dim):
    """What a part of a sequence makes of a state is `state @ map + own`: of two parts, one after the other."""

    @T.macro
    def combined(before, after):
        state = T.alloc_fragment((dim, dim), "float32")
        both = T.alloc_fragment((dim, dim), "float32")
        T.copy(after[0], state)
        T.gemm(before[0], after[1], state)
        T.clear(both)
        T.gemm(before[1], after[1], both)
        T.copy(state, before[0])
        T.copy(both, before[1])

    return combined


def delta_rule(length, heads, dim):
    """`Y[t] = S[t] Q[t]` of every head, after `S[t] = S[t-1] (1 - B[t] K[t] K[t]') + B[t] V[t] K[t]'`. Beside the
    state, the product of its maps is carried: with that, parts of a sequence are combined."""

    @T.prim_func
    def delta_rule_kernel(
        Q: T.Tensor((length, heads, dim), "float32"),
        K: T.Tensor((length, heads, dim), "float32"),
        V: T.Tensor((length, heads, dim), "float32"),
        B: T.Tensor((length, heads), "float32"),
        Y: T.Tensor((length, heads, dim), "float32"),
    ):
        with T.Kernel(heads, threads=32) as bx:
            q = T.alloc_fragment((dim,), "float32")
            k = T.alloc_fragment((dim,), "float32")
            v = T.alloc_fragment((dim,), "float32")
            state = T.alloc_fragment((dim, dim), "float32")
            maps = T.alloc_fragment((dim, dim), "float32")
            made = T.alloc_fragment((dim, dim), "float32")
            seen = T.alloc_fragment((dim,), "float32")
            mt.combine(state=(state, maps), with_=of_linear_maps(dim))
            T.clear(state)
            for i, j in T.Parallel(dim, dim):
                maps[i, j] = T.if_then_else(i == j, 1.0, 0.0)
            for t in T.serial(length):
                T.copy(Q[t, bx, 0:dim], q)
                T.copy(K[t, bx, 0:dim], k)
                T.copy(V[t, bx, 0:dim], v)
                for i, j in T.Parallel(dim, dim):
                    made[i, j] = maps[i, j] * k[j]
                T.reduce_sum(made, seen, dim=1)
                for i, j in T.Parallel(dim, dim):
                    maps[i, j] = maps[i, j] - B[t, bx] * seen[i] * k[j]
                for i, j in T.Parallel(dim, dim):
                    made[i, j] = state[i, j] * k[j]
                T.reduce_sum(made, seen, dim=1)
                for i, j in T.Parallel(dim, dim):
                    state[i, j] = state[i, j] + B[t, bx] * (v[i] - seen[i]) * k[j]
                for i, j in T.Parallel(dim, dim):
                    made[i, j] = state[i, j] * q[j]
                T.reduce_sum(made, seen, dim=1)
                T.copy(seen, Y[t, bx, 0:dim])

    return delta_rule_kernel


def delta_rule_reference(q, k, v, b):
    """The same, position by position, in float64."""
    q, k, v, b = (tensor.double() for tensor in (q, k, v, b))
    state, rows = q.new_zeros(q.shape[1], v.shape[2], k.shape[2]), []
    for t in range(len(q)):
        seen = torch.einsum("hij,hj->hi", state, k[t])
        state = state + torch.einsum("h,hi,hj->hij", b[t], v[t] - seen, k[t])
        rows.append(torch.einsum("hij,hj->hi", state, q[t]))
    return torch.stack(rows).float()
