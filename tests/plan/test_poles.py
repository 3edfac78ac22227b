"""Sums are completed before they meet a pole: a divisor that may be 0, a factor that may be infinite."""

import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor.plan.explicit import Change


def sums(x):
    """Sums over rows, each for itself: what several take is completed once."""
    return (x.mul(2.0**n).sum(0) for n in range(40))


class Meets(nn.Module):
    """A sum over rows by what is 0 or infinite somewhere."""

    def forward(self, x, c, v):
        total = sums(x)
        return {
            "divided": next(total) / c,
            "moved, then divided": next(total).reshape(2, 2).T / c.reshape(2, 2),
            "times a reciprocal": next(total) * (1 / c),
            "times a power": next(total) * v.pow(-1),
            "times a root": next(total) * v.rsqrt(),
            "times a logarithm": next(total) * v.log(),
            "times what is infinite itself": next(total) * torch.tensor([1.0, torch.inf, -torch.inf, 2.0]),
            "times a sum of infinite numbers": next(total) * (v.rsqrt() + c).reshape(2, 2).sum(1).repeat(2),
            "times what may be chosen": next(total) * torch.where(c > 1, c, 1 / v),
            "by what is infinite": (next(total) * 2).cumsum(0) * (1 / c).clamp(min=-1),
            "an average": (x / v).sum(0) / v.sum(),
            "by a count": next(total) / (c > 100).sum(),
            "by a norm": next(total) / (v * 0).norm(),
            "times rounded infinite numbers": next(total) * (1 / v).floor(),
            "times moved ones": next(total) * (1 / v).roll(1),
            "times padding": next(total) * F.pad(v[:3], (0, 1), value=torch.inf),
            "times a product of infinite numbers": next(total) * ((1 / v)[:, None] @ torch.ones(1, 1))[:, 0],
            "times logarithms of shares": next(total) * c.masked_fill(c > 1.5, -torch.inf).log_softmax(-1),
            "times another's pole": next(total) * torch.digamma(v),
            "times what has no rule": next(total) * torch.special.bessel_y0(v),
            "by what cancels": next(total) / ((-v).clamp(min=-0.1) + 0.1),
            "by the smallest shares": next(total) / (v * 100).softmax(-1).topk(2, largest=False).values.sum(-1),
            "by what is rounded": next(total) / (c / 4).clamp(min=0.5).int(),
            "by what starts again": next(total) / ((v > 0).to(torch.uint8) * 255 + 1),
            "shares of what cancels": next(total) * ((c - 0.75) / (c - 0.75).sum()),
            "shares of others": next(total) * (v.reshape(2, 2).T / v.reshape(2, 2).T.sum(1)).flatten(),
            "by places": next(total) / (c + 1).topk(4).indices,
        }


class MeetsNone(nn.Module):
    """By what is proved to be neither."""

    def forward(self, x, c, v):
        total = sums(x)
        chosen = c.softmax(-1).topk(2).values
        return {
            "a number": next(total) / 3,
            "numbers": next(total) / torch.tensor([1.0, -2.0, 3.0, 0.5]),
            "a norm": next(total) * torch.rsqrt(c.square().mean() + 1e-6),
            "a product of equals": next(total) / (c * c + 1e-6),
            "an even power": next(total) / (c.pow(2).sum() + 1e-6).sqrt(),
            "no less than": next(total) / c.clamp(min=1e-3),
            "the larger one": next(total) / torch.maximum(c, torch.ones(())),
            "a power": next(total) * c.abs().pow(2.0),
            "an exponential": next(total) * c.exp(),
            "masked": next(total) * torch.exp(c.masked_fill(c > 0, -torch.inf)),
            "shares": (next(total).reshape(2, 2).T * (chosen / chosen.sum())).sum(1),
            "shares of a sum": next(total) * _shares(c.reshape(1, 4))[0],
            "shares of sums that are 0": next(total).reshape(2, 2) * _shares(v.reshape(2, 2).T),
            "no infinite ones": next(total) * c.masked_fill(c > 1, -torch.inf).clamp(min=-2.0),
            "signs": next(total) * torch.sign(1 / (c.abs() + 1)),
        }


def _shares(x):
    x = x.abs()
    return x / x.sum(1, keepdim=True)


def _run(model, devices):
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    x[:, 0] = torch.tensor([1.0, -2.0, 3.0, -1.0, 5.0])  # parts of other signs than the sum
    c, v = torch.tensor([0.0, -0.0, 2.0, 1.0]), torch.tensor([0.0, 1.0, 0.0, 4.0])
    made = mt.from_torch(torch.export.export(model, (x, c, v)), check=False)
    run = mt.distribute_module(made, {"d": devices}, {"x": {"d": 0}})
    return run(x, c, v), model(x, c, v), run.plan


def test_as_on_one_device():
    for devices in (2, 3):
        found, wanted, _ = _run(Meets(), devices)
        assert wanted.keys() == found.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(
                found[name], tensor, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
            )
        assert sum(int(tensor.isinf().any()) for tensor in wanted.values()) > 9  # or nothing was seen


def test_sums_that_meet_no_pole_wait():
    found, wanted, plan = _run(MeetsNone(), 2)
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
    completed = [step.reason for step in plan.explicit.steps if isinstance(step, Change)]
    assert len(completed) == len(wanted)
    assert [reason.count("(sum)") for reason in completed].count(1) == 1, completed  # the sum of shares itself


def test_a_loss_is_completed_with_the_gradients():
    """Its numerator is, and divided then: by the count of labels, which may be none on a device, or on all."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(6, 3), torch.randn(8, 6), torch.tensor([0, 1, 2, 0, -100, -100, -100, -100])
    step = mt.training_step(model, F.cross_entropy, (x, y), optimizer="sgd", lr=0.1, check=False)
    run = mt.distribute_module(step, {"d": 2}, {"input": {"d": 0}, "target": {"d": 0}}, poison=True)
    torch.testing.assert_close(run(x, y), F.cross_entropy(model(x), y).detach())
    assert len([one for one in run.program.collectives if one.bytes]) == 2  # the count, and all else
