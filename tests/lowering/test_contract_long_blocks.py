"""Clause 6: blocks, loops and programs that go on behind a dim's end, and what is masked in place there."""

import math

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from tests.other_machines import AT_ONCE, planned_for

from .every_layout import check
from .support import assert_right, run

M, N = 13, 37
SOME = [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}]


def padded_rms_norm(block=64):
    """A row is one block, which is longer: what lies behind its end is 0."""

    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), W: T.Tensor((N,), "float32"), out: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(M, 4), threads=128) as bx:
            row = T.alloc_fragment((4, block), "float32")
            squares = T.alloc_fragment((4, block), "float32")
            weight = T.alloc_fragment((block,), "float32")
            total = T.alloc_fragment((4,), "float32")
            T.copy(A[bx * 4, 0], row)
            T.copy(W[0], weight)
            for i, j in T.Parallel(4, block):
                squares[i, j] = row[i, j] * row[i, j]
            T.reduce_sum(squares, total, dim=1)
            for i, j in T.Parallel(4, block):
                row[i, j] = row[i, j] * T.rsqrt(total[i] / N + 1e-5) * weight[j]
            T.copy(row, out[bx * 4, 0])

    return kernel


def lowest(masked, length=16):
    """The lowest of every row, what lies behind its end masked in place, or not."""

    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), out: T.Tensor((M,), "float32")):
        with T.Kernel(M, threads=32) as bx:
            part = T.alloc_fragment((1, length), "float32")
            low = T.alloc_fragment((1,), "float32")
            T.fill(low, T.infinity("float32"))
            for k in T.serial(T.ceildiv(N, length)):
                T.copy(A[bx, k * length], part)
                for i, j in T.Parallel(1, length):
                    part[i, j] = T.abs(part[i, j])
                if masked:
                    for i, j in T.Parallel(1, length):
                        part[i, j] = T.if_then_else(k * length + j < N, part[i, j], T.infinity("float32"))
                T.reduce_min(part, low, dim=1, clear=False)
            T.copy(low, out[bx])

    return kernel


def guarded_programs():
    """Rows and blocks of columns for which there are more programs than there are of them."""

    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), out: T.Tensor((M, N), "float32"), S: T.Tensor((1,), "float32")):
        with T.Kernel(8, 16, threads=32) as (bx, by):
            if by < M:
                for j in T.Parallel(8):
                    if bx * 8 + j < N:
                        out[by, bx * 8 + j] = A[by, bx * 8 + j] + T.cast(bx * 8 + j, "float32")
                        T.atomic_add(S[0], A[by, bx * 8 + j])

    return kernel


def decays(length):
    """What a loop carries goes on behind the end, where it halves with every step."""

    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), out: T.Tensor((M,), "float32")):
        with T.Kernel(M, threads=32) as bx:
            row = T.alloc_fragment((length,), "float32")
            state = T.alloc_fragment((1,), "float32")
            T.copy(A[bx, 0:length], row)
            state[0] = 0.0
            for j in T.serial(length):
                state[0] = state[0] * 0.5 + row[j]
            out[bx] = state[0]

    return kernel


def counted(length):
    """How many steps a loop has, beside a sum: those behind the end count."""

    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), out: T.Tensor((M,), "float32")):
        with T.Kernel(M, threads=32) as bx:
            total = T.alloc_fragment((1,), "float32")
            total[0] = 0.0
            for j in T.serial(length):
                if j < N:
                    total[0] += A[bx, j]
                total[0] += 1.0
            out[bx] = total[0]

    return kernel


def rms_reference(a, w):
    return a * torch.rsqrt((a * a).sum(1, keepdim=True) / N + 1e-5) * w


@pytest.fixture(scope="module")
def a():
    return torch.randn(M, N)


