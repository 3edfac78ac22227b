"""Attention to rows that a table chooses, where each device has some of the choices: `K[chosen[q, k]]`."""

import math

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from tests.other_machines import machine

from .support import lowered, outline, run

QUERIES, ROWS, CHOSEN, DIM, BLOCK = 2, 12, 16, 4, 4
INFINITE, FINITE = -math.inf, -(2.0**30)


def chosen_attention(style="plain", lowest=FINITE):
    """Every query's attention to the rows that `chosen` names for it, but for those that are negative. `style`: how a
    row's place is made, or what else is done; `lowest`: what the running maximum starts from."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((QUERIES, DIM), "float32"),
        KV: T.Tensor((ROWS, DIM), "float32"),
        chosen: T.Tensor((QUERIES, CHOSEN), "int32"),
        Out: T.Tensor((QUERIES, DIM), "float32"),
    ):
        with T.Kernel(QUERIES, threads=128) as bx:
            q, kv = T.alloc_shared((1, DIM), "float32"), T.alloc_shared((BLOCK, DIM), "float32")
            names = T.alloc_shared((BLOCK,), "int32")
            scores = T.alloc_fragment((1, BLOCK), "float32")
            acc = T.alloc_fragment((1, DIM), "float32")
            m, before, scale, part, total = (T.alloc_fragment((1,), "float32") for _ in range(5))
            T.copy(Q[bx, 0], q)
            T.clear(acc)
            T.clear(total)
            T.fill(m, lowest)
            for b in T.serial(CHOSEN // BLOCK):
                T.copy(chosen[bx, b * BLOCK], names)
                for j, d in T.Parallel(BLOCK, DIM):
                    if style == "on chip":
                        kv[j, d] = KV[T.max(names[j], 0), d]
                    elif style == "beside":
                        kv[j, d] = KV[(T.max(chosen[bx, b * BLOCK + j], 0) + j) % ROWS, d]
                    elif style == "of the block":
                        kv[j, d] = KV[T.max(chosen[bx, b * BLOCK], 0), d] + j
                    elif style == "numbered":
                        kv[j, d] = KV[(T.max(chosen[bx, b], 0) + b) % ROWS, d]
                    else:
                        kv[j, d] = KV[T.max(chosen[bx, b * BLOCK + j], 0), d]
                for i, j in T.Parallel(1, BLOCK):
                    scores[i, j] = T.if_then_else(chosen[bx, b * BLOCK + j] >= 0, 0.0, -T.infinity("float32"))
                T.gemm(q, kv, scores, transpose_B=True)
                T.copy(m, before)
                T.reduce_max(scores, m, dim=1, clear=False)
                for i in T.Parallel(1):
                    scale[i] = T.exp2(before[i] - m[i])
                for i, j in T.Parallel(1, BLOCK):
                    scores[i, j] = T.exp2(scores[i, j] - m[i])
                T.reduce_sum(scores, part, dim=1)
                for i in T.Parallel(1):
                    total[i] = total[i] * scale[i] + part[i]
                for i, d in T.Parallel(1, DIM):
                    acc[i, d] = acc[i, d] * scale[i]
                T.gemm(scores, kv, acc)
                if style == "written":
                    for d in T.Parallel(DIM):
                        KV[b, d] = scores[0, 0]
            for i, d in T.Parallel(1, DIM):
                Out[bx, d] = acc[i, d] / total[i]

    return kernel


def inputs(none=()):
    """`none`: positions of the first query that choose no row."""
    generator = torch.Generator().manual_seed(len(none))
    q, kv = (torch.randn(size, DIM, generator=generator) for size in (QUERIES, ROWS))
    chosen = torch.randint(0, ROWS, (QUERIES, CHOSEN), generator=generator).int()
    chosen[0, list(none)] = -1
    return [q, kv, chosen]


def reference(q, kv, chosen):
    """All scores at once, in float64."""
    rows = kv.double()[chosen.clamp(min=0).long()]
    scores = torch.einsum("qd,qkd->qk", q.double(), rows).masked_fill(chosen < 0, -math.inf)
    return torch.einsum("qk,qkd->qd", (scores * math.log(2)).softmax(-1), rows).float()


@pytest.mark.parametrize("style", ["plain", "on chip"])
@pytest.mark.parametrize(("devices", "none"), [(2, ()), (4, range(8)), (2, range(3, 16)), (3, range(4))])
def test_choices_are_split(style, devices, none):
    func, given, layouts = chosen_attention(style), inputs(none), {"chosen": {"x": 1}}
    with machine(1):
        if devices != 3:
            steps = outline(lowered(func, {"x": devices}, layouts, strict=True))
            assert {step.split("(")[0] for step in steps} == {"kernel", "all_reduce"}
        found = run(func, {"x": devices}, layouts, *given)
    torch.testing.assert_close(found, reference(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("none", [(), range(4), range(4, 12), range(16)])
def test_what_is_nan_on_one_device_is_nan(none):
    """Of a maximum that starts from what is lowest: where a first block names no row."""
    func, given = chosen_attention(lowest=INFINITE), inputs(none)
    expected = mt.compile(mt.annotate(func, mt.Mesh({"x": 1}), {}), target="interpret")(*given)
    assert bool(expected[0].isnan().any()) == (0 in none)
    for devices in (2, 4):
        with machine(1):
            found = run(func, {"x": devices}, {"chosen": {"x": 1}}, *given)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("style", ["beside", "of the block", "numbered", "written"])
def test_places_that_are_made_of_more_than_a_choice(style):
    """Of where in a block, or in which one, a position is, or in a table that changes."""
    func, given = chosen_attention(style), inputs((2, 9))
    expected = mt.compile(mt.annotate(func, mt.Mesh({"x": 1}), {}), target="interpret")(*(x.clone() for x in given))
    for devices in (2, 4):
        with machine(1):
            found = run(func, {"x": devices}, {"chosen": {"x": 1}}, *(x.clone() for x in given))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
