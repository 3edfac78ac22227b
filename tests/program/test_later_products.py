"""Products that a collective doesn't need come behind it where nothing else would run beside it."""

import pytest
import torch
from torch import nn

import mesh_tensor as mt

ROWS, WIDE, NARROW = 6, 8, 4
SHAPES = {"x": (ROWS, NARROW), "dy": (ROWS, WIDE), "w": (NARROW, WIDE)}
SPLIT = {"dy": {"x": 1}, "w": {"x": 1}}  # products over WIDE are sums of parts


class Given(nn.Module):
    """A function of x, dy and w."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, x, dy, w):
        return self.run(x, dy, w)


def tensors():
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def distributed(run, overlap="auto"):
    module = mt.from_torch(torch.export.export(Given(run), tuple(tensors().values())), check=False)
    return mt.distribute_module(module, {"x": 2}, SPLIT, overlap=overlap)


def order(made):
    """Products by the shape of what they give, collectives, and the ends of those that start early."""
    found = []
    for step in made.program.steps:
        if step.collective is not None:
            found.append("wait" if step.starts is None else "start" if not step.starts.wait else "send")
        elif step.uses and step.is_long:
            found.append(made.program.values[step.writes[0]].shape)
    return found


def backward(x, dy, w):
    dw = x.T @ dy
    return torch.relu(dy @ w.T), dw


def backward_of_three(x, dy, w):
    ours = [x.T @ dy, (x + 1).T @ dy, (x + 2).T @ dy]
    return torch.relu(dy @ w.T), *ours


def needed(x, dy, w):
    dw = x.T @ dy
    return torch.relu(dy @ (w + dw).T), dw


def two_layers(x, dy, w):
    dw = x.T @ dy
    dx = torch.relu(dy @ w.T)
    return torch.relu((dx @ w) @ w.T), dw


def hidden(x, dy, w):
    before = x.T @ dy
    dx = dy @ w.T
    return before, (x + 1).T @ dy, torch.relu(dx)


PRODUCT, SUM = (NARROW, WIDE), (ROWS, NARROW)
CASES = [
    (backward, [SUM, "start", PRODUCT, "wait"]),
    (backward_of_three, [PRODUCT, SUM, "start", PRODUCT, PRODUCT, "wait"]),
    (needed, [PRODUCT, SUM, "send"]),
    # what is behind the first one stays there
    (two_layers, [SUM, "start", PRODUCT, "wait", (ROWS, WIDE), SUM, "send"]),
    (hidden, [PRODUCT, SUM, "start", PRODUCT, "wait"]),
]


@pytest.mark.parametrize(("run", "expected"), CASES, ids=lambda each: getattr(each, "__name__", ""))
def test_products_come_behind_what_nothing_would_hide(run, expected):
    made, given = distributed(run), tensors()
    assert order(made) == expected
    torch.testing.assert_close(list(made(*given.values())), list(run(**given)))


def test_nothing_is_moved_where_nothing_is_to_overlap():
    assert order(distributed(backward, "off")) == [PRODUCT, SUM, "send"]


def test_what_is_hidden_takes_less_time_on_a_machine():
    early, late = (mt.simulate(distributed(backward, overlap), "a100x2") for overlap in ("auto", "off"))
    assert early.time < late.time
