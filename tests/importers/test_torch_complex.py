"""Complex numbers of torch are pairs of floats: on a mesh, too."""

import pytest
import torch
from torch import nn

import mesh_tensor as mt

from .test_torch_operators import Function, check


class Rotary(nn.Module):
    """Turns pairs by angles that are a complex buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.polar(torch.ones(6, 4), torch.randn(6, 4)))

    def forward(self, x):
        pairs = torch.view_as_complex(x.reshape(4, 6, 4, 2))
        turned = pairs * self.angles
        return torch.view_as_real(turned).flatten(2), turned.abs(), (pairs.conj() * 2 + pairs / 3 - 1.5).real


def test_buffers():
    model, x = Rotary(), torch.randn(4, 6, 8)
    run = mt.distribute_module(
        mt.from_torch(torch.export.export(model, (x,))), {"x": 2, "y": 2}, {"x": {"x": 0, "y": 1}}, poison=True
    )
    torch.testing.assert_close(run(x), model(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (torch.fft.fft2(x).real, torch.view_as_real(torch.fft.rfft(x, dim=1)), torch.fft.ifft(x * 1j).imag),
        lambda x: torch.fft.irfft(torch.fft.rfft(x, norm="ortho") * 2, n=8, norm="ortho"),
        lambda x: torch.view_as_real(torch.polar(x.abs(), x)[:, 1:3].transpose(0, 1)),
        lambda x: torch.view_as_real(x + 2j + torch.complex(x[0], x[1])),
        lambda x: [part.abs() for part in torch.polar(x.abs(), x).split([1, 5, 2], dim=-1)],
    ],
)
def test_transforms_and_moves(function):
    check(function, torch.randn(4, 6, 8))


def spectral(x):
    """A Fourier layer: products of some frequencies with weights."""
    found, made = torch.fft.rfft(x), torch.zeros(4, 6, 5, dtype=torch.cfloat)
    weights = torch.complex(x[0, :, :6], x[1, :, 2:])
    made[:, :, :3] = torch.einsum("bif,io->bof", found[:, :, :3], weights)
    return torch.fft.irfft(made, n=8)


@pytest.mark.parametrize(
    "function",
    [
        spectral,
        lambda x: [of(torch.complex(x, x.flip(0))).real for of in (torch.exp, torch.sqrt, torch.reciprocal, torch.neg)],
        lambda x: [of(torch.complex(x, x.flip(0))) for of in (torch.abs, torch.angle, torch.isnan)],
        lambda x: (x / torch.complex(x, x.flip(0))).sum(1).imag + torch.complex(x, x * 2).mean((0, 1)).imag,
        lambda x: torch.where(x > 0, torch.complex(x, x), 0.0).real + torch.complex(x, x).cumsum(0).imag,
        lambda x: torch.linalg.svdvals(torch.complex(x, x.flip(0))),
        # neither squares nor their sum overflow
        lambda x: (torch.complex(x * 1e25, x * 1e25).abs(), torch.complex(x * 1e-25, x * 1e-25).abs() * 1e25),
        lambda x: (torch.linalg.vector_norm(torch.complex(x, x.flip(0)), 3, 1), torch.complex(x, x.flip(0)).std(1)),
    ],
)
def test_operators_of_torch(function):
    check(function, torch.randn(4, 6, 8))


def test_gradients():
    """A state space model's kernel; sizes and angles, at 0 too."""

    class Kernel(nn.Module):
        def __init__(self):
            super().__init__()
            self.rates, self.weights = nn.Parameter(-torch.rand(6, 4, 2) - 0.1), nn.Parameter(torch.randn(6, 4, 2))

        def forward(self, x):
            rates, weights = map(torch.view_as_complex, (self.rates, self.weights))
            kernel = torch.einsum("hn,hnl->hl", weights / rates, torch.exp(rates[..., None] * torch.arange(8)))
            y = torch.fft.irfft(torch.fft.rfft(x, n=16) * torch.fft.rfft(kernel.real, n=16), n=16)
            z = torch.complex(y, y.flip(0))
            return (z.abs() * z.angle().sin()).mean() + (rates * 0).abs().sum()

    model, x = Kernel(), torch.randn(4, 6, 8)
    loss = model(x)
    loss.backward()
    module = mt.gradient(mt.from_torch(torch.export.export(model, (x,))))
    run = mt.distribute_module(module, {"x": 2, "y": 2}, {"x": {"x": 0, "y": 1}}, poison=True)
    torch.testing.assert_close(run(x), (loss.detach(), tuple(weight.grad for weight in model.parameters())))


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda x: torch.fft.fft(x), "the result '_fft_r2c' is complex: use torch.view_as_real"),
        (lambda x: torch.complex(x, x).bernoulli().real, "random"),
    ],
)
def test_what_is_refused(function, told):
    with pytest.raises(mt.MeshTensorError) as error:
        mt.from_torch(torch.export.export(Function(function), (torch.randn(4, 4),)))
    assert told in str(error.value)
