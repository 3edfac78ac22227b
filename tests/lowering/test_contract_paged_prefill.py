"""Prompts that attend to pages of which every row sees another part: pages are split where maxima start at a number."""

import tilelang.language as T
import torch

from .support import lowered, outline, run

BATCH, ROWS, HEADS, KEY_HEADS, DIM, PAGES, PAGE, TABLE, BLOCK = 2, 10, 4, 2, 5, 7, 4, 3, 4
LOWEST = -(2.0**30)


def paged_prefill():
    """Causal attention of the last `ROWS` positions of every sequence to all of it, page by page."""
    shared = HEADS // KEY_HEADS

    @T.prim_func
    def prefill(
        Q: T.Tensor((BATCH, ROWS, HEADS, DIM), "float32"),
        K: T.Tensor((PAGES, PAGE, KEY_HEADS, DIM), "float32"),
        V: T.Tensor((PAGES, PAGE, KEY_HEADS, DIM), "float32"),
        pages_of: T.Tensor((BATCH, TABLE), "int32"),
        lengths: T.Tensor((BATCH,), "int32"),
        Out: T.Tensor((BATCH, ROWS, HEADS, DIM), "float32"),
    ):
        with T.Kernel(T.ceildiv(ROWS, BLOCK), HEADS, BATCH, threads=32) as (bx, by, bz):
            q = T.alloc_shared((BLOCK, DIM), "float32")
            keys = T.alloc_shared((PAGE, DIM), "float32")
            values = T.alloc_shared((PAGE, DIM), "float32")
            scores = T.alloc_fragment((BLOCK, PAGE), "float32")
            out = T.alloc_fragment((BLOCK, DIM), "float32")
            largest = T.alloc_fragment((BLOCK,), "float32")
            before = T.alloc_fragment((BLOCK,), "float32")
            part = T.alloc_fragment((BLOCK,), "float32")
            total = T.alloc_fragment((BLOCK,), "float32")
            T.copy(Q[bz, bx * BLOCK : (bx + 1) * BLOCK, by, 0:DIM], q)
            T.clear(out)
            T.clear(total)
            T.fill(largest, LOWEST)
            past = lengths[bz] - ROWS
            for p in T.serial(T.ceildiv(lengths[bz], PAGE)):
                page = pages_of[bz, p]
                T.copy(K[page, 0:PAGE, by // shared, 0:DIM], keys)
                T.copy(V[page, 0:PAGE, by // shared, 0:DIM], values)
                T.clear(scores)
                T.gemm(q, keys, scores, transpose_B=True)
                for i, j in T.Parallel(BLOCK, PAGE):
                    seen = p * PAGE + j <= past + bx * BLOCK + i
                    scores[i, j] = T.if_then_else(seen, scores[i, j], -T.infinity("float32"))
                T.copy(largest, before)
                T.reduce_max(scores, largest, dim=1, clear=False)
                for i, j in T.Parallel(BLOCK, PAGE):
                    scores[i, j] = T.exp(scores[i, j] - largest[i])
                T.reduce_sum(scores, part, dim=1)
                for i in T.Parallel(BLOCK):
                    total[i] = total[i] * T.exp(before[i] - largest[i]) + part[i]
                for i, d in T.Parallel(BLOCK, DIM):
                    out[i, d] *= T.exp(before[i] - largest[i])
                T.gemm(scores, values, out)
            for i, d in T.Parallel(BLOCK, DIM):
                out[i, d] = out[i, d] / total[i]
            T.copy(out, Out[bz, bx * BLOCK : (bx + 1) * BLOCK, by, 0:DIM])

    return prefill


def expected(q, k, v, pages_of, lengths):
    """Sequence by sequence, in float64."""
    found = []
    for own, table, length in zip(q.double(), pages_of.long(), lengths.tolist(), strict=True):
        keys, values = (t[table].flatten(0, 1)[:length].double().repeat_interleave(2, 1) for t in (k, v))
        seen = torch.arange(length)[None] <= torch.arange(ROWS)[:, None] + length - ROWS
        scores = torch.einsum("shd,thd->hst", own, keys).masked_fill(~seen, -torch.inf)
        found.append(torch.einsum("hst,thd->shd", scores.softmax(-1), values))
    return torch.stack(found).float()


def test_pages_are_split():
    """States are combined: nothing of K and V moves."""
    pages = {"K": {"x": 0}, "V": {"x": 0}}
    inputs = [torch.randn(BATCH, ROWS, HEADS, DIM), *(torch.randn(PAGES, PAGE, KEY_HEADS, DIM) for _ in "KV")]
    inputs += [torch.tensor([[5, 0, 3], [6, 1, 2]]).int(), torch.tensor([12, 10]).int()]
    steps = outline(lowered(paged_prefill(), {"x": 2}, pages, strict=True))
    assert not any("(K" in step or "(V" in step for step in steps if not step.startswith("kernel"))
    for devices in (2, 3):
        found = run(paged_prefill(), {"x": devices}, pages, *inputs)
        torch.testing.assert_close(found, expected(*inputs), rtol=1e-5, atol=1e-5)
