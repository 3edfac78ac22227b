"""Linear attention over tensors of shape (batch, seq, heads, dim): what the past comes to is one matrix per head."""

import tilelang.language as T
import torch


def linear_attention(batch, heads, length, key_dim, value_dim, chunk=16, decay=None):
    """`Out[t] = sum over s <= t of decay**(t - s) * (Q[t] . K[s]) * V[s]` by chunks, between which a state
    is carried; H is the state in the end."""
    rate = 1.0 if decay is None else decay

    @T.prim_func
    def linear_attention_kernel(
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

    return linear_attention_kernel


def linear_attention_reference(q, k, v, decay=None):
    """In float64, with the whole matrix of scores."""
    rate = 1.0 if decay is None else decay
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    at = torch.arange(q.shape[2])
    weights = (rate ** (at[:, None] - at[None, :]).double()).tril()
    left = (rate ** (q.shape[2] - 1 - at).double())[:, None]
    out = (((q @ k.mT) * weights) @ v).transpose(1, 2)
    return out.float().contiguous(), ((k * left).mT @ v).float()


def value_gradient(batch, heads, length, key_dim, value_dim, chunk=16):
    """`dV[t] = sum over s >= t of (Q[s] . K[t]) * dOut[s]`, that of linear attention, from the last chunk to the first:
    what the future comes to is one matrix per head."""
    chunks = length // chunk

    @T.prim_func
    def value_gradient_kernel(
        Q: T.Tensor((batch, length, heads, key_dim), "float32"),
        K: T.Tensor((batch, length, heads, key_dim), "float32"),
        dOut: T.Tensor((batch, length, heads, value_dim), "float32"),
        dV: T.Tensor((batch, length, heads, value_dim), "float32"),
    ):
        with T.Kernel(heads, batch, threads=128) as (bh, bb):
            q = T.alloc_shared((chunk, key_dim), "float32")
            k = T.alloc_shared((chunk, key_dim), "float32")
            d_out = T.alloc_shared((chunk, value_dim), "float32")
            scores = T.alloc_fragment((chunk, chunk), "float32")
            d_v = T.alloc_fragment((chunk, value_dim), "float32")
            state = T.alloc_fragment((key_dim, value_dim), "float32")
            after = T.alloc_shared((key_dim, value_dim), "float32")
            T.clear(state)
            for step in T.Pipelined(chunks, num_stages=1):
                start = (chunks - 1 - step) * chunk
                T.copy(Q[bb, start : start + chunk, bh, 0:key_dim], q)
                T.copy(K[bb, start : start + chunk, bh, 0:key_dim], k)
                T.copy(dOut[bb, start : start + chunk, bh, 0:value_dim], d_out)
                T.gemm(k, q, scores, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    scores[i, j] = T.if_then_else(i <= j, scores[i, j], 0.0)
                T.copy(state, after)
                T.gemm(scores, d_out, d_v, clear_accum=True)
                T.gemm(k, after, d_v)
                T.gemm(q, d_out, state, transpose_A=True)
                T.copy(d_v, dV[bb, start : start + chunk, bh, 0:value_dim])

    return value_gradient_kernel


def value_gradient_reference(q, k, d_out):
    """In float64, with the whole matrix of scores."""
    q, k, d_out = (t.double().transpose(1, 2) for t in (q, k, d_out))
    return ((q @ k.mT).tril().mT @ d_out).transpose(1, 2).float().contiguous()


def query_and_value_gradients(batch, heads, length, key_dim, value_dim, chunk=16):
    """The gradients of linear attention that need what came before, `dQ[t] = sum over s <= t of (dOut[t] . V[s]) *
    K[s]`, and what comes after, dV, in one kernel: from the first chunk to the last, then back."""
    chunks = length // chunk

    @T.prim_func
    def query_and_value_gradients_kernel(
        Q: T.Tensor((batch, length, heads, key_dim), "float32"),
        K: T.Tensor((batch, length, heads, key_dim), "float32"),
        V: T.Tensor((batch, length, heads, value_dim), "float32"),
        dOut: T.Tensor((batch, length, heads, value_dim), "float32"),
        dQ: T.Tensor((batch, length, heads, key_dim), "float32"),
        dV: T.Tensor((batch, length, heads, value_dim), "float32"),
    ):
        with T.Kernel(heads, batch, threads=128) as (bh, bb):
            keys = T.alloc_shared((chunk, key_dim), "float32")
            queries = T.alloc_shared((chunk, key_dim), "float32")
            values = T.alloc_shared((chunk, value_dim), "float32")
            d_out = T.alloc_shared((chunk, value_dim), "float32")
            scores = T.alloc_fragment((chunk, chunk), "float32")
            d_q = T.alloc_fragment((chunk, key_dim), "float32")
            d_v = T.alloc_fragment((chunk, value_dim), "float32")
            past = T.alloc_fragment((key_dim, value_dim), "float32")
            future = T.alloc_fragment((key_dim, value_dim), "float32")
            known = T.alloc_shared((key_dim, value_dim), "float32")
            T.clear(past)
            T.clear(future)
            for step in T.Pipelined(chunks, num_stages=1):
                T.copy(K[bb, step * chunk : (step + 1) * chunk, bh, 0:key_dim], keys)
                T.copy(V[bb, step * chunk : (step + 1) * chunk, bh, 0:value_dim], values)
                T.copy(dOut[bb, step * chunk : (step + 1) * chunk, bh, 0:value_dim], d_out)
                T.gemm(d_out, values, scores, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    scores[i, j] = T.if_then_else(i >= j, scores[i, j], 0.0)
                T.copy(past, known)
                T.gemm(scores, keys, d_q, clear_accum=True)
                T.gemm(d_out, known, d_q, transpose_B=True)
                T.gemm(keys, values, past, transpose_A=True)
                T.copy(d_q, dQ[bb, step * chunk : (step + 1) * chunk, bh, 0:key_dim])
            for step in T.Pipelined(chunks, num_stages=1):
                start = (chunks - 1 - step) * chunk
                T.copy(Q[bb, start : start + chunk, bh, 0:key_dim], queries)
                T.copy(K[bb, start : start + chunk, bh, 0:key_dim], keys)
                T.copy(dOut[bb, start : start + chunk, bh, 0:value_dim], d_out)
                T.gemm(keys, queries, scores, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    scores[i, j] = T.if_then_else(i <= j, scores[i, j], 0.0)
                T.copy(future, known)
                T.gemm(scores, d_out, d_v, clear_accum=True)
                T.gemm(keys, known, d_v)
                T.gemm(queries, d_out, future, transpose_A=True)
                T.copy(d_v, dV[bb, start : start + chunk, bh, 0:value_dim])

    return query_and_value_gradients_kernel


def query_and_value_gradients_reference(q, k, v, d_out):
    """In float64, with the whole matrices of scores."""
    wide_k, wide_v, wide = (t.double().transpose(1, 2) for t in (k, v, d_out))
    d_q = (wide @ wide_v.mT).tril() @ wide_k
    return d_q.transpose(1, 2).float().contiguous(), value_gradient_reference(q, k, d_out)
