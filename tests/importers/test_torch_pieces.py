"""Operators that are taken apart in a way of our own compute what torch's operators do, also in parts, and train."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes self:UserWarning")  # torch's, of LSTMs

LSTMS = {
    "plain": {},
    "without bias": {"bias": False},
    "both ways": {"bidirectional": True, "batch_first": True},
    "two layers": {"num_layers": 2},
}


class Recurrent(nn.Module):
    """Rows that no gradient comes to, and what an LSTM ends with after them."""

    def __init__(self, **options):
        super().__init__()
        self.table, self.lstm = nn.Embedding(11, 6), nn.LSTM(6, 4, **options)

    def forward(self, ids):
        y, (h, c) = self.lstm(self.table(ids))
        return y.mean() + (h * c).sum()


@pytest.mark.parametrize("name", LSTMS)
def test_lstms_train(name):
    torch.manual_seed(0)
    model, ids = Recurrent(**LSTMS[name]), torch.randint(0, 11, (5, 4))
    theirs, step = copy.deepcopy(model), mt.training_step(model, None, (ids,), optimizer="sgd", lr=0.1)
    rows = 0 if LSTMS[name].get("batch_first") else 1
    run = mt.distribute_module(step, {"x": 2}, {"ids": {"x": rows}}, poison=True)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = theirs(ids)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(run(ids), loss.detach())
    state = run.state_dict()
    for key, value in theirs.named_parameters():
        torch.testing.assert_close(state[key], value.detach(), rtol=1e-4, atol=1e-5)


ROWS = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
SIGNS = ROWS.roll(1, 0).sign()
LABELS = torch.tensor([[3, 0, -1, 1, 1], [1, -1, -1, -1, 2], [-1, 0, 0, 0, 0], [0, 1, 2, 3, 4], [4, 4, 4, -1, 0]] * 2)[
    :6
]
LOSSES = {
    "hinge": (lambda x, how: F.hinge_embedding_loss(x, SIGNS, margin=0.4, reduction=how)),
    "ranking": (lambda x, how: F.margin_ranking_loss(x, x.roll(1, 1), SIGNS, margin=0.2, reduction=how)),
    "cosine": (lambda x, how: F.cosine_embedding_loss(x, x.roll(1, 1), SIGNS[:, 0], margin=0.1, reduction=how)),
    "labels": (lambda x, how: F.multilabel_margin_loss(x, LABELS, reduction=how)),
}


class Loss(nn.Module):
    """A loss of rows, as one number; its square, where it is one per row."""

    def __init__(self, loss, how):
        super().__init__()
        self.loss, self.how, self.scale = loss, how, nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        return self.loss(x * self.scale, self.how).square().mean()


@pytest.mark.parametrize("how", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_gradients(name, how):
    model = Loss(LOSSES[name], how)
    module = mt.gradient(mt.from_torch(torch.export.export(model, (ROWS,))))
    run = mt.distribute_module(module.mod, {"a": 2, "b": 2}, {"x": {"a": 0, "b": 1}}, weights=module.params)
    loss, (gradient,) = run(ROWS)
    expected = model(ROWS)
    (wanted,) = torch.autograd.grad(expected, [model.scale])
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, wanted)
