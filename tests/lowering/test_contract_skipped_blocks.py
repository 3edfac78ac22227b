"""Loops that carry a running maximum and skip blocks by data: the blocks that are left are combined over devices."""

import pytest
import torch

from kernels.sparse import block_sparse_attention, block_sparse_attention_reference

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


@pytest.mark.parametrize("causal", [False, True])
def test_skipped_blocks_are_combined(causal):
    func = block_sparse_attention(**SIZES, causal=causal)
    steps = outline(lowered(func, {"x": 2}, KEYS, strict=True))
    assert [step.split("(")[0] for step in steps if "all_" in step] == ["all_reduce"] * 3
    q, k, v, mask = tensors()
    expected = block_sparse_attention_reference(q, k, v, mask, causal)
    assert expected.isnan().any()
    for devices in (2, 3, 4):
        result = run(func, {"x": devices}, KEYS, q, k, v, mask)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_rows_that_a_block_masks_whole_are_what_they_are_on_one_device():
    """A row of which the first block that counts is masked whole is NaN from there on, on whichever device that is."""
    func = block_sparse_attention(**SIZES, causal=True, behind=1)
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
