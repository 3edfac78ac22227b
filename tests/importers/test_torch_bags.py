"""Bags of embeddings beside torch's own, with their gradients, and what tables that are split receive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import mesh_tensor as mt

_LAYOUTS: tuple[dict[str, dict[str, int]], ...] = ({"table": {"x": 0}}, {"table": {"x": 1}}, {"indices": {"x": 0}})


class _Bags(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(10, 6))
        self.options = options

    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor | None = None, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made = F.embedding_bag(indices, self.table, offsets, per_sample_weights=weights, **self.options)
        factors = torch.cos(torch.arange(6.0))
        return (made * factors).sum(), made


def _offsets(*places: int) -> torch.Tensor:
    return torch.tensor(places)


_CASES: dict[str, tuple[dict[str, Any], Sequence[Any]]] = {
    "sums": ({"mode": "sum"}, [torch.randint(0, 10, (6, 5))]),
    "sums, padded": ({"mode": "sum", "padding_idx": 3}, [torch.randint(0, 10, (6, 5))]),
    "means": ({}, [torch.randint(0, 10, (6, 5))]),
    "means, padded": ({"padding_idx": -1}, [torch.tensor([[9, 9, 9], [1, 9, 2], [4, 5, 6]])]),
    "maxima": ({"mode": "max"}, [torch.randint(0, 10, (6, 5))]),
    "maxima, padded": ({"mode": "max", "padding_idx": 3}, [torch.tensor([[3, 3], [7, 3], [8, 8], [2, 1]])]),
    "of weights": ({"mode": "sum"}, [torch.randint(0, 10, (6, 5)), None, torch.rand(6, 5)]),
    "at places": ({"mode": "sum"}, [torch.randint(0, 10, (9,)), _offsets(0, 2, 2, 7)]),
    "at places, with an end": ({"include_last_offset": True}, [torch.randint(0, 10, (9,)), _offsets(0, 4, 4, 9)]),
    "maxima, with an end": (
        {"mode": "max", "include_last_offset": True},
        [torch.tensor([8, 2, 5, 2, 8, 1, 1]), _offsets(0, 3, 3, 7)],
    ),
    "maxima, padded, with an end": (
        {"mode": "max", "include_last_offset": True, "padding_idx": 3},
        [torch.tensor([3, 3, 8, 3, 2, 2, 8]), _offsets(0, 2, 4, 7)],
    ),
    "at places, padded": ({"padding_idx": 3}, [torch.tensor([3, 3, 1, 3, 5, 6]), _offsets(0, 2, 5)]),
    "at places, of weights": ({"mode": "sum"}, [torch.randint(0, 10, (9,)), _offsets(0, 5), torch.rand(9)]),
}


@pytest.mark.parametrize("name", _CASES)
def test_gives_torchs_results_and_gradients_of_tables_that_are_split(name: str) -> None:
    options, arguments = _CASES[name]
    model, given = _Bags(**options), [argument for argument in arguments if argument is not None]
    model.table.data[8] = model.table.data[2]  # equal rows: a maximum's gradient is that of the first
    loss, bags = model(*arguments)
    (wanted,) = torch.autograd.grad(loss, model.table)
    made = mt.gradient(mt.from_torch(torch.export.export(model, tuple(arguments))))
    for layouts in _LAYOUTS:
        (_, result), (gradient,) = mt.distribute_module(made, {"x": 2}, layouts, poison=True)(*given)
        torch.testing.assert_close(result, bags.detach())
        torch.testing.assert_close(gradient, wanted)


def test_bags_of_an_open_number_of_rows_stay_with_their_devices() -> None:
    model, rows = _Bags(mode="sum"), torch.export.Dim("rows", min=2)
    program = torch.export.export(model, (torch.randint(0, 10, (6, 5)),), dynamic_shapes=({0: rows},))
    run = mt.distribute_module(mt.from_torch(program), {"x": 2}, {"indices": {"x": 0}})
    for count in (4, 7):
        indices = torch.randint(0, 10, (count, 5))
        loss, bags = run(indices)
        torch.testing.assert_close(bags, model(indices)[1].detach())
        torch.testing.assert_close(loss, model(indices)[0].detach())


def test_a_table_split_by_rows_receives_the_sums_alone() -> None:
    class Sums(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = torch.nn.EmbeddingBag(1000, 16, mode="sum")

        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            return self.bags(indices)  # type: ignore[no-any-return]

    model, indices = Sums(), torch.randint(0, 1000, (8, 20))
    run = mt.distribute_module(
        mt.from_torch(torch.export.export(model, (indices,))), {"x": 2}, {"bags.weight": {"x": 0}}
    )
    torch.testing.assert_close(run(indices), model(indices).detach())
    assert f"{8 * 16 * 4:,} bytes received" in run.explain()


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"mode": "max"}, (torch.randint(0, 10, (9,)), _offsets(0, 4))),
        ({"mode": "sum", "scale_grad_by_freq": True}, (torch.randint(0, 10, (4, 3)),)),
    ],
)
def test_what_has_no_gradient_here_runs_and_is_refused_when_trained(
    options: dict[str, Any], arguments: tuple[torch.Tensor, ...]
) -> None:
    model = _Bags(**options)
    imported = mt.from_torch(torch.export.export(model, arguments))
    _, bags = mt.distribute_module(imported, {"x": 2}, {"table": {"x": 1}})(*arguments)
    torch.testing.assert_close(bags, model(*arguments)[1].detach())
    with pytest.raises(mt.MeshTensorError, match="embedding_bag_forward_only.default has no gradient"):
        mt.gradient(imported)


def test_places_that_are_in_no_bag_are_refused() -> None:
    model, arguments = _Bags(mode="sum"), (torch.randint(0, 10, (9,)), _offsets(0, 4))
    run = mt.distribute_module(mt.from_torch(torch.export.export(model, arguments)), {"x": 2}, {})
    with pytest.raises(mt.MeshTensorError, match="indices from 0"):
        run(arguments[0], _offsets(1, 4))


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("arguments", [
    (torch.tensor([[8, 1, 2], [1, 8, 2], [3, 8, 1], [8, 8, 8], [3, 3, 3], [1, 3, 8]]),),
    (torch.tensor([8, 1, 2, 1, 8, 3, 3, 8, 1, 3]), _offsets(0, 3, 3, 5, 9, 10)),
    (torch.tensor([3, 8, 1]), _offsets(0, 1)),
])  # fmt: skip
def test_a_nan_is_a_maximum_where_it_comes_first(padding: int | None, arguments: tuple[torch.Tensor, ...]) -> None:
    """Torch compares: it takes a bag's first row, then each that is larger."""
    with_end = len(arguments) == 2 and len(arguments[1]) > 2
    model = _Bags(mode="max", padding_idx=padding, include_last_offset=with_end)
    model.table.data[8, :4] = torch.nan
    expected = model(*arguments)[1].detach()
    assert expected.isnan().any()
    assert not expected.isnan().all()
    imported = mt.from_torch(torch.export.export(model, arguments))
    for layouts in _LAYOUTS:
        _, found = mt.distribute_module(imported, {"x": 2}, layouts)(*arguments)
        torch.testing.assert_close(found, expected, equal_nan=True)
    if len(arguments) == 1 or with_end:
        model.table.grad = None
        bags = model(*arguments)[1].nan_to_num()
        weighed = torch.autograd.grad(bags.sum(), model.table)[0]

        class Loss(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, *given: torch.Tensor) -> torch.Tensor:
                return self.inner(*given)[1].nan_to_num().sum()

        made = mt.gradient(mt.from_torch(torch.export.export(Loss(), arguments)))
        _, (gradient,) = mt.distribute_module(made, {"x": 2}, {"inner.table": {"x": 0}})(*arguments)
        torch.testing.assert_close(gradient, weighed)
