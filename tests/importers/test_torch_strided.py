"""Operators of torch that look at the memory of a tensor."""

import pytest
import torch

import mesh_tensor as mt
from tests.importers.models import Function


def without_oneself(x):
    """Scores of rows with all others, as contrastive losses take them."""
    scores = x @ x.T
    scores.fill_diagonal_(-3.0)
    return scores.softmax(-1)


def wrapped(x):
    made = x * 2
    made.fill_diagonal_(1.0, wrap=True)
    return made


def written_twice(x, y):
    made = x + 1
    made.as_strided((3,), (5,), 1).copy_(y[:3])
    made.as_strided((2, 2), (4, 2), 1).mul_(y[:2])
    return made


def of_a_copy(x):
    return x[1:].t().clone(memory_format=torch.contiguous_format).as_strided((2, 5), (1, 2), 1)


def windows(x):
    return x.as_strided((3, 4, 2), (4, 2, 1), 2) * 3


SQUARE, LONG, LINE = torch.randn(6, 6), torch.randn(9, 3), torch.randn(6)
CASES = [
    (without_oneself, SQUARE), (wrapped, LONG), (written_twice, SQUARE, LINE), (of_a_copy, LONG), (windows, SQUARE),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case[0].__name__ for case in CASES])
def test_results_are_torchs_in_any_layout(case):
    function, *given = case
    made = mt.from_torch(torch.export.export(Function(function), tuple(given)))
    first, *_ = (param.name_hint for param in made.mod["main"].params)
    for mesh, layout in ({"x": 2}, {"x": 0}), ({"x": 3}, {"x": 1}), ({"x": 2, "y": 2}, {"x": 1, "y": 0}):
        run = mt.distribute_module(made.mod, mesh, {first: layout}, weights=made.params, poison=True)
        torch.testing.assert_close(run(*given), function(*given), rtol=1e-5, atol=1e-5)


def test_what_is_written_several_times_is_refused():
    def twice(x):
        return torch.as_strided_scatter(x, torch.ones(3, 2), (3, 2), (1, 1))

    with pytest.raises(mt.MeshTensorError, match="it writes some elements of a tensor several times"):
        mt.from_torch(torch.export.export(Function(twice), (SQUARE,)))


def test_open_sizes_are_refused():
    size = torch.export.Dim("size", min=4)
    program = torch.export.export(
        Function(lambda x: (x + 1).fill_diagonal_(0.0)), (LONG,), dynamic_shapes=[({0: size},)]
    )
    with pytest.raises(mt.MeshTensorError, match="the memory of a tensor of open sizes"):
        mt.from_torch(program)
