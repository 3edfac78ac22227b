"""Causal attention, compiled, beside float64 and torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from mesh_tensor.targets.cpu import attention as ours
from mesh_tensor.targets.cpu.attention import causal_attention, causal_attention_backward

Tensor = torch.Tensor


def _expected(seed: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, ...]:
    """The result, the logarithms of the sums, and the gradients, in float64."""
    leaves = [tensor.double().transpose(1, 2).requires_grad_() for tensor in (q, k, v)]
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    scores = (leaves[0] @ leaves[1].mT * factor).masked_fill(hidden, -torch.inf)
    y = scores.softmax(-1) @ leaves[2]
    gradients = torch.autograd.grad(y, leaves, seed.double().transpose(1, 2))
    made = (y.detach(), scores.detach().logsumexp(-1), *gradients)
    return tuple(each.float() if each.ndim == 3 else each.float().transpose(1, 2) for each in made)


def _made(seed: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, ...]:
    assert ours.takes(q, k, v) == (q.shape[1] >= 48)
    y, sums = causal_attention(q, k, v, scale)
    return (y, sums, *causal_attention_backward(seed, q, k, v, y, sums, scale))


@pytest.mark.parametrize(
    ("shape", "scale"),
    [
        ((2, 64, 4, 32), None),
        ((1, 16, 1, 1), 1.5),
        ((3, 33, 2, 40), 0.3),
        ((1, 97, 3, 7), -0.5),
        ((2, 130, 1, 65), 0.0),
        ((1, 300, 2, 16), None),
    ],
    ids=str,
)
def test_values_and_gradients_are_those_in_float64(shape: tuple[int, ...], scale: float | None) -> None:
    assert ours.how() == "compiled"
    tensors = [torch.randn(shape) for _ in range(4)]
    for found, wanted in zip(_made(*tensors, scale), _expected(*tensors, scale), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def test_tensors_may_lie_anyhow() -> None:
    fused = torch.randn(2, 50, 3, 4, 8)  # q, k and v of one product
    q, k, v = fused.unbind(2)
    seed = torch.randn(8, 4, 50, 2).permute(3, 2, 1, 0)
    alone = [tensor.contiguous() for tensor in (seed, q, k, v)]
    for found, wanted in zip(_made(seed, q, k, v, None), _made(*alone, None), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("share", [1, 2, 6])
def test_heads_of_queries_share_those_of_keys(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each of them were repeated; by threads, too."""
    q, (k, v) = torch.randn(3, 50, 6, 8), torch.randn(2, 3, 50, 6 // share, 8)
    for threads in (1, 4):
        monkeypatch.setattr(ours, "_PER_THREAD", 1)
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        y, sums = causal_attention(q, k, v, None)
        wanted = causal_attention(q, k.repeat_interleave(share, 2), v.repeat_interleave(share, 2), None)
        assert torch.equal(y, wanted[0])
        assert torch.equal(sums, wanted[1])


def test_another_default_dtype_changes_nothing() -> None:
    """C++ fills memory of float32, whatever torch makes where it is not told."""
    tensors = [torch.randn(2, 40, 3, 8) for _ in range(4)]
    wanted = _made(*tensors, None)
    torch.set_default_dtype(torch.float64)
    try:
        found = _made(*tensors, None)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
        assert one.dtype is torch.float32


def test_negated_views_are_left_to_torch() -> None:
    """In memory are the numbers that they are the negatives of."""
    q, k = torch.randn(1, 50, 2, 8), torch.randn(1, 50, 2, 8)
    negated = torch.complex(torch.randn(1, 50, 2, 8), torch.randn(1, 50, 2, 8)).conj().imag
    assert negated.is_neg()
    assert ours.takes(q, k, k)
    assert not ours.takes(q, k, negated)


def test_large_scores_are_no_infinities() -> None:
    tensors = [torch.randint(-99, 99, (1, 40, 2, 16)).float() for _ in range(4)]  # scores are exact
    found, wanted = _made(*tensors, 1.0), _expected(*tensors, 1.0)
    for one, other in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-3)
    assert all(gradient.isfinite().all() for gradient in found[2:])


@pytest.mark.parametrize("which", range(3))
def test_nan_comes_to_those_that_see_it(which: int) -> None:
    tensors = [torch.randn(1, 96, 2, 16) for _ in range(3)]
    clean = causal_attention(*tensors, None)[0]
    tensors[which][0, 40, 1, 3] = torch.nan
    found = causal_attention(*tensors, None)[0]
    wanted = scaled_dot_product_attention(*(tensor.transpose(1, 2) for tensor in tensors), is_causal=True)
    torch.testing.assert_close(found[:, 40:], wanted.transpose(1, 2)[:, 40:], equal_nan=True)
    assert found[0, 40, 1, 3].isnan()
    assert torch.equal(found[:, :32], clean[:, :32])  # torch has NaN before that, too, where it is in v


def test_threads_give_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(3, 70, 5, 24) for _ in range(4)]
    alone = _made(*tensors, None)
    monkeypatch.setattr(ours, "_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for found, wanted in zip(_made(*tensors, None), alone, strict=True):
        assert torch.equal(found, wanted)


def test_what_it_is_not_made_for_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 64, 6, 8)
    assert ours.takes(x, x, x)
    assert ours.takes(x, x[:, :, :3], x[:, :, :3])
    assert not ours.takes(x, x[:, :, :3], x[:, :, :2])
    assert not ours.takes(x, x[:, :, :4], x[:, :, :4])
    assert not ours.takes(x, x[:, :, :0], x[:, :, :0])
    assert not ours.takes(x[:, :, :3], x, x)
    assert not ours.takes(x, x[:, :16], x[:, :16])
    assert not ours.takes(x.double(), x.double(), x.double())
    assert not ours.takes(x[:, :8], x[:, :8], x[:, :8])
    assert not ours.takes(x, x, x.clone().requires_grad_())
    monkeypatch.setattr(ours, "_library", lambda: None)
    assert ours.how() == "torch's"
    assert not ours.takes(x, x, x)
