"""Buffers that a model writes as it trains, beside torch."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt


class Alternates(nn.Module):
    """Every other call gives twice as much: two calls leave the buffer as it was."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("odd", torch.zeros(()))

    def forward(self, x):
        made = self.fc(x) * (1 + self.odd)
        self.odd.copy_(1 - self.odd)
        return made


def test_a_buffer_that_two_calls_leave_as_it_was():
    torch.manual_seed(0)
    model, x, y = Alternates(), torch.randn(6, 4), torch.randn(6, 4)
    own = copy.deepcopy(model)
    step = mt.training_step(model, F.mse_loss, (x, y), optimizer="sgd", lr=0.1)
    assert model.odd.item() == 0
    run, optimizer = mt.distribute_module(step, {"x": 2}, {}), torch.optim.SGD(own.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.mse_loss(own(x), y)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(run(x, y), loss.detach())
    torch.testing.assert_close(run.state_dict()["fc.weight"], own.fc.weight.detach())
