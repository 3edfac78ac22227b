"""Embeddings with padding: what marks its row as a constant costs only where gradients are made."""

import pytest
import torch
from torch import nn

import mesh_tensor as mt

IDS = torch.tensor([[0, 1, 2, 1, 7, 3], [1, 1, 6, 5, 4, 0]])


class Model(nn.Module):
    """Also what the embedding gives, and where its padding is, if that is asked for."""

    def __init__(self, padding: int | None, more: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.end, self.more = nn.Embedding(8, 4, padding), nn.Linear(4, 3), more

    def forward(self, ids):
        rows = self.table(ids)
        return (self.end(rows), rows, ids == 1) if self.more else self.end(rows)


def _run(model: Model, layout: dict):
    return mt.distribute_module(mt.from_torch(torch.export.export(model, (IDS,))), {"x": 2}, layout)


def _calls(run) -> list[str]:
    return [step.call.name for step in run.program.steps if hasattr(step, "call")]


@pytest.mark.parametrize("layout", [{}, {"table.weight": {"x": 0}}])
def test_inference_is_as_without_padding(layout):
    model = Model(1)
    run = _run(model, layout)
    assert _calls(run) == _calls(_run(Model(None), layout))
    torch.testing.assert_close(run(IDS), model(IDS).detach())


def test_rows_that_are_given_too_and_conditions_that_are_taken():
    model = Model(1, more=True)
    for made, expected in zip(_run(model, {"table.weight": {"x": 0}})(IDS), model(IDS), strict=True):
        torch.testing.assert_close(made, expected.detach())


def test_a_step_keeps_the_row_of_padding():
    model, target = Model(1), torch.randn(2, 6, 3)
    step = mt.training_step(model, nn.functional.mse_loss, (IDS, target), optimizer="sgd", lr=0.5)
    run = mt.distribute_module(step, {"x": 2}, {"table.weight": {"x": 0}})
    run(IDS, target)
    moved = (run.state_dict()["table.weight"] - model.table.weight.detach()).abs().sum(1)
    assert moved[1] == 0
    assert (moved[[0, 2, 3, 4, 5, 6, 7]] > 0).all()
