"""Which tensors hold NaN or infinity."""

import pytest
import torch

from mesh_tensor.runtime.elementwise import not_finite


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_element(dtype, value):
    good, bad = torch.ones(70).to(dtype), torch.ones(70).to(dtype)
    bad[69] = value
    assert not_finite({"a": [good, good], "b": [good, bad], "c": [bad]}) == ["b", "c"]


def test_infinities_that_cancel():
    assert not_finite({"a": [torch.tensor([float("inf"), float("-inf")])]}) == ["a"]


@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 6e4), (torch.float32, 3e38), (torch.float64, 1.7e308)])
def test_a_sum_may_overflow(dtype, large):
    assert not_finite({"a": [torch.full((64,), large, dtype=dtype)]}) == []
    assert not_finite({"a": [torch.full((1,), large, dtype=dtype)], "b": [torch.full((1,), large, dtype=dtype)]}) == []


def test_what_can_only_be_finite():
    assert not_finite({}) == []
    assert not_finite({"ints": [torch.arange(3)], "none": [torch.empty(0)]}) == []
