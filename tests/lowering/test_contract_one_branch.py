"""Blocks that lie inside a tensor are loaded without bounds tests, the others with them: one way does for all."""

import tilelang.language as T
import torch

from mesh_tensor.rules.kernel.normalize import normalize
from mesh_tensor.rules.kernel.one_branch import one_branch
from mesh_tensor.rules.kernel.reader import read_kernel
from tests.other_machines import machine

from .every_layout import check
from .support import lowered, outline

CHANNELS, FEATURES, LENGTH, BLOCK, SIZE = 4, 4, 24, 4, 3


def convolution_1d(inside=True, otherwise=0.0):
    """`out[f, n] = sum_ck W[f, k * CHANNELS + c] * X[c, n + k - 1]`; `inside`: what is asked of blocks that are loaded
    without bounds tests is enough."""

    @T.prim_func
    def kernel(
        X: T.Tensor((CHANNELS, LENGTH), "float32"),
        W: T.Tensor((FEATURES, SIZE * CHANNELS), "float32"),
        Out: T.Tensor((FEATURES, LENGTH), "float32"),
    ):
        with T.Kernel(T.ceildiv(LENGTH, BLOCK), threads=32) as bx:
            weight = T.alloc_shared((FEATURES, CHANNELS), "float32")
            data = T.alloc_shared((CHANNELS, BLOCK), "float32")
            acc = T.alloc_fragment((FEATURES, BLOCK), "float32")
            T.clear(acc)
            first = bx * BLOCK - 1
            last = bx * BLOCK + BLOCK
            is_inside = (first >= 0) & (last < LENGTH) if inside else first >= 0
            for k in T.serial(SIZE):
                T.copy(W[0, k * CHANNELS], weight)
                for c, j in T.Parallel(CHANNELS, BLOCK):
                    at = bx * BLOCK + j + k - 1
                    if is_inside:
                        data[c, j] = X[c, at]
                    else:
                        in_bounds = (at >= 0) & (at < LENGTH)
                        data[c, j] = T.if_then_else(in_bounds, X[c, at], otherwise)
                T.gemm(weight, data, acc)
            T.copy(acc, Out[0, bx * BLOCK])

    return kernel


def reference(x, w):
    weight = w.reshape(FEATURES, SIZE, CHANNELS).permute(0, 2, 1)
    return torch.nn.functional.conv1d(x[None], weight, padding=1)[0]


def test_only_margins_are_exchanged():
    layouts = {"X": {"x": 1}, "Out": {"x": 1}}
    for devices in (3, 4):
        with machine(1):
            steps = outline(lowered(convolution_1d(), {"x": devices}, layouts, strict=True))
        assert [step.split("(")[0] for step in steps] == ["halo", "kernel"], steps


def test_in_every_layout():
    inputs = torch.randn(CHANNELS, LENGTH), torch.randn(FEATURES, SIZE * CHANNELS)
    with machine(1):
        check(convolution_1d(), inputs, reference(*inputs), [{"x": 3}, {"x": 2, "y": 2}])


def is_one(func):
    return one_branch(read_kernel(normalize(func))) is not None


def test_what_is_outside_is_what_the_second_branch_says():
    """Outside a tensor loads read 0: where the first branch reaches there, the second one has to say that."""
    assert is_one(convolution_1d())
    assert is_one(convolution_1d(inside=False))
    assert is_one(convolution_1d(otherwise=1.0))
    assert not is_one(convolution_1d(inside=False, otherwise=1.0))
