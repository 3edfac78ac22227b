"""Attention in which query heads share key heads: one query (decoding), in parts of the keys, and its gradients."""

import math

import tilelang.language as T
import torch

LOG2_E = math.log2(math.e)


def grouped_decode(batch, heads, groups, seq, dim, block_H=8, block_N=64, rows=1, dtype="float32"):
    """One query per head: `heads // groups` query heads share a head of K and V. `lengths` has the valid keys of every
    batch; a block of programs handles up to `block_H` heads of one group, in `rows` rows at least: those
    behind the heads are dropped."""
    shared = heads // groups
    block = min(block_H, shared)
    rows = max(rows, block)
    scale = LOG2_E / math.sqrt(dim)

    @T.prim_func
    def grouped_decode_kernel(
        Q: T.Tensor((batch, heads, dim), dtype),
        K: T.Tensor((batch, seq, groups, dim), dtype),
        V: T.Tensor((batch, seq, groups, dim), dtype),
        lengths: T.Tensor((batch,), "int32"),
        Out: T.Tensor((batch, heads, dim), dtype),
    ):
        with T.Kernel(batch, heads // block, threads=128) as (bx, by):
            Q_shared = T.alloc_shared((rows, dim), dtype)
            K_shared = T.alloc_shared((block_N, dim), dtype)
            V_shared = T.alloc_shared((block_N, dim), dtype)
            scores = T.alloc_fragment((rows, block_N), "float32")
            out = T.alloc_fragment((rows, dim), "float32")
            largest = T.alloc_fragment((rows,), "float32")
            before = T.alloc_fragment((rows,), "float32")
            rescale = T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((rows,), "float32")
            sums = T.alloc_fragment((rows,), "float32")
            kv_head = by // (shared // block)
            T.copy(Q[bx, by * block : by * block + rows, :], Q_shared)
            T.clear(out)
            T.clear(sums)
            T.fill(largest, -T.infinity("float32"))
            for k in T.Pipelined(T.ceildiv(seq, block_N), num_stages=2):
                T.copy(K[bx, k * block_N : (k + 1) * block_N, kv_head, :], K_shared)
                T.clear(scores)
                T.gemm(Q_shared, K_shared, scores, transpose_B=True)
                for i, j in T.Parallel(rows, block_N):
                    scores[i, j] = T.if_then_else(k * block_N + j < lengths[bx], scores[i, j], -T.infinity("float32"))
                T.copy(largest, before)
                T.reduce_max(scores, largest, dim=1, clear=False)
                for i in T.Parallel(rows):
                    rescale[i] = T.exp2((before[i] - largest[i]) * scale)
                for i, j in T.Parallel(rows, block_N):
                    scores[i, j] = T.exp2((scores[i, j] - largest[i]) * scale)
                T.reduce_sum(scores, total, dim=1)
                for i in T.Parallel(rows):
                    sums[i] = sums[i] * rescale[i] + total[i]
                for i, j in T.Parallel(rows, dim):
                    out[i, j] *= rescale[i]
                T.copy(V[bx, k * block_N : (k + 1) * block_N, kv_head, :], V_shared)
                T.gemm(scores, V_shared, out)
            for i, j in T.Parallel(rows, dim):
                out[i, j] /= sums[i]
            T.copy(out[0:block, :], Out[bx, by * block : (by + 1) * block, :])

    return grouped_decode_kernel


def grouped_decode_reference(q, k, v, lengths):
    """The same with all scores at once, in float64."""
    q, k, v, dtype = q.double(), k.double(), v.double(), q.dtype
    shared = q.shape[1] // k.shape[2]
    k, v = k.repeat_interleave(shared, 2), v.repeat_interleave(shared, 2)
    scores = torch.einsum("bhd,bshd->bhs", q, k) / math.sqrt(q.shape[-1])
    seen = torch.arange(k.shape[1])[None, None] < lengths[:, None, None]
    return torch.einsum("bhs,bshd->bhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v).to(dtype)


def split_decode(batch, heads, groups, seq, dim, parts=4, block_N=64, dtype="float32"):
    """Flash decoding: programs handle parts of the keys, and a second grid puts the parts together."""
    shared = heads // groups
    scale = LOG2_E / math.sqrt(dim)
    part = -(-seq // parts)

    @T.prim_func
    def split_decode_kernel(
        Q: T.Tensor((batch, heads, dim), dtype),
        K: T.Tensor((batch, seq, groups, dim), dtype),
        V: T.Tensor((batch, seq, groups, dim), dtype),
        lse: T.Tensor((batch, heads, parts), "float32"),
        partial: T.Tensor((batch, heads, parts, dim), "float32"),
        Out: T.Tensor((batch, heads, dim), dtype),
    ):
        with T.Kernel(batch, groups, parts, threads=128) as (bx, by, bz):
            Q_shared = T.alloc_shared((shared, dim), dtype)
            K_shared = T.alloc_shared((block_N, dim), dtype)
            V_shared = T.alloc_shared((block_N, dim), dtype)
            scores = T.alloc_fragment((shared, block_N), "float32")
            out = T.alloc_fragment((shared, dim), "float32")
            largest = T.alloc_fragment((shared,), "float32")
            before = T.alloc_fragment((shared,), "float32")
            total = T.alloc_fragment((shared,), "float32")
            sums = T.alloc_fragment((shared,), "float32")
            T.copy(Q[bx, by * shared : (by + 1) * shared, :], Q_shared)
            T.clear(out)
            T.clear(sums)
            T.fill(largest, -T.infinity("float32"))
            for k in T.Pipelined(T.ceildiv(part, block_N), num_stages=2):
                start = bz * part + k * block_N
                T.copy(K[bx, start : start + block_N, by, :], K_shared)
                T.clear(scores)
                T.gemm(Q_shared, K_shared, scores, transpose_B=True)
                for i, j in T.Parallel(shared, block_N):
                    scores[i, j] = T.if_then_else(
                        (k * block_N + j < part) & (start + j < seq), scores[i, j] * scale, -T.infinity("float32")
                    )
                T.copy(largest, before)
                T.reduce_max(scores, largest, dim=1, clear=False)
                for i, j in T.Parallel(shared, block_N):
                    scores[i, j] = T.exp2(scores[i, j] - largest[i])
                T.reduce_sum(scores, total, dim=1)
                for i in T.Parallel(shared):
                    sums[i] = sums[i] * T.exp2(before[i] - largest[i]) + total[i]
                for i, j in T.Parallel(shared, dim):
                    out[i, j] *= T.exp2(before[i] - largest[i])
                T.copy(V[bx, start : start + block_N, by, :], V_shared)
                T.gemm(scores, V_shared, out)
            for i in T.Parallel(shared):
                lse[bx, by * shared + i, bz] = T.log2(sums[i]) + largest[i]
            for i, j in T.Parallel(shared, dim):
                partial[bx, by * shared + i, bz, j] = out[i, j] / sums[i]
        with T.Kernel(batch, heads, threads=128) as (bx, by):
            weights = T.alloc_fragment((parts,), "float32")
            largest = T.alloc_fragment((1,), "float32")
            total = T.alloc_fragment((1,), "float32")
            out = T.alloc_fragment((dim,), "float32")
            for k in T.Parallel(parts):
                weights[k] = lse[bx, by, k]
            T.reduce_max(weights, largest, dim=0)
            for k in T.Parallel(parts):
                weights[k] = T.exp2(weights[k] - largest[0])
            T.reduce_sum(weights, total, dim=0)
            T.clear(out)
            for k in T.serial(parts):
                for j in T.Parallel(dim):
                    out[j] += partial[bx, by, k, j] * weights[k]
            for j in T.Parallel(dim):
                Out[bx, by, j] = out[j] / total[0]

    return split_decode_kernel


def split_decode_reference(q, k, v, parts=4):
    """Logarithm (base 2) of the sum of weights and output of every part of the keys, and the whole output."""
    q, k, v, dtype = q.double(), k.double(), v.double(), q.dtype
    shared, size = q.shape[1] // k.shape[2], -(-k.shape[1] // parts)
    k, v = k.repeat_interleave(shared, 2), v.repeat_interleave(shared, 2)
    scores = torch.einsum("bhd,bshd->bhs", q, k) / math.sqrt(q.shape[-1])
    lse = torch.stack([part.logsumexp(-1) for part in scores.split(size, -1)], -1) * LOG2_E
    pairs = zip(scores.split(size, -1), v.split(size, 1), strict=True)
    partial = torch.stack([torch.einsum("bhs,bshd->bhd", w.softmax(-1), x) for w, x in pairs], 2)
    out = torch.einsum("bhs,bshd->bhd", scores.softmax(-1), v)
    return lse.to(dtype), partial.to(dtype), out.to(dtype)


def grouped_key_gradient(batch, heads, groups, seq, dim, block_M=16, block_N=16, dtype="float32"):
    """`dK[b, g] = sum of dS[b, h]^T @ Q[b, h]` over the query heads h of a group, added up by atomics, as the backward
    pass of attention does."""
    shared = heads // groups

    @T.prim_func
    def grouped_key_gradient_kernel(
        Q: T.Tensor((batch, heads, seq, dim), dtype),
        dS: T.Tensor((batch, heads, seq, seq), dtype),
        dK: T.Tensor((batch, groups, seq, dim), dtype),
    ):
        with T.Kernel(T.ceildiv(seq, block_N), heads, batch, threads=128) as (bx, by, bz):
            Q_shared = T.alloc_shared((block_M, dim), dtype)
            dS_shared = T.alloc_shared((block_M, block_N), dtype)
            total = T.alloc_fragment((block_N, dim), "float32")
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(seq, block_M), num_stages=2):
                T.copy(Q[bz, by, k * block_M, 0], Q_shared)
                T.copy(dS[bz, by, k * block_M, bx * block_N], dS_shared)
                T.gemm(dS_shared, Q_shared, total, transpose_A=True)
            T.atomic_add(dK[bz, by // shared, bx * block_N : (bx + 1) * block_N, :], total)

    return grouped_key_gradient_kernel


def grouped_key_gradient_reference(q, ds, dk):
    """The gradient of K, added to what dK had."""
    product = torch.einsum("bhij,bhid->bhjd", ds.double(), q.double())
    return (dk.double() + product.unflatten(1, (dk.shape[1], -1)).sum(2)).to(q.dtype)
