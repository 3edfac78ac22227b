"""Kernels whose authors say how the states of their loops are combined."""

import tilelang.language as T

import mesh_tensor as mt


def welford_states(before, after):
    """Count, mean, and sum of squared distances, of both parts."""
    (n, mean, m2), (more, other, m2_after) = before, after
    total = n + more
    share = T.if_then_else(total > 0, more / T.max(total, 1.0), 0.0)
    apart = other - mean
    return total, mean + apart * share, m2 + m2_after + apart * apart * n * share


def welford(rows, cols, with_=welford_states, block=8, start=0.0):
    """Variance of rows in one pass."""

    @T.prim_func
    def welford_kernel(A: T.Tensor((rows, cols), "float32"), V: T.Tensor((rows,), "float32")):
        with T.Kernel(T.ceildiv(rows, 4), threads=32) as bx:
            a = T.alloc_fragment((4, block), "float32")
            count = T.alloc_fragment((4,), "float32")
            mean = T.alloc_fragment((4,), "float32")
            m2 = T.alloc_fragment((4,), "float32")
            before = T.alloc_fragment((4,), "float32")
            if with_ is not None:
                mt.combine(state=(count, mean, m2), with_=with_)
            T.fill(count, start)
            T.clear(mean)
            T.clear(m2)
            for ko in T.serial(T.ceildiv(cols, block)):
                T.copy(A[bx * 4, ko * block], a)
                for k in T.serial(block):
                    if ko * block + k < cols:
                        for i in T.Parallel(4):
                            before[i] = mean[i]
                        for i in T.Parallel(4):
                            count[i] = count[i] + 1.0
                        for i in T.Parallel(4):
                            mean[i] = before[i] + (a[i, k] - before[i]) / count[i]
                        for i in T.Parallel(4):
                            m2[i] = m2[i] + (a[i, k] - before[i]) * (a[i, k] - mean[i])
            for i in T.Parallel(4):
                m2[i] = m2[i] / cols
            T.copy(m2, V[bx * 4])

    return welford_kernel


@T.macro
def insert(values, places, row, value, place, k):
    """Put a value in its place among the k largest of a row, of which the first of equals comes first."""
    for n in T.serial(k):
        slot = k - 1 - n
        if value > values[row, slot]:
            if slot < k - 1:
                values[row, slot + 1] = values[row, slot]
                places[row, slot + 1] = places[row, slot]
            values[row, slot] = value
            places[row, slot] = place


@T.macro
def merged_lists(before, after):
    for i in T.serial(4):
        for n in T.serial(3):
            insert(before[0], before[1], i, after[0][i, n], after[1][i, n], 3)


