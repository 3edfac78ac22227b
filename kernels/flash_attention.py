"""Flash attention over tensors of shape (batch, heads, seq, dim): the scores of a row are never all held at once."""

import math

import tilelang.language as T
import torch

LOG2_E = math.log2(math.e)


def flash_attention(
    batch,
    heads,
    seq_q,
    seq_kv,
    dim,
    causal=False,
    skip_masked_blocks=False,
    groups=1,
    block_M=64,
    block_N=64,
    dtype="float16",
    accum_dtype="float32",
):
    """`Out = softmax(Q @ K^T / sqrt(dim)) @ V` per batch and head, walking K and V in blocks with an online softmax.

    `causal`: query i sees the keys up to `i + seq_kv - seq_q`; with `skip_masked_blocks` the loop ends at the last
    block that the query block sees. `groups` query heads share one head of K and V. TileLang compiles float32 for
    CPUs only."""
    scale = LOG2_E / math.sqrt(dim)
    past = seq_kv - seq_q
    kv_blocks = -(-seq_kv // block_N)

    @T.prim_func
    def flash_attention_kernel(
        Q: T.Tensor((batch, heads, seq_q, dim), dtype),
        K: T.Tensor((batch, heads // groups, seq_kv, dim), dtype),
        V: T.Tensor((batch, heads // groups, seq_kv, dim), dtype),
        Out: T.Tensor((batch, heads, seq_q, dim), dtype),
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
            steps = T.min(kv_blocks, T.ceildiv((bx + 1) * block_M + past, block_N)) if skip_masked_blocks else kv_blocks
            for ko in T.Pipelined(steps, num_stages=1):
                T.copy(K[bz, by // groups, ko * block_N, 0], K_shared)
                for i, j in T.Parallel(block_M, block_N):
                    if causal:
                        scores[i, j] = T.if_then_else(
                            bx * block_M + i + past >= ko * block_N + j, 0, -T.infinity(accum_dtype)
                        )
                    else:
                        scores[i, j] = T.if_then_else(ko * block_N + j < seq_kv, 0, -T.infinity(accum_dtype))
                T.gemm(Q_shared, K_shared, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(row_max, row_max_prev)
                T.reduce_max(scores, row_max, dim=1, clear=False)
                for i in T.Parallel(block_M):
                    rescale[i] = T.exp2((row_max_prev[i] - row_max[i]) * scale)
                for i, j in T.Parallel(block_M, block_N):
                    scores[i, j] = T.exp2((scores[i, j] - row_max[i]) * scale)
                T.reduce_sum(scores, block_sum, dim=1)
                for i in T.Parallel(block_M):
                    row_sum[i] = row_sum[i] * rescale[i] + block_sum[i]
                for i, j in T.Parallel(block_M, dim):
                    acc[i, j] = acc[i, j] * rescale[i]
                T.copy(scores, weights)
                T.copy(V[bz, by // groups, ko * block_N, 0], V_shared)
                T.gemm(weights, V_shared, acc, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(block_M, dim):
                acc[i, j] = acc[i, j] / row_sum[i]
            T.copy(acc, Out[bz, by, bx * block_M, 0])

    return flash_attention_kernel


def flash_attention_reference(q, k, v, causal=False):
    """Attention in float64 with the whole matrix of scores."""
    groups = q.shape[1] // k.shape[1]
    q, k, v, dtype = q.double(), k.double(), v.double(), q.dtype
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(~seen, -math.inf)
    return (torch.softmax(scores, dim=-1) @ v).to(dtype)
