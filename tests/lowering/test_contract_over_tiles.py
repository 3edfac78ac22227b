"""Clause 11: a kernel over tiles gives on every mesh what it gives on one device, and what its twin over whole tensors
gives."""

import pytest
import torch

from .styles import results
from .tile_kernels import CASES

#: Meshes, and how a tensor of two dims lies on them.
LAYOUTS = [
    ({"x": 1}, {"x": 0}),
    ({"x": 2}, {"x": 0}),
    ({"x": 3}, {"x": 0}),
    ({"x": 2, "y": 2}, {"x": 0, "y": 1}),
    ({"x": 2, "y": 2}, {"x": 0, "y": 0}),
    ({"x": 2, "y": 3}, {"x": 0, "y": 0}),
]
SIZES = [(32, 12), (43, 13), (9, 5), (5, 3), (1, 1)]


def layouts_of(name, layout):
    rows = {axis: dim for axis, dim in layout.items() if dim == 0 or name not in ("weighted_sum",)}
    return {buffer: rows for buffer in CASES[name].split}


@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_twins(name, mesh, layout, sizes):
    case = CASES[name]
    inputs, layouts = case.inputs(*sizes), layouts_of(name, layout)
    expected = case.reference(*inputs)
    for kind in ("global", "tiles"):
        result = results(case.make(*sizes), kind, mesh, layouts, *inputs)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-3)
