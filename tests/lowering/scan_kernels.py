"""Kernels whose loops carry a state in order and use it on the way."""

import tilelang.language as T


def running(steps, width, update, *, start=0.0, block=4, last=False, by="steps"):
    """`Y[t] = state` after `state = update(state, X[t])` for all t in order, in columns; `E`: the state in the end."""

    @T.prim_func
    def running_kernel(
        X: T.Tensor((steps, width), "float32"),
        Y: T.Tensor((steps, width), "float32"),
        E: T.Tensor((width,), "float32"),
    ):
        with T.Kernel(T.ceildiv(width, block), threads=32) as bx:
            x = T.alloc_fragment((block,), "float32")
            state = T.alloc_fragment((block,), "float32")
            T.fill(state, start)
            for t in T.serial(steps):
                T.copy(X[t, bx * block], x)
                for i in T.Parallel(block):
                    state[i] = update(state[i], x[i])
                T.copy(state, Y[t, bx * block])
            T.copy(state, E[bx * block])

    return running_kernel


def chunked(batch, heads, length, key_dim, value_dim, chunk=16, decay=None):
    """Linear attention by chunks: `O[t] = sum over s <= t of decay**(t - s) * (Q[t] . K[s]) * V[s]`; H is the state in
    the end."""
    rate = 1.0 if decay is None else decay

    @T.prim_func
    def chunked_kernel(
        Q: T.Tensor((batch, length, heads, key_dim), "float32"),
        K: T.Tensor((batch, length, heads, key_dim), "float32"),
        V: T.Tensor((batch, length, heads, value_dim), "float32"),
        Out: T.Tensor((batch, length, heads, value_dim), "float32"),
        H: T.Tensor((batch, heads, key_dim, value_dim), "float32"),
    ):
        with T.Kernel(heads, batch, threads=128) as (bh, bb):
            q = T.alloc_shared((chunk, key_dim), "float32")
            k = T.alloc_shared((chunk, key_dim), "float32")
            v = T.alloc_shared((chunk, value_dim), "float32")
            scores = T.alloc_fragment((chunk, chunk), "float32")
            out = T.alloc_fragment((chunk, value_dim), "float32")
            state = T.alloc_fragment((key_dim, value_dim), "float32")
            before = T.alloc_shared((key_dim, value_dim), "float32")
            T.clear(state)
            for c in T.Pipelined(length // chunk, num_stages=1):
                T.copy(Q[bb, c * chunk : (c + 1) * chunk, bh, 0:key_dim], q)
                T.copy(K[bb, c * chunk : (c + 1) * chunk, bh, 0:key_dim], k)
                T.copy(V[bb, c * chunk : (c + 1) * chunk, bh, 0:value_dim], v)
                T.gemm(q, k, scores, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    scores[i, j] = T.if_then_else(i >= j, scores[i, j] * T.pow(rate, T.cast(i - j, "float32")), 0.0)
                T.gemm(scores, v, out, clear_accum=True)
                T.copy(state, before)
                for i, j in T.Parallel(chunk, key_dim):
                    q[i, j] = q[i, j] * T.pow(rate, T.cast(i + 1, "float32"))
                T.gemm(q, before, out)
                if decay is not None:
                    for i, j in T.Parallel(key_dim, value_dim):
                        state[i, j] = state[i, j] * (rate**chunk)
                for i, j in T.Parallel(chunk, key_dim):
                    k[i, j] = k[i, j] * T.pow(rate, T.cast(chunk - 1 - i, "float32"))
                T.gemm(k, v, state, transpose_A=True)
                T.copy(out, Out[bb, c * chunk : (c + 1) * chunk, bh, 0:value_dim])
            T.copy(state, H[bb, bh, 0:key_dim, 0:value_dim])

    return chunked_kernel
