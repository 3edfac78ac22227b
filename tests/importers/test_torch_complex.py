"""Complex numbers of torch are pairs of floats: on a mesh, too."""

from dataclasses import replace

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


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: low frequencies of rows, mixed by complex weights."""

    def __init__(self):
        super().__init__()
        self.low, self.high = (nn.Parameter(torch.randn(3, 3, 2, 2, dtype=torch.cfloat) / 6) for _ in range(2))

    def forward(self, x):
        given = torch.fft.rfft2(x)
        made = torch.zeros(x.shape[0], 3, x.shape[2], x.shape[3] // 2 + 1, dtype=torch.cfloat)
        made[:, :, :2, :2] = torch.einsum("bixy,ioxy->boxy", given[:, :, :2, :2], self.low)
        made[:, :, -2:, :2] = torch.einsum("bixy,ioxy->boxy", given[:, :, -2:, :2], self.high)
        return torch.fft.irfft2(made, s=x.shape[2:])


@pytest.mark.parametrize(
    ("layouts", "received"),
    [({"x": {"x": 0}}, 0), ({"low": {"x": 1}, "high": {"x": 1}}, None), ({"low": {"x": 0}}, None)],
)
def test_weights(layouts, received):
    model, x = Spectral(), torch.randn(4, 3, 8, 8)
    run = mt.distribute_module(mt.from_torch(torch.export.export(model, (x,))), {"x": 2}, layouts, poison=True)
    torch.testing.assert_close(run(x), model(x).detach())
    assert received is None or f"{received} bytes received" in run.explain()
    torch.testing.assert_close(run.state_dict()["low"], torch.view_as_real(model.low.detach()))
    other = Spectral()
    run.load_state_dict(other.state_dict())
    torch.testing.assert_close(run(x), other(x).detach())


def test_weights_that_are_trained():
    model, x, y = Spectral(), torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8)
    step = mt.training_step(model, nn.functional.mse_loss, (x, y), optimizer="adamw", lr=1e-2, clip_norm=0.01)
    run = mt.distribute_module(step, {"x": 2}, {"x": {"x": 0}, "target": {"x": 0}, "low": {"x": 1}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        torch.testing.assert_close(run(x, y), loss.detach())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(torch.view_as_complex(run.state_dict()[name]), weight.detach(), rtol=1e-3, atol=1e-5)
    other = Spectral()
    run.load_state_dict(other.state_dict(), strict=False)
    torch.testing.assert_close(run(x, y), nn.functional.mse_loss(other(x), y).detach())


class Filter(nn.Module):
    """Takes and gives complex numbers beside others, and adds up what it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4, dtype=torch.cfloat))

    def forward(self, x, scale, shift=None):
        made = x.conj() * scale + shift
        self.seen.add_(made.sum(0).detach())
        return {"made": made, "size": made.abs(), "conj": made.conj(), "seen": self.seen * 1}


def test_inputs_results_and_what_is_written():
    model, other = Filter(), Filter()
    given = torch.randn(6, 4, dtype=torch.cfloat), torch.randn(4)
    shift = torch.randn(4, dtype=torch.cfloat)
    module = mt.from_torch(torch.export.export(model, given, {"shift": shift}))
    run = mt.distribute_module(module, {"x": 2, "y": 2}, {"x": {"x": 0, "y": 1}}, poison=True)
    for _ in range(2):
        torch.testing.assert_close(run(*given, shift=shift), other(*given, shift=shift))
    torch.testing.assert_close(run(torch.view_as_real(given[0]), given[1], shift=shift), other(*given, shift=shift))


class Mixed(nn.Module):
    """Complex numbers, by a complex matrix."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = nn.Parameter(matrix.clone())

    def forward(self, z):
        return z @ self.matrix


def test_inputs_that_were_recorded_as_floats_are_not_given_complex_numbers():
    """Pairs of floats are what the model takes there: a square of each is none of the complex number."""
    given = torch.randn(3, 4, dtype=torch.cfloat), torch.randn(3, 4, 2)
    program = torch.export.export(Function(lambda z, x: (z * z, x * x)), given)
    run = mt.distribute_module(mt.from_torch(program), {"x": 2})
    torch.testing.assert_close(run(*given), (given[0] ** 2, given[1] ** 2))
    told = r"\(3, 4\) complex64, but expected \(3, 4, 2\) float32"
    with pytest.raises(mt.MeshTensorError, match=told):
        run(given[0], given[0])

    def loss(made, target):
        return nn.functional.mse_loss(torch.view_as_real(made), target)

    z, y = torch.randn(4, 4, dtype=torch.cfloat), torch.randn(3, 4, 2)
    model = Mixed(z)
    run = mt.distribute_module(mt.training_step(model, loss, (given[0], y), optimizer="sgd", lr=0.1), {"x": 2})
    with pytest.raises(mt.MeshTensorError, match=told):
        run(given[0], given[0])
    torch.testing.assert_close(run(target=y, z=given[0]), loss(model(given[0]), y).detach())


def test_an_input_that_is_missing_is_told():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, dtype=torch.cfloat))

        def forward(self, x, y):
            return x * y + self.weight

    model, x, y = Sum(), torch.randn(4, 3, dtype=torch.cfloat), torch.randn(3)
    module = replace(mt.from_torch(torch.export.export(model, (x, y))), params={})
    run = mt.distribute_module(module, {"x": 2}, {"x": {"x": 0}})
    torch.testing.assert_close(run(x, y, weight=model.weight.detach()), model(x, y).detach())
    with pytest.raises(mt.MeshTensorError, match="1 tensors for 2 parameters"):
        run(x, weight=model.weight.detach())


def test_gradients_of_inputs():
    x, y = (torch.randn(4, 6, dtype=torch.cfloat, requires_grad=True) for _ in range(2))
    function = Function(lambda x: (x * x.conj().flip(0) * (1 + 2j)).imag.sum() + x.real.prod(0).sum())
    module = mt.from_torch(torch.export.export(function, (x.detach(),)))
    made = mt.distribute_module(module, {"x": 2}, {"inputs_0": {"x": 0}})(y)
    torch.testing.assert_close(torch.autograd.grad(made, y), torch.autograd.grad(function(y), y))


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda x: torch.zeros(4, 4).copy_(torch.complex(x, x)), "the imaginary parts would be lost"),
        (lambda x: torch.complex(x, x).bernoulli().real, "random"),
    ],
)
def test_what_is_refused(function, told):
    with pytest.raises(mt.MeshTensorError) as error:
        mt.from_torch(torch.export.export(Function(function), (torch.randn(4, 4),)))
    assert told in str(error.value)
