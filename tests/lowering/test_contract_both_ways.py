"""Loops of one kernel that each carry a state in order, from the first position on or from the last: every device goes
on in each of them where others end."""

import pytest
import torch

from .scan_kernels import both_ways, both_ways_in_torch
from .test_contract_handed_on import compiled

SECOND = ("reads the results", "reads the state", "goes on", "starts where the first ends", "adds to the next")


def layouts(*axes):
    return {name: dict.fromkeys(axes, 0) for name in "XFB"}


def check(kernel, steps, second="apart"):
    x, f, b = torch.randn(3, steps, 8).unbind()
    expected = both_ways_in_torch(x, f, second)
    kernel(x, f, b)
    torch.testing.assert_close((f, b), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("mesh", "steps"), [({"x": 2}, 8), ({"x": 3}, 7), ({"x": 2, "y": 2}, 9), ({"x": 5}, 13)])
def test_one_loop_from_the_start_and_one_from_the_end(mesh, steps):
    kernel = compiled(both_ways(steps, 8), mesh, layouts(*mesh))
    assert "X.1" not in kernel.explain(), "X is not gathered"
    check(kernel, steps)


@pytest.mark.parametrize("second", SECOND)
def test_what_one_knows_of_the_other(second):
    check(compiled(both_ways(9, 8, second), {"x": 2}, layouts("x")), 9, second)


def test_a_third_axis_is_free():
    func = both_ways(8, 8)
    kernel = compiled(func, {"x": 2, "c": 2}, {name: {"x": 0, "c": 1} for name in "XFB"})
    assert "X.1" not in kernel.explain()
    check(kernel, 8)
