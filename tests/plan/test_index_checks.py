"""Elements of arguments that are looked up in a table: out of range they are refused as in torch, or give NaN. So are
divisors that are 0, of whole numbers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

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
    said = f"parameter 'ids' has elements from {low} to {high}, but 'table' looks them up in a dim that takes 0 to 6"
    assert said in str(error.value)
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


class Of(nn.Module):
    """What a function makes of a table of 7 x 6 and indices."""

    def __init__(self, function):
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 6))
        self.function = function

    def forward(self, ids):
        return self.function(self.table, ids)


LOOK_UPS = {
    "computed": (lambda table, ids: F.embedding(ids + 1, table), 5, [-2, 6, 10]),
    "put together": (lambda table, ids: F.embedding(torch.cat([ids, ids]), table), 5, [-1, 7]),
    "index_select": (lambda table, ids: table.index_select(0, ids), 5, [-1, 7]),
    "gather": (lambda table, ids: table.gather(0, ids[:, None]), 5, [-1, 7]),
    "gather of columns": (lambda table, ids: table.gather(1, ids[:, None]), 7, [-1, 6]),
    "one index": (lambda table, ids: table[ids], 5, [-8, 7]),
    "two indices": (lambda table, ids: table[ids, ids + 1], 5, [-8, 6]),
    "scatter": (lambda table, ids: table.scatter(1, ids[:, None], table[:, :1]), 7, [-1, 6]),
    "scatter of a number": (lambda table, ids: table.scatter(1, ids[:, None], 2.5), 7, [-1, 6]),
    "losses": (lambda table, ids: F.cross_entropy(table, ids, reduction="none"), 7, [-1, 6]),
}


@pytest.mark.parametrize("what", LOOK_UPS)
def test_every_look_up_is_checked(what):
    """Whole tensors and tiles, at even and uneven sizes: padding is never refused, what is no padding always."""
    function, count, outside = LOOK_UPS[what]
    model = Of(function)
    ids = torch.arange(count) % 5
    program = torch.export.export(model, (ids,))
    module = mt.from_torch(program)
    for shardings in ({}, {"table": {"x": 0}}, {"table": {"x": 1}}, {"ids": {"x": 0}}):
        looked = mt.distribute_module(module.mod, {"x": 3}, shardings, weights=module.params, poison=True)
        torch.testing.assert_close(looked(ids), model(ids).detach())
        for number in outside:
            wrong = ids.clone()
            wrong[-1] = number
            with pytest.raises((IndexError, RuntimeError)):
                program.module()(wrong)
            for given in (wrong, mt.distribute(wrong, {"x": 3}, {"x": 0})):
                with pytest.raises(mt.MeshTensorError, match=r"indices from|looks them up"):
                    looked(given)


def test_negative_indices_of_several_columns_count_once():
    """-8 is not 7 - 8, and that again from the end."""
    model = Of(lambda table, ids: table[ids, ids])
    ids = torch.tensor([0, -6, 5])
    module = mt.from_torch(torch.export.export(model, (ids,)))
    pairs = run(module, {"table": {"x": 1}})
    torch.testing.assert_close(pairs(ids), model(ids).detach())
    with pytest.raises(mt.MeshTensorError, match="indices from -7 to 5 into a dim of 6"):
        pairs(torch.tensor([0, -7, 5]))
    assert run(module, {}, check_indices=False)(torch.tensor([0, -7, 5])).isnan().tolist() == [False, True, False]


class Divides(nn.Module):
    """Whole numbers by others, and by constants, which are looked at once."""

    def forward(self, x, by):
        return x // by, x % by, x // torch.tensor([2, -3, 4]), torch.div(x, by, rounding_mode="trunc")


@pytest.mark.parametrize("shardings", [{}, {"x": {"x": 0}}, {"by": {"x": 0}}, {"x": {"x": 1}}])
def test_whole_numbers_divided_by_0(shardings):
    """They are refused as on one device; rows that pad tiles may be anything."""
    x, by = torch.randint(-9, 9, (5, 3)), torch.tensor([[2], [-3], [1], [5], [-1]])
    module = mt.from_torch(torch.export.export(Divides(), (x, by)))
    divided = mt.distribute_module(module, {"x": 3}, shardings, poison=True)
    for found, expected in zip(divided(x, by), Divides()(x, by), strict=True):
        assert torch.equal(found, expected)
    constant_is_split = shardings == {"x": {"x": 1}}
    assert sum(step.checked for step in divided.program.ops) == 3 + constant_is_split
    by[4] = 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        Divides()(x, by)
    with pytest.raises(
        mt.MeshTensorError, match=r"an integer is divided by 0(?s:.*)check_indices=False leaves this out"
    ):
        divided(x, by)
    unchecked = mt.distribute_module(module, {"x": 3}, shardings, check_indices=False)(x, by)
    assert unchecked[0][4].tolist() == [torch.iinfo(torch.int64).min] * 3


def test_choices_by_the_sign_of_floats():
    """Written as those of indices that count from the end are."""

    class Leaky(nn.Module):
        def forward(self, x, less):
            return torch.where(x < 0, less, x)

    given = torch.randn(5, 3), torch.tensor(-2.0)
    run = mt.distribute_module(mt.from_torch(torch.export.export(Leaky(), given)), {"x": 2}, {"x": {"x": 0}})
    torch.testing.assert_close(run(*given), Leaky()(*given))


@pytest.mark.parametrize("outside", [-3, 7])
def test_elements_that_are_replaced_before_they_are_looked_up(outside):
    """-1 and 9 never are; by a loss, or with 0 in place of one and then of the other."""
    replaced = Of(lambda table, ids: F.embedding(torch.where(ids != -1, torch.where(ids == 9, 0, ids), 0), table))
    loss = Of(lambda table, ids: F.cross_entropy(table[:5], ids, ignore_index=-1, reduction="none"))
    for model, ids in ((replaced, [0, -1, 9, 6, 1]), (loss, [0, -1, 5, 3, -1])):
        given = torch.tensor(ids)
        looked = run(mt.from_torch(torch.export.export(model, (given,))), {})
        torch.testing.assert_close(looked(given), model(given).detach())
        given[3] = outside
        with pytest.raises(mt.MeshTensorError, match=r"indices from|looks them up"):
            looked(given)
