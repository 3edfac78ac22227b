"""Sums that a loop scales to the maximum of one block, whichever was the last: combined where that cancels."""

import math

import pytest
import torch

from .reference_kernels import WRONG, last_block
from .state_kernels import online_reference
from .test_contract_states import alone, close, columns, compiled


def data(size, spread=3.0):
    """And all blocks."""
    return torch.randn(8, size) * spread, torch.randn(size, 16), torch.ones(2, -(-size // 8), dtype=torch.bool)


@pytest.mark.parametrize(("mesh", "size"), [({"x": 3}, 47), ({"x": 2, "y": 2}, 64), ({"x": 10}, 71)])
def test_any_block_serves(mesh, size):
    """Uneven tiles, a last block of which few count, and devices without a block, too."""
    x, v, s = data(size)
    kernel = compiled(last_block(8, size, 16), mesh, columns(*mesh))
    assert "all_gather" not in kernel.explain()
    close(kernel(x, v, s), online_reference(x, v))


@pytest.mark.parametrize("devices", [2, 6])
@pytest.mark.parametrize("seen", [[(1, 0, 1, 1, 0, 1), (0, 0, 1, 0, 0, 0)], [(0, 1, 0, 0, 0, 1), (0, 0, 0, 0, 0, 0)]])
def test_blocks_that_are_skipped(seen, devices):
    """Devices of which none counts; rows of which none does."""
    x, v, _ = data(48)
    func = last_block(8, 48, 16, skips=True)
    kernel = compiled(func, {"x": devices}, columns("x"))
    assert "all_gather" not in kernel.explain()
    s = torch.tensor(seen, dtype=torch.bool)
    close(kernel(x, v, s), alone(func, x, v, s))


@pytest.mark.parametrize("masked", [(0, 5), (0, 8), (3, 12), (8, 16), (12, 24), (40, 64), (0, 64)])
def test_blocks_without_a_maximum_are_nan_as_on_one_device(masked):
    x, v, s = data(64)
    func = last_block(8, 64, 16, masked=masked)
    kernel = compiled(func, {"x": 4}, columns("x"))
    assert "all_gather" not in kernel.explain()
    close(kernel(x, v, s), alone(func, x, v, s))


def test_tiles_are_whole_blocks():
    """Blocks of other columns might have no maximum where those of the kernel all have one: tiles of 6 become its
    blocks of 8."""
    x, v, s = data(48)
    func = last_block(8, 48, 16, masked=(0, 6))
    kernel = compiled(func, {"x": 8}, columns("x"))
    assert "tiles of dim 1 are whole blocks of 8 (S[1] -> S[1]; B[1]8)" in kernel.explain()
    close(kernel(x, v, s), alone(func, x, v, s))


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("at", [3, 40])
def test_special_values_are_where_they_are_on_one_device(value, at):
    x, v, s = data(64)
    x[2, at] = value
    func = last_block(8, 64, 16)
    close(compiled(func, {"x": 4}, columns("x"))(x, v, s), alone(func, x, v, s))


@pytest.mark.parametrize("steps", [(-80.0, 0.0, 80.0, 0.0), (80.0, 0.0, -5.0, 60.0), (84.0, 0.0, 45.0, 88.0)])
def test_maxima_that_are_far_apart(steps):
    """Where the next block's maximum is far lower, sums grow by as much; nothing of that is lost between devices."""
    x, v, s = data(64, spread=0.5)
    x += torch.tensor(steps).repeat_interleave(16)
    func = last_block(8, 64, 16)
    one = alone(func, x, v, s)
    assert all(result.isfinite().all() for result in one)
    for devices in (2, 4):
        kernel = compiled(func, {"x": devices}, columns("x"))
        close(kernel(x, v, s), one, tolerance=2e-4)


@pytest.mark.parametrize(("wrong", "skips"), [(wrong, i % 2 == 0) for i, wrong in enumerate(WRONG)])
def test_what_tells_the_last_block_stays_whole(wrong, skips):
    x, v, s = data(64, spread=1.0)
    func = last_block(8, 64, 16, wrong=wrong, skips=skips)
    kernel = compiled(func, {"x": 2}, columns("x"))
    assert "all_gather" in kernel.explain()
    close(kernel(x, v, s), alone(func, x, v, s))


def test_sums_may_not_start_far_above_their_maxima():
    """From a start of 0 every device would have to come down, at once, to what the blocks before led to."""
    x, v, s = data(64, spread=1.0)
    x -= torch.arange(64) * 2.0
    func = last_block(8, 64, 16, start=0.0)
    kernel = compiled(func, {"x": 2}, columns("x"))
    assert "all_gather" in kernel.explain()
    close(kernel(x, v, s), alone(func, x, v, s))
