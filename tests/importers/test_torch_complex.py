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
    ],
)
def test_transforms_and_moves(function):
    check(function, torch.randn(4, 6, 8))


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda x: torch.fft.fft(x), "the result '_fft_r2c' is complex: use torch.view_as_real"),
        (lambda x: torch.complex(x, x).exp().real, "aten.exp.default of complex numbers"),
    ],
)
def test_what_is_refused(function, told):
    with pytest.raises(mt.MeshTensorError) as error:
        mt.from_torch(torch.export.export(Function(function), (torch.randn(4, 4),)))
    assert told in str(error.value)
