"""Norms by the root mean square, compiled, beside float64 and torch."""

from __future__ import annotations

import pytest
import torch

from mesh_tensor.targets.cpu import rms_norm as ours
from mesh_tensor.targets.cpu.rms_norm import rms_norm


def _expected(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.rms_norm(x.double(), weight.shape, weight.double(), epsilon).float()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (1,), (5, 1), (7, 33), (2, 3, 64), (4, 1000), (3, 5, 7)])
@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_values_are_those_in_float64(shape: tuple[int, ...], epsilon: float) -> None:
    assert ours.how() == "compiled"
    x = torch.randn(shape) * 3
    for dims in range(1, len(shape) + 1):
        weight = torch.randn(shape[-dims:])
        found = rms_norm(x, weight.shape, weight, epsilon)
        torch.testing.assert_close(found, _expected(x, weight, epsilon), rtol=2e-6, atol=1e-6)


def test_tensors_may_lie_anyhow() -> None:
    x, weight = torch.randn(6, 40, 5).permute(2, 0, 1), torch.randn(80)[::2]
    assert torch.equal(rms_norm(x, (40,), weight, 1e-6), rms_norm(x.contiguous(), (40,), weight.contiguous(), 1e-6))


def test_edges_are_as_torch_has_them() -> None:
    """Squares of large numbers are infinite, those of small ones 0; NaN and infinities are of their rows alone."""
    rows = torch.randn(7, 50)
    rows[0], rows[1], rows[2], rows[3, 7], rows[4, 49], rows[5, 3] = 0, 1e30, 1e-30, torch.nan, torch.inf, -torch.inf
    for epsilon in (0.0, 1e-6):
        found, wanted = (norm(rows, (50,), torch.ones(50), epsilon) for norm in (rms_norm, torch.rms_norm))
        torch.testing.assert_close(found, wanted, equal_nan=True)


def test_parts_and_threads_give_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(37, 90), torch.randn(90)
    y = rms_norm(x, (90,), weight, 1e-5)
    assert torch.equal(rms_norm(x[4:9], (90,), weight, 1e-5), y[4:9])
    monkeypatch.setattr(ours, "_PER_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(rms_norm(x, (90,), weight, 1e-5), y)


def test_what_is_not_plain_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(4, 9, requires_grad=True), torch.randn(9)
    rms_norm(x, (9,), weight, 1e-6).sum().backward()
    assert x.grad is not None
    half = torch.randn(4, 9, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(half, (9,), half[0], 1e-6), torch.rms_norm(half, (9,), half[0], 1e-6))
    monkeypatch.setattr(ours, "_library", lambda: None)
    assert ours.how() == "torch's"
    x = x.detach()
    assert torch.equal(rms_norm(x, (9,), weight, 1e-6), torch.rms_norm(x, (9,), weight, 1e-6))
