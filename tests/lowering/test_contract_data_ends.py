"""Loops over blocks that end, or start, where data or a parameter say: nothing, all, or behind the dim's end."""

import math

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from tests.other_machines import machine

from .support import lowered, outline, run

ROWS, KEYS, DIM, BLOCK = 3, 32, 4, 4


def decode(style="acc", ends="parameter", chosen="all"):
    """Attention of one query to the first n keys, whose maximum is of the last block alone; where there are none, 0.
    `style`: what is written of sums and maxima; `chosen`: which elements a block's maximum is of."""
    wanted = -math.inf if chosen == "all" else 0.0

    @T.prim_func
    def kernel(
        Q: T.Tensor((ROWS, DIM), "float32"),
        K: T.Tensor((KEYS, DIM), "float32"),
        V: T.Tensor((KEYS, DIM), "float32"),
        lengths: T.Tensor((1,), "int32"),
        n: T.int32,
        Out: T.Tensor((ROWS, DIM), "float32"),
        lse: T.Tensor((ROWS,), "float32"),
    ):
        with T.Kernel(1, threads=128):
            q, k, v = (T.alloc_shared((rows, DIM), "float32") for rows in (ROWS, BLOCK, BLOCK))
            scores = T.alloc_fragment((ROWS, BLOCK), "float32")
            acc = T.alloc_fragment((ROWS, DIM), "float32")
            largest, before, scale, total, sums = (T.alloc_fragment((ROWS,), "float32") for _ in range(5))
            end = lengths[0] if ends == "data" else n
            T.copy(Q, q)
            T.clear(acc)
            T.clear(sums)
            T.fill(largest, -T.infinity("float32"))
            for b in T.Pipelined(T.ceildiv(end, BLOCK), num_stages=1):
                T.copy(K[b * BLOCK, 0], k)
                T.gemm(q, k, scores, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(ROWS, BLOCK):
                    scores[i, j] = T.if_then_else(b * BLOCK + j < end, scores[i, j], -T.infinity("float32"))
                T.copy(largest, before)
                T.fill(largest, wanted)
                T.reduce_max(scores, largest, dim=1, clear=False)
                for i in T.Parallel(ROWS):
                    scale[i] = T.exp2(before[i] * 0.5 - largest[i] * 0.5)
                for i, j in T.Parallel(ROWS, BLOCK):
                    scores[i, j] = T.exp2(scores[i, j] * 0.5 - largest[i] * 0.5)
                T.reduce_sum(scores, total, dim=1)
                for i in T.Parallel(ROWS):
                    sums[i] = sums[i] * scale[i] + total[i]
                for i, j in T.Parallel(ROWS, DIM):
                    acc[i, j] = acc[i, j] * scale[i]
                T.copy(V[b * BLOCK, 0], v)
                T.gemm(scores, v, acc)
            for i, j in T.Parallel(ROWS, DIM):
                if style == "unequal":
                    Out[i, j] = T.if_then_else(sums[i] != 0, acc[i, j] / sums[i], 0.0)
                elif style == "positive":
                    Out[i, j] = T.if_then_else(sums[i] > 0, acc[i, j] / sums[i], 0.0)
                else:
                    Out[i, j] = T.if_then_else(sums[i] == 0, 0.0, acc[i, j] / sums[i])
            for i in T.Parallel(ROWS):
                if style == "of acc":
                    lse[i] = T.log2(T.if_then_else(acc[i, 0] == 0, 1.0, T.abs(acc[i, 0]))) + largest[i] * 0.5
                elif style == "turned":
                    lse[i] = T.log2(T.if_then_else(sums[i] == 0, sums[i], 1.0)) + largest[i] * 0.5
                else:
                    lse[i] = T.log2(T.if_then_else(sums[i] == 0, 1.0, sums[i])) + largest[i] * 0.5

    return kernel


def inputs(end):
    generator = torch.Generator().manual_seed(end)
    q, k, v = (torch.randn(size, DIM, generator=generator) * 2 for size in (ROWS, KEYS, KEYS))
    return [q, k, v, torch.tensor([end]).int(), end]


def whole(func, given):
    """What one device makes of it."""
    return mt.compile(mt.annotate(func, mt.Mesh({"x": 1}), {}), target="interpret")(*given)


KEYS_SPLIT = {"K": {"x": 0}, "V": {"x": 0}}


@pytest.mark.parametrize(
    ("style", "end", "ends"),
    [
        ("acc", 0, "parameter"),
        ("acc", 13, "data"),
        ("acc", 39, "parameter"),
        ("unequal", 1, "data"),
        ("unequal", 32, "parameter"),
        ("positive", 0, "data"),
        ("positive", 39, "data"),
    ],
)
def test_keys_up_to_an_end(style, end, ends):
    func, given = decode(style, ends), inputs(end)
    with machine(1):
        steps = outline(lowered(func, {"x": 4}, KEYS_SPLIT))
        assert not [step for step in steps if step.startswith("all_gather")]
        out, lse = run(func, {"x": 4}, KEYS_SPLIT, *given)
    expected, log = whole(func, given)
    q, k, v = (x.double() for x in given[:3])
    k, v = (torch.cat([x, torch.zeros(8, DIM)])[:end] for x in (k, v))
    scores = q @ k.T * 0.5 * math.log(2)
    exact = scores.softmax(-1) @ v if end else torch.zeros(ROWS, DIM)
    torch.testing.assert_close(out, exact.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, (scores.logsumexp(-1) / math.log(2)).float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close((out, lse), (expected, log), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("style", "chosen"), [("of acc", "all"), ("turned", "all"), ("acc", "none below 0")])
def test_what_may_be_0_where_something_was_seen_keeps_keys_whole(style, chosen):
    """A maximum that would be exposed there is another one on a mesh."""
    func = decode(style, chosen=chosen)
    with machine(1):
        assert outline(lowered(func, {"x": 4}, KEYS_SPLIT))[0].startswith("all_gather(K")
        found, expected = run(func, {"x": 4}, KEYS_SPLIT, *inputs(13)), whole(func, inputs(13))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def some_rows(style="sum", N=20, block=4):
    """Blocks from `first` to `end` of the rows of X: summed, doubled, numbered, or told how many there are."""

    @T.prim_func
    def kernel(X: T.Tensor((N, 3), "float32"), first: T.int32, end: T.int32, Y: T.Tensor((N, 3), "float32")):
        with T.Kernel(1, threads=32):
            x = T.alloc_shared((block, 3), "float32")
            total = T.alloc_fragment((3,), "float32")
            part = T.alloc_fragment((3,), "float32")
            T.clear(total)
            if style in ("sum", "counted"):
                for i, j in T.Parallel(N, 3):
                    Y[i, j] = 0.0
            for b in T.serial(first, end):
                T.copy(X[b * block, 0], x)
                if style == "counted":
                    for j in T.Parallel(3):
                        total[j] += x[0, j] + 1.0
                elif style == "sum":
                    T.reduce_sum(x, part, dim=0)
                    for j in T.Parallel(3):
                        total[j] += part[j] * (b + 1)
                else:
                    for i, j in T.Parallel(block, 3):
                        x[i, j] = x[i, j] * 2 + (b if style == "numbered" else 0)
                    T.copy(x, Y[b * block, 0])
            if style in ("sum", "counted"):
                for j in T.Parallel(3):
                    Y[0, j] = total[j]

    return kernel


@pytest.mark.parametrize(
    ("style", "first", "end"),
    [("sum", 0, 3), ("sum", 1, 7), ("counted", 2, 7), ("doubled", 1, 5), ("doubled", 3, 1), ("numbered", 2, 7)],
)
def test_rows_between_two_parameters(style, first, end):
    func = some_rows(style)
    x = torch.randn(20, 3)
    expected = whole(func, [x, first, end, torch.full((20, 3), 7.0)])
    for mesh, layouts in (
        ({"x": 2}, {"X": {"x": 0}, "Y": {"x": 0}}),
        ({"x": 5}, {"X": {"x": 0}}),
        ({"x": 3}, {"X": {"x": 0}, "Y": {"x": 0}}),
        ({"x": 3}, {"X": {"x": 1}, "Y": {"x": 1}}),
    ):
        found = run(func, mesh, layouts, x, first, end, torch.full((20, 3), 7.0))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
