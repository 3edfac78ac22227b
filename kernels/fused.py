"""Kernels that do the same to several tensors in one launch: rotary embedding of queries and keys, projections to
queries, keys and values, an optimizer's step, rows of two caches. The tensors need not be as large as each other."""

import tilelang.language as T

from .rope import rope_reference


def rope_of_both(seq, q_heads, k_heads, dim, block_S=32):
    """`rope` of queries and keys: one grid over the heads of both."""
    half = dim // 2

    @T.macro
    def rotate(X, cos, sin, Out, bs, head):
        for i, d in T.Parallel(block_S, half):
            row = bs * block_S + i
            if row < seq:
                Out[row, head, d] = X[row, head, d] * cos[row, d] - X[row, head, d + half] * sin[row, d]
                Out[row, head, d + half] = X[row, head, d + half] * cos[row, d] + X[row, head, d] * sin[row, d]

    @T.prim_func
    def rope_of_both_kernel(
        Q: T.Tensor((seq, q_heads, dim), "float32"),
        K: T.Tensor((seq, k_heads, dim), "float32"),
        cos: T.Tensor((seq, half), "float32"),
        sin: T.Tensor((seq, half), "float32"),
        Q_out: T.Tensor((seq, q_heads, dim), "float32"),
        K_out: T.Tensor((seq, k_heads, dim), "float32"),
    ):
        with T.Kernel(q_heads + k_heads, T.ceildiv(seq, block_S), threads=128) as (bh, bs):
            if bh < q_heads:
                rotate(Q, cos, sin, Q_out, bs, bh)
            else:
                rotate(K, cos, sin, K_out, bs, bh - q_heads)

    return rope_of_both_kernel


def rope_of_both_reference(q, k, cos, sin):
    """Queries and keys, rotated in float64."""
    return rope_reference(q, cos, sin), rope_reference(k, cos, sin)


def projections(rows, inner, q, kv, block_M=64, block_N=64, block_K=64):
    """`Q = X @ Wq`, `K = X @ Wk`, `V = X @ Wv`: one grid over the columns of all three, which blocks divide."""
    of_q, of_kv = q // block_N, kv // block_N

    @T.macro
    def product(X, W, Out, by, column):
        x = T.alloc_shared((block_M, block_K), "float32")
        w = T.alloc_shared((block_K, block_N), "float32")
        total = T.alloc_fragment((block_M, block_N), "float32")
        T.clear(total)
        for ko in T.Pipelined(T.ceildiv(inner, block_K), num_stages=2):
            T.copy(X[by * block_M, ko * block_K], x)
            T.copy(W[ko * block_K, column], w)
            T.gemm(x, w, total)
        T.copy(total, Out[by * block_M, column])

    @T.prim_func
    def projections_kernel(
        X: T.Tensor((rows, inner), "float32"),
        Wq: T.Tensor((inner, q), "float32"),
        Wk: T.Tensor((inner, kv), "float32"),
        Wv: T.Tensor((inner, kv), "float32"),
        Q: T.Tensor((rows, q), "float32"),
        K: T.Tensor((rows, kv), "float32"),
        V: T.Tensor((rows, kv), "float32"),
    ):
        with T.Kernel(of_q + 2 * of_kv, T.ceildiv(rows, block_M), threads=128) as (bx, by):
            if bx < of_q:
                product(X, Wq, Q, by, bx * block_N)
            elif bx < of_q + of_kv:
                product(X, Wk, K, by, (bx - of_q) * block_N)
            else:
                product(X, Wv, V, by, (bx - of_q - of_kv) * block_N)

    return projections_kernel


def projections_reference(x, *weights):
    """The products with all weights, in float64."""
    return tuple((x.double() @ w.double()).float() for w in weights)


