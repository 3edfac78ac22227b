"""Elements of arguments that are looked up in a table: out of range they are refused as in torch, or give NaN."""

import pytest
import torch
from torch import nn

import mesh_tensor as mt


class Lookup(nn.Module):
    """Rows of a table of 7, by ids of another shape."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 6)

    def forward(self, ids):
        return self.table(ids.reshape(2, -1)).sum(-1)


MODEL = Lookup()
IDS = torch.tensor([0, 6, 3, 1])


@pytest.fixture(scope="module")
def module():
    return mt.from_torch(torch.export.export(MODEL, (IDS,)))


def run(module, shardings, **options):
    return mt.distribute_module(module.mod, {"x": 2}, shardings, weights=module.params, poison=True, **options)


@pytest.mark.parametrize("shardings", [{}, {"table.weight": {"x": 0}}, {"table.weight": {"x": 1}}, {"ids": {"x": 0}}])
@pytest.mark.parametrize("outside", [-1, 7, 2**40])
def test_ids_out_of_range(module, shardings, outside):
    ids = IDS.clone()
    ids[2] = outside
    with pytest.raises(IndexError):
        MODEL(ids)
    with pytest.raises(mt.MeshTensorError) as error:
        run(module, shardings)(ids)
    low, high = int(ids.min()), int(ids.max())
    text = str(error.value)
    assert f"parameter 'ids' has elements from {low} to {high}, but main." in text
    assert "looks them up in a dim that takes 0 to 6" in text
    unchecked = run(module, shardings, check_indices=False)(ids)
    assert unchecked.isnan().reshape(-1).tolist() == [False, False, True, False]
    with pytest.raises(mt.MeshTensorError, match="indices from"):
        mt.run_sequential(module.mod, [ids, *module.params.values()])


@pytest.mark.parametrize("shardings", [{}, {"table.weight": {"x": 0}}, {"ids": {"x": 0}}])
def test_ids_in_range(module, shardings):
    torch.testing.assert_close(run(module, shardings)(IDS), MODEL(IDS))


def test_indices_that_may_count_from_the_end():
    class Rows(nn.Module):
        def forward(self, x, where):
            return x[where]

    x = torch.randn(5, 3)
    module = mt.from_torch(torch.export.export(Rows(), (x, torch.tensor([0, 1]))))
    rows = mt.distribute_module(module.mod, {"x": 2}, {"x": {"x": 0}}, poison=True)
    torch.testing.assert_close(rows(x, torch.tensor([-5, -1])), x[[-5, -1]])
    with pytest.raises(mt.MeshTensorError, match="takes -5 to 4"):
        rows(x, torch.tensor([-6, 0]))
