"""Accumulators that each iteration leaves empty for the next one."""

import pytest
import tilelang.language as T
import torch
from tvm import ir, tirx

from mesh_tensor.rules.kernel.normalize import with_early_fills
from tests.lowering.support import assert_right, lowered, nodes, outline, run


def scaled_sums(style="late", M=16, K=64, block=16):
    """Y[m] = sum over blocks of k of S[m, block] * (sum of X[m, k] in the block): the inner sum is emptied at the end
    of an iteration ("late") or at its start ("early"); not all, or not as it was before, for the other styles."""
    blocks = K // block

    @T.prim_func
    def kernel(X: T.Tensor((M, K), "float32"), S: T.Tensor((M, blocks), "float32"), Y: T.Tensor((M,), "float32")):
        with T.Kernel(1, threads=32):
            x = T.alloc_shared((M, block), "float32")
            inner = T.alloc_fragment((M,), "float32")
            total = T.alloc_fragment((M,), "float32")
            if style == "other":
                T.fill(inner, 1.0)
            else:
                T.clear(inner)
            T.clear(total)
            if style == "written":
                inner[0] = 2.0
            for k in T.Pipelined(blocks, num_stages=2):
                if style == "early":
                    T.clear(inner)
                T.copy(X[0, k * block], x)
                T.reduce_sum(x, inner, dim=1, clear=False)
                for i in T.Parallel(M):
                    total[i] += inner[i] * S[i, k]
                if style == "part":
                    T.clear(inner[0 : M // 2])
                elif style != "early":
                    T.clear(inner)
                if style == "used":
                    inner[0] = 2.0
            if style == "early":
                T.clear(inner)
            for i in T.Parallel(M):
                total[i] = total[i] + inner[i]
            T.copy(total, Y)

    return kernel


def test_what_is_filled_at_the_end_is_filled_at_the_start():
    ir.assert_structural_equal(with_early_fills(scaled_sums("late")), scaled_sums("early"))


@pytest.mark.parametrize("style", ["other", "written", "used", "part", "early"])
def test_loops_that_are_entered_or_left_otherwise_stay_as_they_are(style):
    kernel = scaled_sums(style)
    assert with_early_fills(kernel).same_as(kernel)


def test_loops_that_may_end_early_stay_as_they_are():
    @T.prim_func
    def kernel(X: T.Tensor((8, 4), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            sums = T.alloc_fragment((4,), "float32")
            T.clear(sums)
            for k in T.serial(8):
                for i in T.Parallel(4):
                    sums[i] += X[k, i]
                if X[k, 0] > 0.0:
                    T.loop_break()
                T.clear(sums)
            T.copy(sums, Y)

    assert with_early_fills(kernel).same_as(kernel)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("style", ["late", "early", "other", "written", "used", "part"])
def test_numbers(style, devices):
    """Split over blocks of k where nothing is carried; right in any case."""

    def reference(x, s):
        inner, total = torch.zeros(16), torch.zeros(16)
        inner[:] = style == "other"
        inner[0] += 2 * (style == "written")
        for k in range(4):
            inner = inner + x[:, k * 16 : (k + 1) * 16].sum(1)
            total = total + inner * s[:, k]
            inner[: 8 if style == "part" else 16] = 0
            inner[0] = 2 * (style == "used")
        return total + inner

    dims = {"X": {"x": 1}, "S": {"x": 1}}
    inputs = [torch.randn(16, 64), torch.randn(16, 4)]
    assert_right(scaled_sums(style), {"x": devices}, dims, inputs, reference, rtol=1e-4, atol=1e-4)
    if style == "late" and devices == 2:
        assert outline(lowered(scaled_sums(style), {"x": 2}, dims, strict=True))[1] == "all_reduce(Y, sum, x)"


def test_loops_keep_their_step():
    """TileLang writes steps into the body; TIR has them in the loop."""

    def with_step(loop):
        if loop.loop_var.name != "k":
            return None
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, None, loop.annotations, step)

    kernel, step = scaled_sums("late"), tirx.IntImm("int32", 2)
    kernel = kernel.with_body(tirx.stmt_functor.ir_transform(kernel.body, None, with_step, ["tirx.For"]))
    made = with_early_fills(kernel)
    assert not made.same_as(kernel)
    assert [int(loop.step) for loop in nodes(made, tirx.For) if loop.step is not None] == [2]


def first_fills(style="first", M=16, K=64, block=16):
    """Y[m] = sum of X[m, k]: the sums are emptied before the loop ("before"), or by its first iteration, as far as
    that is certain to be one, and the first to use them."""

    @T.prim_func
    def kernel(X: T.Tensor((M, K), "float32"), n: T.int32, Y: T.Tensor((M,), "float32")):
        with T.Kernel(1, threads=32):
            x = T.alloc_shared((M, block), "float32")
            total = T.alloc_fragment((M,), "float32")
            if style == "before" or style == "maybe none":
                T.clear(total)
            elif style != "first":
                T.fill(total, 1.0)
            for k in T.Pipelined(T.max(n, 0) if style == "maybe none" else K // block, num_stages=2):
                T.copy(X[0, k * block], x)
                if style == "used":
                    for i in T.Parallel(M):
                        total[i] = total[i] * 2.0
                if style == "second":
                    if k == 1:
                        T.clear(total)
                elif style == "part":
                    if k == 0:
                        T.clear(total[0 : M // 2])
                elif style == "or else":
                    if k == 0:
                        T.clear(total)
                    else:
                        T.fill(total, 2.0)
                elif style != "before" and k == 0:
                    T.clear(total)
                T.reduce_sum(x, total, dim=1, clear=False)
                if style == "left" and X[k, 0] > 0.0:
                    T.loop_break()
            T.copy(total, Y)

    return kernel


def test_what_the_first_iteration_fills_is_filled_before_the_loop():
    ir.assert_structural_equal(with_early_fills(first_fills("first")), first_fills("before"))


@pytest.mark.parametrize("style", ["used", "second", "part", "or else", "maybe none", "left"])
def test_fills_that_others_may_see_stay_where_they_are(style):
    kernel = first_fills(style)
    assert with_early_fills(kernel).same_as(kernel)


def first_fills_reference(style, x):
    """Block by block."""
    total = torch.ones(x.shape[0])
    for k, block in enumerate(x.split(16, 1)):
        total = total * 2 if style == "used" else total
        if k == (style == "second"):
            total[: 8 if style == "part" else None] = 0.0
        elif style == "or else":
            total = torch.full_like(total, 2.0)
        total = total + block.sum(1)
    return total


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("style", ["first", "used", "second", "part", "or else"])
def test_kernels_that_fill_in_an_iteration_are_right(style, dim):
    x = torch.randn(16, 64)
    found = run(first_fills(style), {"x": 2}, {"X": {"x": dim}}, x, 4)
    torch.testing.assert_close(found, first_fills_reference(style, x), rtol=1e-5, atol=1e-5)
