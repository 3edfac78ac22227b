"""Dropout in a pipeline: every microbatch drops by a seed of its own, the same forwards and backwards, on any mesh."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor.importers.torch_dropout import counted_dropout


class Dropping(nn.Module):
    """Two layers, what is between them dropped by chance."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 5), nn.Dropout(0.4), nn.Linear(5, 6)

    def forward(self, x, y):
        return F.mse_loss(self.last(self.drop(self.first(x))), y)


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", False), ("zb-h1", True)])
def test_dropout_is_that_of_each_microbatch(schedule, recompute):
    torch.manual_seed(0)
    model, count = Dropping(), 4
    module = mt.from_torch(torch.export.export(model, (torch.randn(3, 6), torch.randn(3, 6))))
    run = mt.pipeline(
        module,
        {"m0": {"d": 2, "m": 2}, "m1": {"d": 3}},
        ["drop"],
        {"x": {"d": 0}, "y": {"d": 0}, "first.weight": {"m": 0}},
        microbatches=count,
        schedule=schedule,
        train=True,
        recompute=recompute,
    )
    x, y = torch.randn(12, 6), torch.randn(12, 6)
    losses = set()
    for seed in (3, 4):
        model.zero_grad()
        parts = []
        for i, (rows, wanted) in enumerate(zip(x.chunk(count), y.chunk(count), strict=True)):
            kept = counted_dropout(model.first(rows), torch.tensor(seed * count + i), 0.4, 0)
            parts.append(F.mse_loss(model.last(kept), wanted))
        loss = torch.stack(parts).mean()
        loss.backward()
        torch.testing.assert_close(run(x, y, dropout_seed=torch.tensor(seed)), loss.detach())
        losses.add(float(loss.detach()))
        gradients = run.gradients()
        for name, weight in model.named_parameters():
            torch.testing.assert_close(gradients[module.names[name]], weight.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert len(losses) == 2
