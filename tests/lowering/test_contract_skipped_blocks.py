"""Loops that carry a running maximum and skip blocks by data: the blocks that are left are combined over devices."""

import pytest
import torch
from tvm import tirx

from kernels.sparse import block_sparse_attention, block_sparse_attention_reference
from mesh_tensor.rules.kernel.finite_blocks import _finite

from .support import assert_right, lowered, outline, run

SIZES = {"batch": 1, "heads": 2, "seq": 48, "dim": 8, "block": 8}
KEYS = {"K": {"x": 2}, "V": {"x": 2}}


def tensors(share=0.4):
    """Queries, keys, values, and a mask with rows of no block at all."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 48, 8, generator=generator) for _ in range(3))
    mask = torch.rand(1, 2, 6, 6, generator=generator) < share
    mask[0, 0, 2] = False
    mask[0, 1, 3:, :3] = False  # the first device does nothing for these
    return [q, k, v, mask]


@pytest.mark.parametrize("largest_of", ["all", "last"])
@pytest.mark.parametrize("causal", [False, True])
def test_skipped_blocks_are_combined(causal, largest_of):
    func = block_sparse_attention(**SIZES, causal=causal, largest_of=largest_of)
    steps = outline(lowered(func, {"x": 2}, KEYS, strict=True))
    assert [step.split("(")[0] for step in steps if "all_" in step] == ["all_reduce"] * 3
    q, k, v, mask = tensors()
    expected = block_sparse_attention_reference(q, k, v, mask, causal)
    assert expected.isnan().any()
    for devices in (2, 3, 4):
        result = run(func, {"x": devices}, KEYS, q, k, v, mask)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("largest_of", ["all", "last"])
def test_rows_that_a_block_masks_whole_are_what_they_are_on_one_device(largest_of):
    """A row of which the first block that counts is masked whole is NaN from there on, on whichever device that is."""
    func = block_sparse_attention(**SIZES, causal=True, behind=1, largest_of=largest_of)
    inputs = tensors(share=0.6)
    expected = run(func, {"x": 1}, {"K": {}, "V": {}}, *inputs)
    assert expected.isnan().any()
    assert not expected.isnan().all()
    for devices in (2, 3):
        result = run(func, {"x": devices}, KEYS, *inputs)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_blocks_that_all_count():
    q, k, v, mask = tensors()
    func = block_sparse_attention(**SIZES)
    assert_right(func, {"x": 3}, KEYS, [q, k, v, mask | True], block_sparse_attention_reference)


def test_maxima_that_are_bounded_need_no_first_block():
    """Where nothing of a row has counted, powers are taken of the bound: blocks that mask rows whole are combined."""
    func = block_sparse_attention(**SIZES, causal=True, behind=3, lowest=-1e30)
    assert "all_reduce" in " ".join(outline(lowered(func, {"x": 2}, KEYS, strict=True)))
    inputs = tensors(share=0.6)
    expected = block_sparse_attention_reference(*inputs, causal=True, behind=3)
    for devices in (1, 2, 3):
        result = run(func, {"x": devices}, KEYS, *inputs)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


X = tirx.Var("x", "float32")
MASK = tirx.if_then_else(X > 0, tirx.const(1.0, "float32"), tirx.const(0.0, "float32"))


@pytest.mark.parametrize(
    ("value", "is_finite"),
    [
        (X * 2 - 1, True),
        (tirx.Div(X, tirx.const(8.0, "float32")), True),
        (tirx.tanh(X) * 30, True),
        (tirx.if_then_else(X > 0, X, tirx.const(float("-inf"), "float32")), False),
        (tirx.log(MASK), False),
        (1 - tirx.Div(tirx.const(1.0, "float32"), MASK), False),
        (tirx.Div(X, tirx.const(0.0, "float32")), False),
        (tirx.rsqrt(MASK) + 1, False),
    ],
    ids=["sum", "quotient", "tanh", "constant", "logarithm", "by a mask", "by zero", "root"],
)
def test_what_makes_no_infinity_of_finite_data(value, is_finite):
    """A mask may be a logarithm of zeros, on which no device may start."""
    assert _finite([value]) == is_finite
