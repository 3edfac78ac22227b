"""Loops that do something every n iterations."""

import pytest
import tilelang.language as T
import torch
from tvm import tirx

from kernels.quantized import promoted_matmul
from mesh_tensor.tir.double_loops import join, with_intervals
from tests.lowering.support import assert_right, lowered, nodes, outline, text

_DIMS = {"A": {"x": 1}, "B": {"x": 1}}


WHEN = {
    "end": lambda k: (k + 1) % 2 == 0,
    "start": lambda k: k % 2 == 1,
    "shifted": lambda k: (k + 2) % 2 == 0,
    "once": lambda k: k == 1,
    "never": lambda k: k % 2 == 2,
}


def weighted_sums(style="end", K=64, block=8, M=8):
    """Sums of blocks of K into `recent`, which is added to `total`, times a weight of each pair of blocks, and cleared:
    at the end of a pair, or otherwise, as `style` says."""
    blocks = K // block
    now = WHEN.get(style, WHEN["end"])

    @T.prim_func
    def kernel(
        X: T.Tensor((M, K), "float32"), S: T.Tensor((M, (blocks + 1) // 2), "float32"), Y: T.Tensor((M,), "float32")
    ):
        with T.Kernel(1, threads=32):
            x = T.alloc_shared((M, block), "float32")
            recent = T.alloc_fragment((M,), "float32")
            total = T.alloc_fragment((M,), "float32")
            T.clear(recent)
            T.clear(total)
            for k in T.Pipelined(blocks, num_stages=2):
                if style == "start" and k % 2 == 0:
                    T.clear(recent)
                if style == "left" and S[0, k // 2] > 100.0:
                    T.loop_break()
                if style == "bound":
                    weight = S[0, k // 2]
                T.copy(X[0, k * block], x)
                if style != "before":
                    T.reduce_sum(x, recent, dim=1, clear=False)
                if style == "each":
                    for i in T.Parallel(M):
                        total[i] += recent[i]
                if now(k):
                    for i in T.Parallel(M):
                        total[i] += recent[i] * (weight if style == "bound" else S[i, k // 2])
                    if style not in ("kept", "start"):
                        T.clear(recent)
                elif style == "else":
                    for i in T.Parallel(M):
                        total[i] += 1.0
                if style == "before":
                    T.reduce_sum(x, recent, dim=1, clear=False)
            if style == "read":
                for i in T.Parallel(M):
                    total[i] += recent[i]
            T.copy(total, Y)

    return kernel


def reference(style, x, s, block=8):
    recent, total = torch.zeros(8), torch.zeros(8)
    for k in range(x.shape[1] // block):
        part = x[:, k * block : (k + 1) * block].sum(1)
        weight = s[0, k // 2] if style == "bound" else s[:, k // 2]
        if style == "start" and k % 2 == 0:
            recent = torch.zeros(8)
        before, recent = recent, recent + part
        total = total + (recent if style == "each" else 0)
        if WHEN.get(style, WHEN["end"])(k):
            total = total + (before if style == "before" else recent) * weight
            recent = recent if style in ("kept", "start") else part if style == "before" else torch.zeros(8)
        elif style == "else":
            total = total + 1
    return total + (recent if style == "read" else 0)


@pytest.mark.parametrize(("K", "devices"), [(64, 2), (64, 3), (56, 2)])
@pytest.mark.parametrize(
    ("style", "is_apart", "is_split"),
    [
        ("end", True, True),
        ("start", True, True),
        ("read", True, True),
        ("kept", True, False),
        ("each", True, False),
        ("before", False, False),
        ("bound", False, False),
        ("shifted", False, False),
        ("once", False, False),
        ("never", False, False),
        ("else", False, False),
        ("left", False, False),
    ],
)
def test_numbers(style, is_apart, is_split, K, devices):
    """Of 56, the seventh block is in no pair: what it comes to is dropped, or read at the end."""
    inputs = [torch.randn(8, K), torch.rand(8, (K // 8 + 1) // 2) + 0.5]
    dims = {"X": {"x": 1}, "S": {"x": 1}}
    kernel = weighted_sums(style, K)
    assert with_intervals(kernel).same_as(kernel) != (is_apart and K == 64)
    assert_right(kernel, {"x": devices}, dims, inputs, lambda x, s: reference(style, x, s), rtol=1e-4, atol=1e-4)
    if is_split and K == 64 and devices == 2:
        assert outline(lowered(kernel, {"x": devices}, dims, strict=True))[-1] == "all_reduce(Y, sum, x)"


@pytest.mark.parametrize(("K", "devices"), [(64, 2), (64, 3), (63, 2), (48, 3), (56, 2), (40, 2)])
@pytest.mark.parametrize("interval", [1, 2, 4])
def test_products(interval, K, devices):
    """Tiles of whole intervals, and others."""
    kernel = promoted_matmul(16, 16, K, block_K=8, interval=interval)
    inputs = [torch.randn(16, K), torch.randn(16, K)]
    assert_right(kernel, {"x": devices}, _DIMS, inputs, lambda a, b: a @ b.T, rtol=1e-4, atol=1e-4)
    if -(-K // 8) % interval == 0:
        assert outline(lowered(kernel, {"x": devices}, _DIMS, strict=True)) == [
            "kernel(A, B, C)",
            "all_reduce(C, sum, x)",
        ]


def test_devices_run_one_loop():
    """As long as its part of K, with what is added at the end of each interval."""
    kernel = promoted_matmul(16, 16, 64, block_K=8)
    local = lowered(kernel, {"x": 2}, _DIMS).steps[0].func
    (loop,) = [loop for loop in nodes(local, tirx.For) if loop.annotations]
    assert int(loop.extent) == 4
    assert dict(loop.annotations) == {"num_stages": 2}
    assert [int(guard.condition.b) for guard in nodes(local, tirx.IfThenElse)] == [0, 1]


def test_joining_gives_one_loop():
    kernel = weighted_sums("start")
    apart = with_intervals(kernel)
    assert len(nodes(apart, tirx.For)) == len(nodes(kernel, tirx.For)) + 1
    without_else = [line for line in text(kernel).split("\n") if line.strip() not in ("else:", "T.evaluate(0)")]
    assert text(kernel.with_body(join(apart.body))).split("\n") == without_else
