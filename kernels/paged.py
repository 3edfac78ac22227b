"""Kernels that go where data says: attention to keys and values in pages, which a table names for every sequence; to
a cache that the newest token is put into first; a histogram that is staged on chip."""

import math

import tilelang.language as T
import torch


def paged_attention(batch, heads, pages, table, dim, page=16, skip=False, dtype="float32"):
    """The newest token's attention to the first `lengths[b]` positions of sequence b, whose keys and values are in
    pages; `skip`: pages whose number is negative are left out."""
    scale = math.log2(math.e) / math.sqrt(dim)

    @T.prim_func
    def paged_attention_kernel(
        Q: T.Tensor((batch, heads, dim), dtype),
        K: T.Tensor((pages, page, dim), dtype),
        V: T.Tensor((pages, page, dim), dtype),
        pages_of: T.Tensor((batch, table), "int32"),
        lengths: T.Tensor((batch,), "int32"),
        Out: T.Tensor((batch, heads, dim), dtype),
    ):
        with T.Kernel(batch, threads=128) as bz:
            Q_shared = T.alloc_shared((heads, dim), dtype)
            K_shared = T.alloc_shared((page, dim), dtype)
            V_shared = T.alloc_shared((page, dim), dtype)
            scores = T.alloc_fragment((heads, page), "float32")
            out = T.alloc_fragment((heads, dim), "float32")
            largest = T.alloc_fragment((heads,), "float32")
            before = T.alloc_fragment((heads,), "float32")
            rescale = T.alloc_fragment((heads,), "float32")
            total = T.alloc_fragment((heads,), "float32")
            sums = T.alloc_fragment((heads,), "float32")
            T.copy(Q[bz, 0, 0], Q_shared)
            T.clear(out)
            T.clear(sums)
            T.fill(largest, -T.infinity("float32"))
            for k in T.Pipelined(T.ceildiv(lengths[bz], page), num_stages=2):
                number = pages_of[bz, k]
                if number >= 0 or not skip:
                    T.copy(K[number, 0, 0], K_shared)
                    T.clear(scores)
                    T.gemm(Q_shared, K_shared, scores, transpose_B=True)
                    for i, j in T.Parallel(heads, page):
                        scores[i, j] = T.if_then_else(k * page + j < lengths[bz], scores[i, j], -T.infinity("float32"))
                    T.copy(largest, before)
                    T.reduce_max(scores, largest, dim=1, clear=False)
                    for i in T.Parallel(heads):
                        rescale[i] = T.exp2((before[i] - largest[i]) * scale)
                    for i, j in T.Parallel(heads, page):
                        scores[i, j] = T.exp2((scores[i, j] - largest[i]) * scale)
                    T.reduce_sum(scores, total, dim=1)
                    for i in T.Parallel(heads):
                        sums[i] = sums[i] * rescale[i] + total[i]
                    for i, j in T.Parallel(heads, dim):
                        out[i, j] *= rescale[i]
                    T.copy(V[number, 0, 0], V_shared)
                    T.gemm(scores, V_shared, out)
            for i, j in T.Parallel(heads, dim):
                Out[bz, i, j] = out[i, j] / sums[i]

    return paged_attention_kernel


def paged_attention_reference(q, k, v, pages_of, lengths):
    """The same with the pages of every sequence put together, in float64; a page that there is not is 0."""
    rows = []
    for query, numbers, length in zip(q.double(), pages_of, lengths, strict=True):
        there = [n if 0 <= n < len(k) else None for n in numbers.tolist()]
        keys, values = (
            torch.cat([x.new_zeros(x.shape[1:]) if n is None else x[n] for n in there]).double()[:length]
            for x in (k, v)
        )
        weights = (query @ keys.T / math.sqrt(q.shape[-1])).softmax(-1)
        rows.append(weights @ values)
    return torch.stack(rows).to(q.dtype)