def top_k(rows, cols, with_=merged_lists, block=8):
    """The three largest of every row, with their places."""

    @T.prim_func
    def top_k_kernel(
        A: T.Tensor((rows, cols), "float32"), V: T.Tensor((rows, 3), "float32"), W: T.Tensor((rows, 3), "int32")
    ):
        with T.Kernel(rows // 4, threads=32) as bx:
            a = T.alloc_fragment((4, block), "float32")
            values = T.alloc_fragment((4, 3), "float32")
            places = T.alloc_fragment((4, 3), "int32")
            if with_ is not None:
                mt.combine(state=(values, places), with_=with_)
            T.fill(values, -T.infinity("float32"))
            T.fill(places, -1)
            for ko in T.serial(cols // block):
                T.copy(A[bx * 4, ko * block], a)
                for i in T.serial(4):
                    for k in T.serial(block):
                        insert(values, places, i, a[i, k], ko * block + k, 3)
            T.copy(values, V[bx * 4, 0])
            T.copy(places, W[bx * 4, 0])

    return top_k_kernel


def of_linear_maps(dim):
    """What a step makes of a state is `state @ P + S`: of two of those, one after the other."""

    @T.macro
    def combined(before, after):
        state = T.alloc_fragment((dim, dim), "float32")
        steps = T.alloc_fragment((dim, dim), "float32")
        T.copy(after[0], state)
        T.gemm(before[0], after[1], state)
        T.clear(steps)
        T.gemm(before[1], after[1], steps)
        T.copy(state, before[0])
        T.copy(steps, before[1])

    return combined


def delta_rule(steps, dim, with_=True):
    """Y[t] = S[t] q[t] after S[t] = S[t-1] (1 - b[t] k[t] k[t]') + b[t] v[t] k[t]', beside the product of the maps."""

    @T.prim_func
    def delta_rule_kernel(
        Q: T.Tensor((steps, dim), "float32"),
        K: T.Tensor((steps, dim), "float32"),
        V: T.Tensor((steps, dim), "float32"),
        B: T.Tensor((steps,), "float32"),
        Y: T.Tensor((steps, dim), "float32"),
    ):
        with T.Kernel(1, threads=32):
            q, k, v = (
                T.alloc_fragment((dim,), "float32"),
                T.alloc_fragment((dim,), "float32"),
                T.alloc_fragment((dim,), "float32"),
            )
            state = T.alloc_fragment((dim, dim), "float32")
            maps = T.alloc_fragment((dim, dim), "float32")
            made = T.alloc_fragment((dim, dim), "float32")
            seen = T.alloc_fragment((dim,), "float32")
            if with_:
                mt.combine(state=(state, maps), with_=of_linear_maps(dim))
            T.clear(state)
            for i, j in T.Parallel(dim, dim):
                maps[i, j] = T.if_then_else(i == j, 1.0, 0.0)
            for t in T.serial(steps):
                T.copy(Q[t, 0], q)
                T.copy(K[t, 0], k)
                T.copy(V[t, 0], v)
                for i, j in T.Parallel(dim, dim):
                    made[i, j] = maps[i, j] * k[j]
                T.reduce_sum(made, seen, dim=1)
                for i, j in T.Parallel(dim, dim):
                    maps[i, j] = maps[i, j] - B[t] * seen[i] * k[j]
                for i, j in T.Parallel(dim, dim):
                    made[i, j] = state[i, j] * k[j]
                T.reduce_sum(made, seen, dim=1)
                for i, j in T.Parallel(dim, dim):
                    state[i, j] = state[i, j] + B[t] * (v[i] - seen[i]) * k[j]
                for i, j in T.Parallel(dim, dim):
                    made[i, j] = state[i, j] * q[j]
                T.reduce_sum(made, seen, dim=1)
                T.copy(seen, Y[t, 0])

    return delta_rule_kernel


def delta_rule_reference(q, k, v, b):
    state, rows = q.new_zeros(v.shape[1], k.shape[1]), []
    for t in range(len(q)):
        state = state + b[t] * (v[t] - state @ k[t])[:, None] * k[t][None]
        rows.append(state @ q[t])
    return rows


def in_variables(steps):
    """A decayed sum and the largest so far, in variables."""

    @T.prim_func
    def in_variables_kernel(
        X: T.Tensor((4, steps), "float32"), Y: T.Tensor((4, steps), "float32"), E: T.Tensor((4,), "float32")
    ):
        with T.Kernel(4, threads=32) as bx:
            state = T.alloc_var("float32")
            largest = T.alloc_var("float32")
            state = 0.0
            largest = -T.infinity("float32")
            for t in T.serial(steps):
                state = state * 0.5 + X[bx, t]
                largest = T.max(largest, X[bx, t])
                Y[bx, t] = state
            E[bx] = largest

    return in_variables_kernel


def in_local_memory(steps):
    """The same in registers of one element."""

    @T.prim_func
    def in_local_memory_kernel(
        X: T.Tensor((4, steps), "float32"), Y: T.Tensor((4, steps), "float32"), E: T.Tensor((4,), "float32")
    ):
        with T.Kernel(4, threads=32) as bx:
            state = T.alloc_local((1,), "float32")
            largest = T.alloc_local((1,), "float32")
            state[0] = 0.0
            largest[0] = -T.infinity("float32")
            for t in T.serial(steps):
                state[0] = state[0] * 0.5 + X[bx, t]
                largest[0] = T.max(largest[0], X[bx, t])
                Y[bx, t] = state[0]
            E[bx] = largest[0]

    return in_local_memory_kernel


def online_in_variables(steps):
    """The logarithm of a sum of exponentials, by a running maximum, in variables."""

    @T.prim_func
    def online_in_variables_kernel(X: T.Tensor((4, steps), "float32"), E: T.Tensor((4,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            m = T.alloc_var("float32")
            total = T.alloc_var("float32")
            before = T.alloc_var("float32")
            m = -T.infinity("float32")
            total = 0.0
            for t in T.serial(steps):
                before = m
                m = T.max(m, X[bx, t])
                total = total * T.exp(before - m) + T.exp(X[bx, t] - m)
            E[bx] = m + T.log(total)

    return online_in_variables_kernel