def test_a_row_in_a_longer_block(a):
    w = torch.randn(N)
    with planned_for(AT_ONCE):
        check(padded_rms_norm(), [a, w], rms_reference(a, w), [{"x": 3}])
        kernel = mt.compile(mt.annotate(padded_rms_norm(), {"x": 2}, {"A": {"x": 1}, "W": {"x": 0}, "out": {"x": 1}}))
    assert [step.kind for step in kernel.program.collectives] == ["all_reduce"]
    torch.testing.assert_close(kernel(a, w), rms_reference(a, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [8, 16, 64])
def test_what_is_masked_in_place(a, length):
    expected = a.abs().amin(1)
    assert mt.sharding_rule(lowest(True, length)).factors["k"] == "min"
    for mesh in SOME:
        assert_right(lowest(True, length), mesh, {"A": {"x": 1}}, [a], lambda a: expected)
    kernel = mt.compile(mt.annotate(lowest(True, length), {"x": 3}, {"A": {"x": 1}}), target="c")
    torch.testing.assert_close(kernel(a), expected)


def test_what_is_not_masked_counts(a):
    """The 0 behind the end is the lowest magnitude."""
    assert "reach past its end" in mt.sharding_rule(lowest(False)).factors["k"]
    assert_right(lowest(False), {"x": 2}, {"A": {"x": 1}}, [a], lambda a: torch.zeros(M))


@pytest.mark.parametrize("added", [0, 40])
def test_a_mask_whose_numbers_begin_anew(added):
    """Behind the end, from 256 on, 8 bits are below 200 again: the 0 there counts."""

    @T.prim_func
    def kernel(A: T.Tensor((2, 200), "float32"), out: T.Tensor((2,), "float32")):
        with T.Kernel(2, threads=32) as bx:
            part = T.alloc_fragment((1, 100), "float32")
            low = T.alloc_fragment((1,), "float32")
            T.fill(low, T.infinity("float32"))
            for k in T.serial(3):
                T.copy(A[bx, k * 100], part)
                for i, j in T.Parallel(1, 100):
                    place = T.cast(k * 100 + j, "uint8") + T.uint8(added)
                    part[i, j] = T.if_then_else(place < T.uint8(200 + added), part[i, j], T.infinity("float32"))
                T.reduce_min(part, low, dim=1, clear=False)
            T.copy(low, out[bx])

    a = torch.rand(2, 200) + 1
    assert mt.sharding_rule(kernel).factors["k"].startswith("whole: ")
    assert_right(kernel, {"x": 2}, {"A": {"x": 1}}, [a], lambda a: torch.zeros(2))


def test_more_programs_than_rows(a):
    expected = (a + torch.arange(N), a.sum().reshape(1))
    check(guarded_programs(), [a], expected, [{"x": 3}])
    layouts = {"A": {"x": 0, "y": 1}, "out": {"x": 0, "y": 1}}
    annotated = mt.annotate(guarded_programs(), {"x": 2, "y": 2}, layouts)
    kernel = mt.compile(annotated, target="c", strict=True)
    result = kernel(a, torch.zeros(M, N), torch.zeros(1))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [N, 48, 64])
def test_what_goes_on_behind_the_end_is_not_split(a, length):
    weights = torch.tensor([math.ldexp(1.0, j + 1 - length) for j in range(N)])
    for func, expected in ((decays(length), a @ weights), (counted(length), a.sum(1) + length)):
        for mesh in SOME[:2]:
            assert_right(func, mesh, {"A": {"x": 1}}, [a], lambda a, expected=expected: expected, rtol=1e-4)
    if length > N:
        assert mt.sharding_rule(decays(length)).factors["k"].startswith("whole: ")


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("size", [37, 40, 50])
def test_rows_that_no_block_of_a_tile_fills(size, devices):
    """A loop fills the blocks that its tile has; what is summed goes on behind them."""
    length = -(-size // 16) * 16

    @T.prim_func
    def kernel(A: T.Tensor((size,), "float32"), out: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=32):
            row = T.alloc_shared((length,), "float32")
            total = T.alloc_fragment((1,), "float32")
            for k in T.serial(T.ceildiv(size, 16)):
                for i in T.Parallel(16):
                    row[k * 16 + i] = A[k * 16 + i]
            T.reduce_sum(row, total, dim=0)
            T.copy(total, out)

    a = torch.randn(size)
    torch.testing.assert_close(run(kernel, {"x": devices}, {"A": {"x": 0}}, a), a.sum().reshape(1))


def test_a_condition_whose_numbers_begin_anew():
    """Of 8 bits, what 40 is added to may be less than 40."""

    @T.prim_func
    def kernel(A: T.Tensor((250,), "float32"), out: T.Tensor((250,), "float32")):
        with T.Kernel(16, threads=32) as bx:
            for j in T.Parallel(16):
                if bx * 16 + j < 250 and T.cast(bx * 16 + j, "uint8") + T.uint8(40) >= T.uint8(40):
                    out[bx * 16 + j] = A[bx * 16 + j]

    a = torch.rand(250) + 1
    annotated = mt.annotate(kernel, {"x": 3}, {"A": {"x": 0}, "out": {"x": 0}})
    result = mt.compile(annotated, target="interpret", poison=True)(a, torch.zeros(250))
    torch.testing.assert_close(result, torch.where(torch.arange(250) < 216, a, 0.0))


@pytest.mark.parametrize("target", ["interpret", "c"])
def test_loaded_numbers_that_begin_anew(target):
    """200 more than what is loaded may be less than 10."""

    @T.prim_func
    def kernel(A: T.Tensor((50,), "float32"), ids: T.Tensor((50,), "uint8"), out: T.Tensor((50,), "float32")):
        with T.Kernel(T.ceildiv(50, 16), threads=32) as bx:
            for j in T.Parallel(16):
                if bx * 16 + j < 50 and ids[bx * 16 + j] + T.uint8(200) >= T.uint8(200):
                    out[bx * 16 + j] = A[bx * 16 + j]

    a, ids = torch.rand(50) + 1, torch.randint(0, 256, (50,), dtype=torch.uint8)
    annotated = mt.annotate(kernel, {"x": 3}, {"A": {"x": 0}, "ids": {"x": 0}, "out": {"x": 0}})
    result = mt.compile(annotated, target=target, poison=target == "interpret")(a, ids, torch.zeros(50))
    assert 0 < int((ids < 56).sum()) < 50
    torch.testing.assert_close(result, torch.where(ids < 56, a, 0.0))
