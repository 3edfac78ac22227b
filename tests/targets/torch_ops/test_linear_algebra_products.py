"""Large products by oneDNN: right for any strides, with the same bits; torch's own where gradients are recorded."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mesh_tensor.targets.torch_ops import linear_algebra as products

SIZES = [(512, 512, 256), (8, 4096, 2048), (200, 733, 517), (128, 256, 1024), (64, 512, 512)]


@pytest.fixture
def chosen(monkeypatch):
    """The choice, as on a processor where oneDNN is preferred."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    return lambda rows, summed, columns, dtype=torch.float32: products.linear(rows, summed, columns, dtype)


@pytest.mark.parametrize(("rows", "summed", "columns"), SIZES)
def test_products_are_right_whatever_the_strides(chosen, rows, summed, columns):
    x, weight, bias = torch.randn(rows, summed), torch.randn(columns, summed), torch.randn(columns)
    multiply = chosen(rows, summed, columns)
    assert multiply is not F.linear
    expected = np.einsum("mk,nk->mn", x.double().numpy(), weight.double().numpy())
    made = multiply(x, weight)
    torch.testing.assert_close(made, torch.tensor(expected).float(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(multiply(x, weight, bias), made + bias, rtol=1e-5, atol=1e-4)
    for other in (bias[:1].expand(columns), torch.randn(columns, 2)[:, 1]):
        torch.testing.assert_close(multiply(x, weight, other), made + other, rtol=1e-5, atol=1e-4)
    turned, strided = x.t().contiguous().t(), torch.zeros(rows, summed + 8)[:, :summed].copy_(x)
    for other in (turned, strided, x.view(2, rows // 2, summed)):
        assert torch.equal(multiply(other, weight.t().contiguous().t()).reshape(rows, columns), made)


@pytest.mark.parametrize(
    ("rows", "summed", "columns", "dtype"),
    [
        (1, 4096, 4096, torch.float32),
        (512, 16, 2048, torch.float32),
        (128, 512, 128, torch.float32),
        (512, 512, 512, torch.float64),
    ],
)
def test_torch_multiplies_what_is_small_thin_or_no_float32(chosen, rows, summed, columns, dtype):
    assert chosen(rows, summed, columns, dtype) is F.linear


def test_gradients_are_torchs(chosen):
    x, weight = torch.randn(64, 512, requires_grad=True), torch.randn(256, 512, requires_grad=True)
    made = torch.autograd.grad(chosen(512, 512, 256)(x, weight).sum(), (x, weight))
    expected = torch.autograd.grad(F.linear(x, weight).sum(), (x, weight))
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        assert not chosen(512, 512, 256)(x, weight).requires_grad
