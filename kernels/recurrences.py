"""Recurrences over time, forwards and backwards."""

import tilelang.language as T
import torch


def advantages(steps, width, discount=0.75, block=16):
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16): from the last step to the first,
    `A[t] = R[t] + V[t + 1] - V[t] + discount * A[t + 1]`, where no episode ends at t."""

    @T.prim_func
    def advantages_kernel(
        R: T.Tensor((steps, width), "float32"),
        V: T.Tensor((steps, width), "float32"),
        ends: T.Tensor((steps, width), "int32"),
        A: T.Tensor((steps, width), "float32"),
    ):
        with T.Kernel(T.ceildiv(width, block), threads=128) as bx:
            reward = T.alloc_fragment((block,), "float32")
            value = T.alloc_fragment((block,), "float32")
            following = T.alloc_fragment((block,), "float32")
            ended = T.alloc_fragment((block,), "int32")
            later = T.alloc_fragment((block,), "float32")
            T.clear(later)
            for i in T.serial(steps):
                t = steps - 1 - i
                T.copy(R[t, bx * block], reward)
                T.copy(V[t, bx * block], value)
                T.copy(V[T.min(t + 1, steps - 1), bx * block], following)
                T.copy(ends[t, bx * block], ended)
                for j in T.Parallel(block):
                    later[j] = (
                        T.if_then_else(ended[j] > 0, 0.0, discount * later[j])
                        + T.if_then_else(t + 1 < steps, following[j], 0.0)
                        + (reward[j] - value[j])
                    )
                T.copy(later, A[t, bx * block])

    return advantages_kernel


def advantages_reference(r, v, ends, discount=0.75):
    following = torch.cat([v[1:], torch.zeros_like(v[:1])]).double()
    later, found = torch.zeros_like(r[0], dtype=torch.float64), []
    for at in reversed(range(len(r))):
        later = torch.where(ends[at] > 0, 0.0, discount * later) + following[at] + (r[at] - v[at]).double()
        found.append(later)
    return torch.stack(found[::-1]).float()


def recurrent_network(steps, batch, hidden, block=8, dtype="float32"):
    """`Y[t] = tanh(X[t] + Y[t - 1] W)` from H0, an Elman network; HN is the last one."""

    @T.prim_func
    def recurrent_network_kernel(
        X: T.Tensor((steps, batch, hidden), dtype),
        W: T.Tensor((hidden, hidden), dtype),
        H0: T.Tensor((batch, hidden), dtype),
        Y: T.Tensor((steps, batch, hidden), dtype),
        HN: T.Tensor((batch, hidden), dtype),
    ):
        with T.Kernel(T.ceildiv(batch, block), threads=128) as bx:
            weights = T.alloc_shared((hidden, hidden), dtype)
            state = T.alloc_shared((block, hidden), dtype)
            x = T.alloc_fragment((block, hidden), dtype)
            acc = T.alloc_fragment((block, hidden), "float32")
            T.copy(W, weights)
            T.copy(H0[bx * block, 0], state)
            for t in T.serial(steps):
                T.copy(X[t, bx * block : (bx + 1) * block, 0:hidden], x)
                T.gemm(state, weights, acc, clear_accum=True)
                for i, j in T.Parallel(block, hidden):
                    state[i, j] = T.tanh(acc[i, j] + x[i, j])
                T.copy(state, Y[t, bx * block : (bx + 1) * block, 0:hidden])
            T.copy(state, HN[bx * block, 0])

    return recurrent_network_kernel


def recurrent_network_reference(x, w, h0):
    state, found = h0.double(), []
    for row in x.double():
        state = torch.tanh(row + state @ w.double())
        found.append(state)
    return torch.stack(found).float(), state.float()


def delta_states(batch, length, heads, key_dim, value_dim, chunk=16, block=16, dtype="float32"):
    """The states of the gated delta rule before each chunk (arXiv:2412.06464, by chunks), from H0: of a chunk's
    `V_new = U - W S`, `S' = S exp(g_last) + K' (V_new exp(g_last - g))`, g being logarithms of gates, summed up within
    chunks. `final` is the state in the end."""
    chunks = length // chunk

    @T.prim_func
    def delta_states_kernel(
        K: T.Tensor((batch, length, heads, key_dim), dtype),
        W: T.Tensor((batch, length, heads, key_dim), dtype),
        U: T.Tensor((batch, length, heads, value_dim), dtype),
        G: T.Tensor((batch, length, heads), "float32"),
        H0: T.Tensor((batch, heads, key_dim, value_dim), dtype),
        H: T.Tensor((batch, chunks, heads, key_dim, value_dim), dtype),
        final: T.Tensor((batch, heads, key_dim, value_dim), "float32"),
        V_new: T.Tensor((batch, length, heads, value_dim), dtype),
    ):
        with T.Kernel(T.ceildiv(value_dim, block), batch * heads, threads=128) as (bv, bbh):
            bb, bh = bbh // heads, bbh % heads
            rounded = T.alloc_shared((key_dim, block), dtype)
            state = T.alloc_fragment((key_dim, block), "float32")
            keys = T.alloc_shared((chunk, key_dim), dtype)
            weights = T.alloc_shared((chunk, key_dim), dtype)
            values = T.alloc_shared((chunk, block), dtype)
            made = T.alloc_fragment((chunk, block), "float32")
            gates = T.alloc_shared((chunk,), "float32")
            last = T.alloc_var("float32")
            T.copy(H0[bb, bh, 0:key_dim, bv * block : (bv + 1) * block], rounded)
            T.copy(rounded, state)
            for c in T.Pipelined(chunks, num_stages=1):
                T.copy(rounded, H[bb, c, bh, 0:key_dim, bv * block : (bv + 1) * block])
                T.copy(W[bb, c * chunk : (c + 1) * chunk, bh, 0:key_dim], weights)
                T.gemm(weights, rounded, made, clear_accum=True)
                T.copy(U[bb, c * chunk : (c + 1) * chunk, bh, bv * block : (bv + 1) * block], values)
                for i, j in T.Parallel(chunk, block):
                    made[i, j] = values[i, j] - made[i, j]
                T.copy(made, V_new[bb, c * chunk : (c + 1) * chunk, bh, bv * block : (bv + 1) * block])
                T.copy(K[bb, c * chunk : (c + 1) * chunk, bh, 0:key_dim], keys)
                last = G[bb, (c + 1) * chunk - 1, bh]
                for i in T.Parallel(chunk):
                    gates[i] = G[bb, c * chunk + i, bh]
                for i, j in T.Parallel(chunk, block):
                    values[i, j] = made[i, j] * T.exp(last - gates[i])
                for i, j in T.Parallel(key_dim, block):
                    state[i, j] = state[i, j] * T.exp(last)
                T.gemm(keys, values, state, transpose_A=True)
                T.copy(state, rounded)
            T.copy(state, final[bb, bh, 0:key_dim, bv * block : (bv + 1) * block])

    return delta_states_kernel


def delta_states_reference(k, w, u, g, h0, chunk=16):
    state, states, values = h0.double(), [], []
    parts = (tensor.double().split(chunk, 1) for tensor in (k, w, u, g))
    for keys, weights, own, gates in zip(*parts, strict=True):
        states.append(state)
        made = own - torch.einsum("bshk,bhkv->bshv", weights, state)
        values.append(made)
        left = torch.exp(gates[:, -1:] - gates)[..., None]
        state = state * torch.exp(gates[:, -1])[..., None, None] + torch.einsum("bshk,bshv->bhkv", keys, made * left)
    return torch.stack(states, 1).float(), state.float(), torch.cat(values, 1).float()
