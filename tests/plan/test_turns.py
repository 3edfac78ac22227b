"""Inputs and weights over one axis: which of them is heard first, and where the inputs' layout goes on."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from tests.other_machines import machine

from .modules import kinds

EXPERTS, WIDTH, HIDDEN, DEVICES = 8, 16, 128, 4


class Experts(nn.Module):
    """All experts see all tokens, each of which chose two: of a copy per expert, by stacked matrices, by einsum."""

    def __init__(self, how):
        super().__init__()
        self.how, self.router = how, nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 16)

    def forward(self, x):
        top, ids = self.router(x).softmax(-1).topk(2, -1)
        weights = x.new_zeros(len(x), EXPERTS).scatter(1, ids, top)
        if self.how == "einsum":
            made = torch.einsum("etf,efd->etd", F.silu(torch.einsum("td,edf->etf", x, self.up)), self.down)
            return torch.einsum("etd,te->td", made, weights)
        rows = x.expand(EXPERTS, -1, -1) if self.how == "copied" else x
        return (F.silu(rows @ self.up) @ self.down * weights.T.unsqueeze(-1)).sum(0)


def planned(model, x, layouts, at_once=True):
    """The run, after one that is right on a poisoned mesh."""
    model = model.eval()
    with machine(1 if at_once else 0):
        module = mt.from_torch(torch.export.export(model, (x,)), check=False)
        run = mt.distribute_module(module, {"d": DEVICES}, layouts, poison=True)
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    return run


BOTH = {"x": {"d": 0}, "up": {"d": 0}, "down": {"d": 0}}


@pytest.mark.parametrize("how", ["copied", "stacked", "einsum"])
def test_tokens_are_gathered_and_what_experts_make_is_scattered(how):
    """An expert would gather tokens (as bytes of rows), send scores to their experts, and scatter sums."""
    torch.manual_seed(0)
    run = planned(Experts(how), torch.randn(32, WIDTH), BOTH)
    rows, scores = 4 * 32 * WIDTH * (DEVICES - 1) // DEVICES, 4 * 32 * EXPERTS
    assert 2 * rows <= sum(step.bytes for step in run.program.collectives) <= 2 * rows + scores
    assert kinds(run.plan)[-1] == "reduce_scatter"


@pytest.mark.parametrize("how", ["copied", "stacked", "einsum"])
def test_small_weights_are_gathered(how):
    run = planned(Experts(how), torch.randn(4096, WIDTH), BOTH)
    assert kinds(run.plan) == ["all_gather", "all_gather"]


@pytest.mark.parametrize("how", ["copied", "einsum"])
@pytest.mark.parametrize("at_once", [True, False])
def test_tokens_that_devices_don_t_divide(how, at_once):
    planned(Experts(how), torch.randn(10, WIDTH), BOTH, at_once)


def test_stated_results_stay():
    module = mt.from_torch(torch.export.export(Experts("stacked").eval(), (torch.randn(32, WIDTH),)), check=False)
    result = module.mod["main"].body.body.name_hint
    run = planned(Experts("stacked"), torch.randn(32, WIDTH), {**BOTH, result: {}})
    assert kinds(run.plan)[-1] == "all_reduce"
    assert kinds(planned(Experts("stacked"), torch.randn(32, WIDTH), {**BOTH, "x": {}}).plan) == ["all_reduce"]


def test_positions_of_a_loss_s_target():
    """A target is no weight, though it is split as weights are: activations are gathered and scattered, not weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    x, target = torch.randn(2, 2, 8, 16).unbind()
    step = mt.training_step(model, F.mse_loss, (x, target), check=False)
    stated = {"input": {"m": 1}, "target": {"m": 1}, "0.weight": {"m": 0}, "0.bias": {"m": 0}, "2.weight": {"m": 1}}
    with machine(1):
        run = mt.distribute_module(step, {"m": 2}, stated)
    wanted = F.mse_loss(model(x), target).detach()
    torch.testing.assert_close(run(x, target), wanted)
    moved = [s.bytes for s in run.program.steps if getattr(s, "kind", "") in ("all_gather", "reduce_scatter")]
    assert sum(moved) == 3 * x.nbytes // 2  # before the first layer, after the second, and its gradient
