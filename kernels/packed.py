"""Sequences of different lengths that are packed one after the other, in the rows of one tensor."""

import math

import tilelang.language as T
import torch


def packed_attention(rows, sequences, longest, dim, block=64):
    """Attention of every row to the rows of its sequence: sequence b has the rows from `starts[b]` to `starts[b + 1]`,
    at most `longest`."""
    scale = 1 / math.sqrt(dim)

    @T.prim_func
    def packed_attention_kernel(
        Q: T.Tensor((rows, dim), "float32"),
        K: T.Tensor((rows, dim), "float32"),
        V: T.Tensor((rows, dim), "float32"),
        starts: T.Tensor((sequences + 1,), "int32"),
        Out: T.Tensor((rows, dim), "float32"),
    ):
        with T.Kernel(T.ceildiv(longest, block), sequences, threads=128) as (bx, by):
            Q_shared = T.alloc_shared((block, dim), "float32")
            K_shared = T.alloc_shared((longest, dim), "float32")
            V_shared = T.alloc_shared((longest, dim), "float32")
            scores = T.alloc_fragment((block, longest), "float32")
            largest = T.alloc_fragment((block,), "float32")
            total = T.alloc_fragment((block,), "float32")
            out = T.alloc_fragment((block, dim), "float32")
            start = starts[by]
            length = starts[by + 1] - start
            T.copy(Q[start + bx * block, 0], Q_shared)
            T.copy(K[start, 0], K_shared)
            T.copy(V[start, 0], V_shared)
            T.clear(scores)
            T.gemm(Q_shared, K_shared, scores, transpose_B=True)
            for i, j in T.Parallel(block, longest):
                scores[i, j] = T.if_then_else(j < length, scores[i, j] * scale, -T.infinity("float32"))
            T.reduce_max(scores, largest, dim=1)
            for i, j in T.Parallel(block, longest):
                scores[i, j] = T.exp(scores[i, j] - largest[i])
            T.reduce_sum(scores, total, dim=1)
            T.clear(out)
            T.gemm(scores, V_shared, out)
            for i, d in T.Parallel(block, dim):
                if bx * block + i < length:
                    Out[start + bx * block + i, d] = out[i, d] / total[i]

    return packed_attention_kernel


def packed_attention_reference(q, k, v, starts):
    """Sequence by sequence, in float64."""
    ends = starts.tolist()
    parts = [tuple(x[low:high].double() for x in (q, k, v)) for low, high in zip(ends, ends[1:], strict=False)]
    out = [(a @ b.T / math.sqrt(q.shape[1])).softmax(-1) @ c for a, b, c in parts]
    return torch.cat(out).to(q.dtype)
