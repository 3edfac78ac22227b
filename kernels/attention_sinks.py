"""Causal attention over a sliding window, with a sink per head: a score that only adds to the softmax's sum."""

import math

import tilelang.language as T
import torch

LOG2_E = math.log2(math.e)


def sink_attention(heads, seq, dim, window, block=64):
    """`Out = softmax([Q @ K^T / sqrt(dim), Sinks]) @ [V, 0]` per head, over the last `window` keys. All scores of a row
    may be outside of the window in a block, so that 0 stands in for a maximum of nothing."""
    scale = LOG2_E / math.sqrt(dim)

    @T.prim_func
    def sink_attention_kernel(
        Q: T.Tensor((heads, seq, dim), "float32"),
        K: T.Tensor((heads, seq, dim), "float32"),
        V: T.Tensor((heads, seq, dim), "float32"),
        Sinks: T.Tensor((heads,), "float32"),
        Out: T.Tensor((heads, seq, dim), "float32"),
    ):
        with T.Kernel(T.ceildiv(seq, block), heads, threads=128) as (bx, by):
            q = T.alloc_shared((block, dim), "float32")
            k = T.alloc_shared((block, dim), "float32")
            v = T.alloc_shared((block, dim), "float32")
            p = T.alloc_shared((block, block), "float32")
            scores = T.alloc_fragment((block, block), "float32")
            out = T.alloc_fragment((block, dim), "float32")
            largest = T.alloc_fragment((block,), "float32")
            before = T.alloc_fragment((block,), "float32")
            rescale = T.alloc_fragment((block,), "float32")
            part = T.alloc_fragment((block,), "float32")
            total = T.alloc_fragment((block,), "float32")
            T.copy(Q[by, bx * block, 0], q)
            T.clear(out)
            T.clear(total)
            T.fill(largest, -T.infinity("float32"))
            for ko in T.serial(T.max(0, (bx * block - window) // block), bx + 1):
                T.copy(K[by, ko * block, 0], k)
                for i, j in T.Parallel(block, block):
                    behind = bx * block + i - (ko * block + j)
                    scores[i, j] = T.if_then_else(behind >= 0 and behind < window, 0, -T.infinity("float32"))
                T.gemm(q, k, scores, transpose_B=True)
                T.copy(largest, before)
                T.reduce_max(scores, largest, dim=1, clear=False)
                for i in T.Parallel(block):
                    largest[i] = T.if_then_else(largest[i] == -T.infinity("float32"), 0.0, largest[i])
                    rescale[i] = T.exp2((before[i] - largest[i]) * scale)
                for i, j in T.Parallel(block, block):
                    scores[i, j] = T.exp2((scores[i, j] - largest[i]) * scale)
                T.reduce_sum(scores, part, dim=1)
                for i in T.Parallel(block):
                    total[i] = total[i] * rescale[i] + part[i]
                for i, j in T.Parallel(block, dim):
                    out[i, j] = out[i, j] * rescale[i]
                T.copy(scores, p)
                T.copy(V[by, ko * block, 0], v)
                T.gemm(p, v, out)
            for i in T.Parallel(block):
                total[i] += T.exp2(Sinks[by] * LOG2_E - largest[i] * scale)
            for i, j in T.Parallel(block, dim):
                out[i, j] = out[i, j] / total[i]
            T.copy(out, Out[by, bx * block, 0])

    return sink_attention_kernel


def sink_attention_reference(q, k, v, sinks, window):
    """In float64 with the whole matrix of scores."""
    scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    scores = scores.masked_fill(~(seen.tril() & ~seen.tril(-window)), -math.inf)
    scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    return (torch.softmax(scores, dim=-1)[..., :-1] @ v.double()).to(q.dtype)