def gate_and_up(rows, inner, hidden, block_M=64, block_N=64, block_K=64):
    """`Gate = X @ Wg`, `Up = X @ Wu` as one product of which programs take blocks of one of the matrices."""
    blocks = hidden // block_N

    @T.prim_func
    def gate_and_up_kernel(
        X: T.Tensor((rows, inner), "float32"),
        Wg: T.Tensor((inner, hidden), "float32"),
        Wu: T.Tensor((inner, hidden), "float32"),
        Gate: T.Tensor((rows, hidden), "float32"),
        Up: T.Tensor((rows, hidden), "float32"),
    ):
        with T.Kernel(2 * blocks, T.ceildiv(rows, block_M), threads=128) as (bx, by):
            x = T.alloc_shared((block_M, block_K), "float32")
            w = T.alloc_shared((block_K, block_N), "float32")
            total = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(total)
            for ko in T.Pipelined(T.ceildiv(inner, block_K), num_stages=2):
                T.copy(X[by * block_M, ko * block_K], x)
                if bx < blocks:
                    T.copy(Wg[ko * block_K, bx * block_N], w)
                else:
                    T.copy(Wu[ko * block_K, (bx - blocks) * block_N], w)
                T.gemm(x, w, total)
            if bx < blocks:
                T.copy(total, Gate[by * block_M, bx * block_N])
            else:
                T.copy(total, Up[by * block_M, (bx - blocks) * block_N])

    return gate_and_up_kernel


def updates_of_both(first, second, block=256, rate=1e-3, beta=0.9):
    """A step with momentum of two parameters of different lengths: `M = beta * M + dP; P -= rate * M`."""
    blocks = -(-first // block)

    @T.macro
    def update(P, dP, M, size, start):
        for i in T.Parallel(block):
            if start + i < size:
                M[start + i] = beta * M[start + i] + dP[start + i]
                P[start + i] = P[start + i] - rate * M[start + i]

    @T.prim_func
    def updates_of_both_kernel(
        P: T.Tensor((first,), "float32"),
        dP: T.Tensor((first,), "float32"),
        M: T.Tensor((first,), "float32"),
        P2: T.Tensor((second,), "float32"),
        dP2: T.Tensor((second,), "float32"),
        M2: T.Tensor((second,), "float32"),
    ):
        with T.Kernel(blocks + T.ceildiv(second, block), threads=128) as bx:
            if bx < blocks:
                update(P, dP, M, first, bx * block)
            else:
                update(P2, dP2, M2, second, (bx - blocks) * block)

    return updates_of_both_kernel


def updates_of_both_reference(p, dp, m, p2, dp2, m2, rate=1e-3, beta=0.9):
    """What becomes of the parameters and their momenta."""
    (m, p), (m2, p2) = ((new := beta * n + d, q - rate * new) for q, d, n in ((p, dp, m), (p2, dp2, m2)))
    return p, m, p2, m2


def put_both(tokens, slots, heads, key_dim, value_heads, value_dim):
    """Rows of keys and values put into their caches, at the slots that data say: two loops of a token's program."""

    @T.prim_func
    def put_both_kernel(
        K: T.Tensor((tokens, heads, key_dim), "float32"),
        V: T.Tensor((tokens, value_heads, value_dim), "float32"),
        slot_of: T.Tensor((tokens,), "int32"),
        K_cache: T.Tensor((slots, heads, key_dim), "float32"),
        V_cache: T.Tensor((slots, value_heads, value_dim), "float32"),
    ):
        with T.Kernel(tokens, threads=128) as token:
            for h, d in T.Parallel(heads, key_dim):
                K_cache[slot_of[token], h, d] = K[token, h, d]
            for h, d in T.Parallel(value_heads, value_dim):
                V_cache[slot_of[token], h, d] = V[token, h, d]

    return put_both_kernel


def put_both_reference(k, v, slot_of, k_cache, v_cache):
    """The caches, with the rows in their slots."""
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    k_cache[slot_of.long()], v_cache[slot_of.long()] = k, v
    return k_cache, v_cache
