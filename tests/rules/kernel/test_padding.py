"""What a kernel computes past the end of a dim, and whether that counts."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.matmul import matmul
from mesh_tensor.rules.kernel.padding import takes_whole_blocks

from .kernels import analysis, factor, reduction


def row_blocks(fill, reduce, N=40, block=16):
    """B[m] = reduce over blocks of A's columns, of `fill(value, inside)` per element."""

    @T.prim_func
    def func(A: T.Tensor((32, N), "float32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            block_of_A = T.alloc_shared((8, block), "float32")
            a = T.alloc_fragment((8, block), "float32")
            b = T.alloc_fragment((8,), "float32")
            T.fill(b, start(reduce))
            for ko in T.serial(T.ceildiv(N, block)):
                T.copy(A[bx * 8, ko * block], block_of_A)
                for i, j in T.Parallel(8, block):
                    a[i, j] = fill(block_of_A[i, j], ko * block + j < N)
                reduce(a, b, dim=1, clear=False)
            T.copy(b, B[bx * 8])

    return func


def start(reduce):
    return {T.reduce_max: -T.infinity("float32"), T.reduce_min: T.infinity("float32")}.get(reduce, 0.0)


@pytest.mark.parametrize(
    ("fill", "reduce", "fits"),
    [
        (lambda v, inside: v, T.reduce_sum, True),
        (lambda v, inside: v * v, T.reduce_sum, True),
        (lambda v, inside: T.exp(v), T.reduce_sum, False),
        (lambda v, inside: T.if_then_else(inside, T.exp(v), 0.0), T.reduce_sum, True),
        (lambda v, inside: T.if_then_else(inside, T.exp(v), 1.0), T.reduce_sum, False),
        (lambda v, inside: v, T.reduce_max, False),
        (lambda v, inside: T.if_then_else(inside, v, -T.infinity("float32")), T.reduce_max, True),
        (lambda v, inside: T.if_then_else(inside, v, T.infinity("float32")), T.reduce_min, True),
        (lambda v, inside: T.if_then_else(inside, v, 0.0), T.reduce_min, False),
        (lambda v, inside: T.abs(v), T.reduce_sum, True),
        (lambda v, inside: v + 1.0, T.reduce_sum, False),
        (lambda v, inside: T.max(v, 0.0), T.reduce_sum, True),
        (lambda v, inside: v, T.reduce_absmax, True),
    ],
)
def test_blocks_that_reach_past_the_end(fill, reduce, fits):
    blocked = factor(analysis(row_blocks(fill, reduce)), "A", 1).blocked
    if fits:
        assert blocked is None
    else:
        assert "blocks of 16 reach past its end (40), and what is there counts" in blocked


def test_blocks_that_divide_the_dim_reach_past_nothing():
    assert factor(analysis(row_blocks(lambda v, inside: T.exp(v), T.reduce_sum, N=48)), "A", 1).blocked is None


@pytest.mark.parametrize(("N", "whole"), [(48, True), (40, False), (16, True)])
def test_whole_blocks(N, whole):
    found = analysis(row_blocks(lambda v, inside: v, T.reduce_sum, N=N))
    assert takes_whole_blocks(found.kernel, factor(found, "A", 1)) is whole


@pytest.mark.parametrize(
    ("fill", "masked"),
    [
        (lambda v, inside: v, False),
        (lambda v, inside: T.exp(v), True),
        # The kernel's own test knows where the dim ends, not where some tile does.
        (lambda v, inside: T.if_then_else(inside, T.exp(v), 0.0), True),
        (lambda v, inside: T.if_then_else(inside, v, 0.0), False),
    ],
)
def test_padding_of_a_tile_is_masked_unless_it_is_neutral(fill, masked):
    found = analysis(row_blocks(fill, T.reduce_sum, N=48))
    assert reduction(found, "A", 1).masked is masked


def test_zeros_of_one_operand_are_enough_for_a_gemm():
    found = analysis(matmul(64, 64, 40, 16, 16, 16))
    assert factor(found, "A", 1).blocked is None
    assert reduction(found, "A", 1).masked is False


def test_a_symbolic_dim_may_have_a_short_block():
    columns = T.dynamic("columns")
    assert factor(analysis(row_blocks(lambda v, inside: v, T.reduce_sum, N=columns)), "A", 1).blocked is None
    assert factor(analysis(row_blocks(lambda v, inside: T.exp(v), T.reduce_sum, N=columns)), "A", 1).blocked


def last_block_apart(N=40, block=16, *, beyond=0.0, stale=False):
    """B[m] = the sum of A's row: all blocks but the last one are copied, that one is loaded element by element, with
    `beyond` behind its end; with `stale`, it is what the block before it was."""
    blocks = -(-N // block)

    @T.prim_func
    def func(A: T.Tensor((32, N), "float32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            a = T.alloc_shared((8, block), "float32")
            b = T.alloc_fragment((8,), "float32")
            T.clear(b)
            if stale:
                T.clear(a)
            for ko in T.serial(blocks):
                if ko < blocks - 1:
                    T.copy(A[bx * 8, ko * block], a)
                elif not stale:
                    for i, j in T.Parallel(8, block):
                        a[i, j] = T.if_then_else(ko * block + j < N, A[bx * 8 + i, ko * block + j], beyond)
                T.reduce_sum(a, b, dim=1, clear=False)
            T.copy(b, B[bx * 8])

    return func


def test_what_does_not_run_past_the_end_leaves_nothing_there():
    assert factor(analysis(last_block_apart()), "A", 1).blocked is None
    blocked = factor(analysis(last_block_apart(beyond=1.0)), "A", 1).blocked
    assert "blocks of 16 reach past its end (40), and what is there counts" in blocked
    assert "depends on the block" in factor(analysis(last_block_apart(stale=True)), "A", 1).blocked


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"beyond": 1.0}, {"stale": True}], ids=["", "beyond", "stale"])
def test_a_last_block_that_is_loaded_apart_is_summed_right(devices, options):
    kernel = mt.annotate(last_block_apart(**options), {"x": devices}, {"A": {"x": 1}})
    a = torch.randn(32, 40)
    again = (
        a[:, 16:32]
        if options.get("stale")
        else torch.cat([a[:, 32:], torch.full((32, 8), options.get("beyond", 0.0))], 1)
    )
    expected = a[:, :32].sum(1) + again.sum(1)
    torch.testing.assert_close(mt.compile(kernel, target="interpret", poison=True)(a), expected, rtol=1e-5, atol=1e-5)
