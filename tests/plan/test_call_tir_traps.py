"""TIR functions that are easily distributed wrong, split along every dim of every operand: right, whatever it takes."""

from __future__ import annotations

import itertools

import pytest
import torch

import mesh_tensor as mt

from .step_modules import collectives
from .tir_modules import Traps, calling

NAMES = sorted(var.name_hint for var in Traps.functions)
# Where a split of the operand's dim needs a collective: what must not happen silently, and what may not be gathered.
EXPECTED = {
    ("bias_start", "A", 1): ["all_reduce"],
    ("bias_start", "b", 0): [],
    ("flipped", "A", 0): ["all_gather"],
    ("gathered", "A", 0): ["all_gather"],
    ("gathered", "rows", 0): [],
    ("index_as_value", "A", 0): [],
    ("index_as_value", "A", 1): [],
    ("joined", "B", 1): [],
    ("joined_in_two", "A", 1): [],
    ("largest", "A", 1): ["all_reduce"],
    ("padded_exp", "A", 1): ["all_reduce"],
    ("reduce_then_use", "A", 1): ["all_gather"],
    ("regrouped", "A", 0): ["all_gather"],
    ("shifted", "A", 0): ["halo"],
    ("shifted", "A", 1): [],
    ("sum_of_indices", "A", 0): ["all_reduce"],
    ("symmetric", "A", 0): ["all_gather"],
    ("through_cast", "A", 1): ["all_gather"],
    ("tiled", "A", 0): [],
    ("tiled", "A", 1): [],
    ("to_scalar", "A", 0): ["all_reduce"],
}

# Where tiles are small enough that margins are less than the whole.
MARGINS = {("joined", "A", 0, 3): ["halo", "halo"]}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_right_along_every_dim(name, size):
    mod = calling(Traps[name], name)
    data = operands(mod)
    expected = mt.run_sequential(mod, data)
    for param, dim in places(mod):
        made = mt.distribute_module(mod, {"x": size}, {param: {"x": dim}}, target="interpret")
        close(made(*data), expected)
        if (name, param, dim) in EXPECTED:
            assert collectives(made) == MARGINS.get((name, param, dim, size), EXPECTED[name, param, dim])


@pytest.mark.parametrize("name", NAMES)
def test_right_on_two_axes(name):
    mod = calling(Traps[name], name)
    data = operands(mod)
    expected = mt.run_sequential(mod, data)
    for (first, i), (second, j) in itertools.combinations(places(mod), 2):
        shardings = {first: {"x": i}, second: {"y": j}} if first != second else {first: {"x": i, "y": j}}
        made = mt.distribute_module(mod, {"x": 2, "y": 2}, shardings, target="interpret")
        close(made(*data), expected)


@pytest.mark.parametrize("name", ["bias_start", "index_as_value", "largest", "to_scalar"])
def test_right_when_compiled(name):
    mod = calling(Traps[name], name)
    data = operands(mod)
    for param, dim in places(mod):
        made = mt.distribute_module(mod, {"x": 3}, {param: {"x": dim}}, target="c")
        close(made(*data), mt.run_sequential(mod, data))


@pytest.mark.parametrize("name", NAMES)
def test_results_may_be_split(name):
    mod = calling(Traps[name], name)
    data = operands(mod)
    expected = mt.run_sequential(mod, data)
    for dim in range(expected.ndim):
        made = mt.distribute_module(mod, {"x": 2}, {"result": {"x": dim}}, target="interpret")
        close(made(*data), expected)


def operands(mod) -> list[torch.Tensor]:
    """Random operands; indices are below 7."""
    torch.manual_seed(7)
    data = []
    for param in mod["main"].params:
        shape = [int(size) for size in param.struct_info.shape]
        whole = param.struct_info.dtype == "int32"
        data.append(torch.randint(0, 7, shape, dtype=torch.int32) if whole else torch.randn(shape))
    return data


def places(mod) -> list[tuple[str, int]]:
    """Every dim of every operand."""
    return [(param.name_hint, dim) for param in mod["main"].params for dim in range(param.struct_info.ndim)]


def close(made: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the order in which is summed."""
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
