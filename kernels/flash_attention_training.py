"""Flash attention that learns: the forward kernel also writes the log-sum-exp of every row of scores, from which the
backward kernels compute the weights again, block by block. Tensors are (batch, heads, seq, dim)."""

import math

import tilelang.language as T


def attention_with_lse(
    batch,
    heads,
    seq_q,
    seq_kv,
    dim,
    causal=False,
    groups=1,
    block_M=64,
    block_N=64,
    dtype="float16",
    accum_dtype="float32",
):
    """`Out = softmax(Q @ K^T / sqrt(dim)) @ V`, and `Lse`, the logarithm of the sum of exponentials of each row.

    `causal`: query i sees the keys up to `i + seq_kv - seq_q`. `groups` query heads share one head of K and V."""
    scale, past = 1.0 / math.sqrt(dim), seq_kv - seq_q

    @T.prim_func
    def attention_with_lse_kernel(
        Q: T.Tensor((batch, heads, seq_q, dim), dtype),
        K: T.Tensor((batch, heads // groups, seq_kv, dim), dtype),
        V: T.Tensor((batch, heads // groups, seq_kv, dim), dtype),
        Out: T.Tensor((batch, heads, seq_q, dim), dtype),
        Lse: T.Tensor((batch, heads, seq_q), accum_dtype),
    ):
        with T.Kernel(T.ceildiv(seq_q, block_M), heads, batch, threads=128) as (bx, by, bz):
            Q_shared = T.alloc_shared((block_M, dim), dtype)
            K_shared = T.alloc_shared((block_N, dim), dtype)
            V_shared = T.alloc_shared((block_N, dim), dtype)
            scores = T.alloc_fragment((block_M, block_N), accum_dtype)
            weights = T.alloc_fragment((block_M, block_N), dtype)
            acc = T.alloc_fragment((block_M, dim), accum_dtype)
            row_max = T.alloc_fragment((block_M,), accum_dtype)
            row_max_prev = T.alloc_fragment((block_M,), accum_dtype)
            rescale = T.alloc_fragment((block_M,), accum_dtype)
            block_sum = T.alloc_fragment((block_M,), accum_dtype)
            row_sum = T.alloc_fragment((block_M,), accum_dtype)
            T.copy(Q[bz, by, bx * block_M, 0], Q_shared)
            T.clear(acc)
            T.clear(row_sum)
            T.fill(row_max, -T.infinity(accum_dtype))
            for ko in T.Pipelined(T.ceildiv(seq_kv, block_N), num_stages=1):
                T.copy(K[bz, by // groups, ko * block_N, 0], K_shared)
                T.copy(V[bz, by // groups, ko * block_N, 0], V_shared)
                T.clear(scores)
                T.gemm(Q_shared, K_shared, scores, transpose_B=True)
                for i, j in T.Parallel(block_M, block_N):
                    seen = ko * block_N + j < seq_kv
                    if causal:
                        seen = bx * block_M + i + past >= ko * block_N + j
                    scores[i, j] = T.if_then_else(seen, scores[i, j] * scale, -T.infinity(accum_dtype))
                T.copy(row_max, row_max_prev)
                T.reduce_max(scores, row_max, dim=1, clear=False)
                for i in T.Parallel(block_M):
                    rescale[i] = T.exp(row_max_prev[i] - row_max[i])
                for i, j in T.Parallel(block_M, block_N):
                    scores[i, j] = T.exp(scores[i, j] - row_max[i])
                T.reduce_sum(scores, block_sum, dim=1)
                for i in T.Parallel(block_M):
                    row_sum[i] = row_sum[i] * rescale[i] + block_sum[i]
                for i, j in T.Parallel(block_M, dim):
                    acc[i, j] = acc[i, j] * rescale[i]
                T.copy(scores, weights)
                T.gemm(weights, V_shared, acc)
            for i, j in T.Parallel(block_M, dim):
                acc[i, j] = acc[i, j] / row_sum[i]
            T.copy(acc, Out[bz, by, bx * block_M, 0])
            for i in T.Parallel(block_M):
                row_sum[i] = T.log(row_sum[i]) + row_max[i]
            T.copy(row_sum, Lse[bz, by, bx * block_M])

    return attention_with_lse_kernel


def attention_d_Q(
    batch,
    heads,
    seq_q,
    seq_kv,
    dim,
    causal=False,
    groups=1,
    block_M=64,
    block_N=64,
    dtype="float16",
    accum_dtype="float32",
):
    """The gradient of `attention_with_lse` with respect to Q: a block of queries walks over the keys that it sees.

    With weights P and d_P = d_Out @ V^T, that of the scores is `P * (d_P - rowsum(d_Out * Out))`."""
    scale, past = 1.0 / math.sqrt(dim), seq_kv - seq_q

    @T.prim_func
    def attention_d_Q_kernel(
        Q: T.Tensor((batch, heads, seq_q, dim), dtype),
        K: T.Tensor((batch, heads // groups, seq_kv, dim), dtype),
        V: T.Tensor((batch, heads // groups, seq_kv, dim), dtype),
        Out: T.Tensor((batch, heads, seq_q, dim), dtype),
        Lse: T.Tensor((batch, heads, seq_q), accum_dtype),
        d_Out: T.Tensor((batch, heads, seq_q, dim), dtype),
        d_Q: T.Tensor((batch, heads, seq_q, dim), dtype),
    ):
        with T.Kernel(T.ceildiv(seq_q, block_M), heads, batch, threads=128) as (bx, by, bz):
            Q_shared = T.alloc_shared((block_M, dim), dtype)
            d_Out_shared = T.alloc_shared((block_M, dim), dtype)
            K_shared = T.alloc_shared((block_N, dim), dtype)
            V_shared = T.alloc_shared((block_N, dim), dtype)
            out = T.alloc_fragment((block_M, dim), accum_dtype)
            lse = T.alloc_fragment((block_M,), accum_dtype)
            along = T.alloc_fragment((block_M,), accum_dtype)
            scores = T.alloc_fragment((block_M, block_N), accum_dtype)
            d_scores = T.alloc_fragment((block_M, block_N), accum_dtype)
            d_scores_cast = T.alloc_fragment((block_M, block_N), dtype)
            acc = T.alloc_fragment((block_M, dim), accum_dtype)
            T.copy(Q[bz, by, bx * block_M, 0], Q_shared)
            T.copy(d_Out[bz, by, bx * block_M, 0], d_Out_shared)
            T.copy(Out[bz, by, bx * block_M, 0], out)
            T.copy(Lse[bz, by, bx * block_M], lse)
            for i, j in T.Parallel(block_M, dim):
                out[i, j] = out[i, j] * d_Out_shared[i, j]
            T.reduce_sum(out, along, dim=1)
            T.clear(acc)
            for ko in T.Pipelined(T.ceildiv(seq_kv, block_N), num_stages=1):
                T.copy(K[bz, by // groups, ko * block_N, 0], K_shared)
                T.copy(V[bz, by // groups, ko * block_N, 0], V_shared)
                T.clear(scores)
                T.clear(d_scores)
                T.gemm(Q_shared, K_shared, scores, transpose_B=True)
                T.gemm(d_Out_shared, V_shared, d_scores, transpose_B=True)
                for i, j in T.Parallel(block_M, block_N):
                    seen = ko * block_N + j < seq_kv
                    if causal:
                        seen = bx * block_M + i + past >= ko * block_N + j
                    d_scores_cast[i, j] = T.if_then_else(
                        seen, T.exp(scores[i, j] * scale - lse[i]) * (d_scores[i, j] - along[i]) * scale, 0
                    )
                T.gemm(d_scores_cast, K_shared, acc)
            T.copy(acc, d_Q[bz, by, bx * block_M, 0])

    return attention_d_Q_kernel


def attention_d_K_d_V(
    batch,
    heads,
    seq_q,
    seq_kv,
    dim,
    causal=False,
    groups=1,
    block_M=64,
    block_N=64,
    dtype="float16",
    accum_dtype="float32",
):
    """The gradients with respect to K and V: a block of keys walks over the queries of all heads that share it."""
    scale, past = 1.0 / math.sqrt(dim), seq_kv - seq_q

    @T.prim_func
    def attention_d_K_d_V_kernel(
        Q: T.Tensor((batch, heads, seq_q, dim), dtype),
        K: T.Tensor((batch, heads // groups, seq_kv, dim), dtype),
        V: T.Tensor((batch, heads // groups, seq_kv, dim), dtype),
        Out: T.Tensor((batch, heads, seq_q, dim), dtype),
        Lse: T.Tensor((batch, heads, seq_q), accum_dtype),
        d_Out: T.Tensor((batch, heads, seq_q, dim), dtype),
        d_K: T.Tensor((batch, heads // groups, seq_kv, dim), dtype),
        d_V: T.Tensor((batch, heads // groups, seq_kv, dim), dtype),
    ):
        with T.Kernel(T.ceildiv(seq_kv, block_N), heads // groups, batch, threads=128) as (bx, by, bz):
            K_shared = T.alloc_shared((block_N, dim), dtype)
            V_shared = T.alloc_shared((block_N, dim), dtype)
            Q_shared = T.alloc_shared((block_M, dim), dtype)
            d_Out_shared = T.alloc_shared((block_M, dim), dtype)
            out = T.alloc_fragment((block_M, dim), accum_dtype)
            lse = T.alloc_fragment((block_M,), accum_dtype)
            along = T.alloc_fragment((block_M,), accum_dtype)
            scores = T.alloc_fragment((block_M, block_N), accum_dtype)
            d_scores = T.alloc_fragment((block_M, block_N), accum_dtype)
            weights = T.alloc_fragment((block_M, block_N), dtype)
            d_scores_cast = T.alloc_fragment((block_M, block_N), dtype)
            acc_K = T.alloc_fragment((block_N, dim), accum_dtype)
            acc_V = T.alloc_fragment((block_N, dim), accum_dtype)
            T.copy(K[bz, by, bx * block_N, 0], K_shared)
            T.copy(V[bz, by, bx * block_N, 0], V_shared)
            T.clear(acc_K)
            T.clear(acc_V)
            for g, qo in T.grid(groups, T.ceildiv(seq_q, block_M)):
                T.copy(Q[bz, by * groups + g, qo * block_M, 0], Q_shared)
                T.copy(d_Out[bz, by * groups + g, qo * block_M, 0], d_Out_shared)
                T.copy(Out[bz, by * groups + g, qo * block_M, 0], out)
                T.copy(Lse[bz, by * groups + g, qo * block_M], lse)
                for i, j in T.Parallel(block_M, dim):
                    out[i, j] = out[i, j] * d_Out_shared[i, j]
                T.reduce_sum(out, along, dim=1)
                T.clear(scores)
                T.clear(d_scores)
                T.gemm(Q_shared, K_shared, scores, transpose_B=True)
                T.gemm(d_Out_shared, V_shared, d_scores, transpose_B=True)
                for i, j in T.Parallel(block_M, block_N):
                    seen = qo * block_M + i < seq_q
                    if causal:
                        seen = T.And(seen, qo * block_M + i + past >= bx * block_N + j)
                    weights[i, j] = T.if_then_else(seen, T.exp(scores[i, j] * scale - lse[i]), 0)
                    d_scores_cast[i, j] = T.if_then_else(
                        seen, T.exp(scores[i, j] * scale - lse[i]) * (d_scores[i, j] - along[i]) * scale, 0
                    )
                T.gemm(weights, d_Out_shared, acc_V, transpose_A=True)
                T.gemm(d_scores_cast, Q_shared, acc_K, transpose_A=True)
            T.copy(acc_K, d_K[bz, by, bx * block_N, 0])
            T.copy(acc_V, d_V[bz, by, bx * block_N, 0])

    return attention_d_K_d_V_kernel


def attention_backward(*sizes, **options):
    """The backward kernels of `attention_with_lse` for the same arguments."""
    return attention_d_Q(*sizes, **options), attention_d_K_d_V(*sizes, **options)