def paged_latent_attention(batch, heads, pages, table, dim, page=16, more=0):
    """The newest token's attention to rows that are keys and values at once, as latent attention has them: sequence b
    has the first `lengths[b]` rows of the pages in `pages_of[b]`, one after the other in KV. `more`: so many pages more
    are read, of which nothing counts."""
    scale = math.log2(math.e) / math.sqrt(dim)

    @T.prim_func
    def paged_latent_attention_kernel(
        Q: T.Tensor((batch, heads, dim), "float32"),
        KV: T.Tensor((pages * page, dim), "float32"),
        pages_of: T.Tensor((batch, table), "int32"),
        lengths: T.Tensor((batch,), "int32"),
        Out: T.Tensor((batch, heads, dim), "float32"),
    ):
        with T.Kernel(batch, threads=128) as bz:
            Q_shared = T.alloc_shared((heads, dim), "float32")
            KV_shared = T.alloc_shared((page, dim), "float32")
            weights = T.alloc_shared((heads, page), "float32")
            scores = T.alloc_fragment((heads, page), "float32")
            out = T.alloc_fragment((heads, dim), "float32")
            largest = T.alloc_fragment((heads,), "float32")
            before = T.alloc_fragment((heads,), "float32")
            rescale = T.alloc_fragment((heads,), "float32")
            total = T.alloc_fragment((heads,), "float32")
            sums = T.alloc_fragment((heads,), "float32")
            T.copy(Q[bz, 0, 0], Q_shared)
            T.clear(out)
            T.clear(sums)
            T.fill(largest, -T.infinity("float32"))
            count = T.ceildiv(lengths[bz], page) + more
            for k in T.Pipelined(count, num_stages=2):
                start = pages_of[bz, (k * page) // page] * page + (k * page) % page
                T.copy(KV[start : start + page, 0:dim], KV_shared)
                T.clear(scores)
                T.gemm(Q_shared, KV_shared, scores, transpose_B=True)
                T.copy(largest, before)
                T.fill(largest, -T.infinity("float32"))
                for i, j in T.Parallel(heads, page):
                    scores[i, j] = T.if_then_else(k * page + j >= lengths[bz], -T.infinity("float32"), scores[i, j])
                T.reduce_max(scores, largest, dim=1, clear=False)
                for i in T.Parallel(heads):
                    largest[i] = T.max(largest[i], before[i])
                for i in T.Parallel(heads):
                    rescale[i] = T.exp2(before[i] * scale - largest[i] * scale)
                for i, j in T.Parallel(heads, page):
                    scores[i, j] = T.exp2(scores[i, j] * scale - largest[i] * scale)
                T.reduce_sum(scores, total, dim=1)
                T.copy(scores, weights)
                for i in T.Parallel(heads):
                    sums[i] = sums[i] * rescale[i] + total[i]
                for i, j in T.Parallel(heads, dim):
                    out[i, j] *= rescale[i]
                T.gemm(weights, KV_shared, out)
            for i, j in T.Parallel(heads, dim):
                out[i, j] = out[i, j] / sums[i]
            T.copy(out, Out[bz, 0, 0])

    return paged_latent_attention_kernel


def paged_latent_attention_reference(q, kv, pages_of, lengths, page=16):
    """The same with the pages of every sequence put together, in float64."""
    of_pages = kv.unflatten(0, (-1, page))
    return paged_attention_reference(q, of_pages, of_pages, pages_of, lengths)


def staged_histogram(N, bins, parts=4):
    """`counts[ids[n]] += 1`: every program counts its part on chip, and adds that to the result."""
    length = -(-N // parts)

    @T.prim_func
    def staged_histogram_kernel(ids: T.Tensor((N,), "int32"), counts: T.Tensor((bins,), "int32")):
        with T.Kernel(parts, threads=128) as bx:
            own = T.alloc_shared((bins,), "int32")
            T.clear(own)
            for i in T.Parallel(length):
                if bx * length + i < N:
                    T.atomic_add(own[ids[bx * length + i]], 1)
            for j in T.Parallel(bins):
                T.atomic_add(counts[j], own[j])

    return staged_histogram_kernel


def put_and_attend(batch, heads, groups, seq, dim, dtype="float32"):
    """The newest token's attention to itself and to the first `lengths[b]` positions in a cache of keys and values,
    which `heads // groups` heads share; the programs of the first `groups` heads put its own there."""
    scale = math.log2(math.e) / math.sqrt(dim)
    shared = heads // groups

    @T.prim_func
    def put_and_attend_kernel(
        Q: T.Tensor((batch, heads, dim), dtype),
        K: T.Tensor((batch, groups, dim), dtype),
        V: T.Tensor((batch, groups, dim), dtype),
        K_cache: T.Tensor((batch, seq, groups, dim), dtype),
        V_cache: T.Tensor((batch, seq, groups, dim), dtype),
        lengths: T.Tensor((batch,), "int32"),
        Out: T.Tensor((batch, heads, dim), dtype),
    ):
        with T.Kernel(heads, batch, threads=128) as (by, bz):
            products = T.alloc_fragment((seq, dim), "float32")
            scores = T.alloc_fragment((1, seq), "float32")
            largest = T.alloc_fragment((1,), "float32")
            total = T.alloc_fragment((1,), "float32")
            row = T.alloc_fragment((seq,), "float32")
            out = T.alloc_fragment((dim,), "float32")
            past = lengths[bz]
            if by < groups:
                for d in T.Parallel(dim):
                    K_cache[bz, past, by, d] = K[bz, by, d]
                    V_cache[bz, past, by, d] = V[bz, by, d]
            for j, d in T.Parallel(seq, dim):
                products[j, d] = Q[bz, by, d] * T.if_then_else(
                    j < past, K_cache[bz, j, by // shared, d], K[bz, by // shared, d]
                )
            T.reduce_sum(products, row, dim=1)
            for i, j in T.Parallel(1, seq):
                scores[i, j] = T.if_then_else(j <= past, row[j] * scale, -T.infinity("float32"))
            T.reduce_max(scores, largest, dim=1)
            for i, j in T.Parallel(1, seq):
                scores[i, j] = T.exp2(scores[i, j] - largest[i])
            T.reduce_sum(scores, total, dim=1)
            for j, d in T.Parallel(seq, dim):
                products[j, d] = (
                    scores[0, j]
                    / total[0]
                    * T.if_then_else(j < past, V_cache[bz, j, by // shared, d], V[bz, by // shared, d])
                )
            T.reduce_sum(products, out, dim=0)
            T.copy(out, Out[bz, by, 0])

    return put_and_attend_kernel


def put_and_attend_reference(q, k, v, k_cache, v_cache, lengths):
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    out = torch.empty_like(q)
    for b, past in enumerate(lengths.tolist()):
        k_cache[b, past], v_cache[b, past] = k[b], v[b]
        keys, values = (
            cache[b, : past + 1].repeat_interleave(q.shape[1] // k.shape[1], 1) for cache in (k_cache, v_cache)
        )
        weights = torch.einsum("hd,shd->hs", q[b], keys / math.sqrt(q.shape[2])).softmax(1)
        out[b] = torch.einsum("hs,shd->hd", weights, values)
    return k_cache, v_cache, out
