"""Gelu by tanh, compiled, beside float64 and torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu

from mesh_tensor.targets.cpu import gelu as ours
from mesh_tensor.targets.cpu.gelu import gelu_tanh, gelu_tanh_backward

EDGES = (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e20, -1e20, 1e-40, -1e-40, 1e10, -1e10, 30.0, -30.0, 88.0, -88.0)


def _expected(x: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.double().requires_grad_()
    y = gelu(wide, approximate="tanh")
    (dx,) = torch.autograd.grad(y, wide, seed.double())
    return y.detach().float(), dx.float()


@pytest.mark.parametrize("shape", [(0,), (1,), (7, 33), (3, 1000)])
def test_values_and_gradients_are_those_in_float64(shape: tuple[int, ...]) -> None:
    assert ours.how() == "compiled"
    x, seed = torch.randn(shape) * 4, torch.randn(shape)
    for given, weight in ((x, seed), (x.movedim(0, -1), seed.movedim(0, -1))):
        y, dx = _expected(given, weight)
        torch.testing.assert_close(gelu_tanh(given), y, rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(gelu_tanh_backward(weight, given), dx, rtol=1e-5, atol=4e-6)


def test_edges_are_as_torch_has_them() -> None:
    x = torch.tensor(EDGES)
    seed = torch.ones_like(x)
    torch.testing.assert_close(gelu_tanh(x), gelu(x, approximate="tanh"), equal_nan=True)
    expected = torch.ops.aten.gelu_backward(seed, x, approximate="tanh")
    torch.testing.assert_close(gelu_tanh_backward(seed, x), expected, equal_nan=True)


def test_parts_and_threads_give_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x, seed = torch.randn(10_007) * 3, torch.randn(10_007)
    y, dx = gelu_tanh(x), gelu_tanh_backward(seed, x)
    for start, stop in ((0, 1), (3, 50), (4097, 10_007)):
        assert torch.equal(gelu_tanh(x[start:stop]), y[start:stop])
        assert torch.equal(gelu_tanh_backward(seed[start:stop], x[start:stop]), dx[start:stop])
    monkeypatch.setattr(ours, "_PER_THREAD", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(gelu_tanh(x), y)
    assert torch.equal(gelu_tanh_backward(seed, x), dx)


def test_what_is_not_plain_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, requires_grad=True)
    gelu_tanh(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, _expected(x.detach(), torch.ones(5))[1])
    half = torch.randn(9, dtype=torch.bfloat16)
    assert torch.equal(gelu_tanh(half), gelu(half, approximate="tanh"))
    monkeypatch.setattr(ours, "_library", lambda: None)
    assert ours.how() == "torch's"
    assert torch.equal(gelu_tanh(x.detach()), gelu(x.detach(), approximate="tanh"))
