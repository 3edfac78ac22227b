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


class Nested(nn.Module):
    """Takes a nested input and one by name; drops elements, channels and weights of causal attention."""

    def __init__(self):
        super().__init__()
        self.first, self.channels, self.last = nn.Linear(6, 4), nn.Dropout1d(0.3), nn.Linear(4, 6)

    def forward(self, pair, *, y, drop=None):
        drop = drop or (lambda x, number: [nn.Dropout(0.4), self.channels, attention][number](x))
        x = drop(torch.tanh(self.first(pair["x"])) * pair["more"][0], 0)
        return F.mse_loss(self.last(drop(drop(x, 1), 2)), y)


def attention(x):
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.2, is_causal=True)[:, 0]


def counted(seed):
    """What drops by a seed."""

    def drop(x, number):
        if number == 0:
            return counted_dropout(x, seed, 0.4, 0)
        if number == 1:
            return x * counted_dropout(torch.ones(*x.shape[:2], 1), seed, 0.3, 1)
        scores = (x @ x.transpose(1, 2) / 2).masked_fill(torch.ones(5, 5).triu(1) > 0, float("-inf"))
        return counted_dropout(scores.softmax(-1)[:, None], seed, 0.2, 2)[:, 0] @ x

    return drop


def inputs(rows):
    return {"x": torch.randn(rows, 5, 6), "more": [torch.randn(rows, 5, 4)]}, torch.randn(rows, 5, 6)


@pytest.mark.parametrize("open_size", [False, True])
def test_nested_and_named_inputs_and_open_sizes(open_size):
    """With an open size, the last microbatch is smaller."""
    torch.manual_seed(0)
    model, count, rows = Nested(), 3, (3, 3, 2) if open_size else (4, 4, 4)
    pair, y = inputs(4)
    dim = {0: torch.export.Dim("rows", min=1, max=64)} if open_size else None
    shapes = {"pair": {"x": dim, "more": [dim]}, "y": dim} if open_size else None
    module = mt.from_torch(torch.export.export(model, (pair,), {"y": y}, dynamic_shapes=shapes))
    run = mt.pipeline(module, {"m0": {"d": 2}, "m1": {"m": 2}}, ["first"], microbatches=count, train=True)
    pair, y = inputs(sum(rows))
    losses = set()
    for seed in (3, 4):
        model.zero_grad()
        total = 0.0
        parts = [part.split(rows) for part in (pair["x"], pair["more"][0], y)]
        for i, (x, more, wanted) in enumerate(zip(*parts, strict=True)):
            drop = counted(torch.tensor(seed * count + i))
            total = total + model({"x": x, "more": [more]}, y=wanted, drop=drop) * len(x) / sum(rows)
        total.backward()
        torch.testing.assert_close(run(pair, y=y, dropout_seed=torch.tensor(seed)), total.detach())
        losses.add(float(total.detach()))
        gradients = run.gradients()
        for name, weight in model.named_parameters():
            torch.testing.assert_close(gradients[module.names[name]], weight.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert len(losses) == 2


def test_modules_with_a_seed_by_name():
    """As one module, on another mesh; the program that it was made from takes no seed afterwards, either."""
    torch.manual_seed(0)
    model, (pair, y) = Nested(), inputs(6)
    program = torch.export.export(model, (pair,), {"y": y})
    for _ in range(2):
        run = mt.distribute_module(mt.from_torch(program), {"d": 2}, {"pair_x": {"d": 0}}, poison=True)
        expected = model(pair, y=y, drop=counted(torch.tensor(5)))
        torch.testing.assert_close(run(pair, y=y, dropout_seed=torch.tensor(5)), expected.detach())
    assert [spec.arg.name for spec in program.graph_signature.input_specs][-1] == "y"
    with pytest.raises(mt.MeshTensorError, match="recorded with 1 in order and 'y', 'dropout_seed' by name"):
        run(pair, y=y)
