"""Loops that nothing counts: they run on every device as often as their condition holds for what the device has."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.neighbourhoods import escape_times, escape_times_reference
from tests.other_machines import machine

from .every_layout import check
from .support import lowered, outline

MESHES = [{"x": 3}, {"x": 2, "y": 2}]


@pytest.mark.parametrize("dim", [0, 1])
def test_every_point_has_a_loop_of_its_own(dim):
    with machine(1):
        made = lowered(escape_times(5, 6), {"x": 3}, {"C": {"x": dim}, "out": {"x": dim}})
    assert outline(made) == ["kernel(C, out)"]


def test_in_every_layout():
    points = torch.rand(5, 6, 2) * 3 - 2
    check(escape_times(5, 6), [points], escape_times_reference(points), MESHES)


def test_padding_ends_no_later_than_data():
    """Compiled, what is in a tile behind the dim's end is whatever was there: a loop on it may never end."""
    points = torch.rand(5, 6, 2) * 3 - 2
    func = mt.annotate(escape_times(5, 6), {"x": 4}, {"C": {"x": 0}, "out": {"x": 0}})
    assert torch.equal(mt.compile(func, target="c")(points), escape_times_reference(points))


def test_a_list_that_is_followed():
    """The table of links, and that of the values, may be split by rows, too, as every index that is data."""

    @T.prim_func
    def kernel(
        Next: T.Tensor((8,), "int32"),
        V: T.Tensor((8, 6), "float32"),
        First: T.Tensor((5,), "int32"),
        Y: T.Tensor((5, 6)),
    ):
        with T.Kernel(5, threads=32) as b:
            total, at = T.alloc_fragment((6,), "float32"), T.alloc_var("int32")
            T.clear(total)
            at = First[b]
            while at >= 0:
                for j in T.Parallel(6):
                    total[j] += V[at, j]
                at = Next[at]
            T.copy(total, Y[b, 0])

    following, values = [3, 0, 5, -1, 1, -1, 2, 4], torch.randn(8, 6)
    expected = torch.zeros(5, 6)
    first = [7, 6, 1, 0, 2]
    for row, at in enumerate(first):
        while at >= 0:
            expected[row] += values[at]
            at = following[at]
    links = torch.tensor(following, dtype=torch.int32), values, torch.tensor(first, dtype=torch.int32)
    check(kernel, links, expected, MESHES)
    with machine(1):
        rows = {"First": {"x": 0}, "Y": {"x": 0}}
        assert outline(lowered(kernel, {"x": 2}, rows)) == ["kernel(Next, V, First, Y)"]
        columns = {"V": {"x": 1}, "Y": {"x": 1}}
        assert outline(lowered(kernel, {"x": 2}, columns)) == ["kernel(Next, V, First, Y)"]


def test_a_condition_on_a_whole_row_keeps_the_row_whole():
    """Newton's iteration until all of a row have converged: devices may not stop at different times."""

    @T.prim_func
    def kernel(A: T.Tensor((5, 6), "float32"), Y: T.Tensor((5, 6), "float32"), Count: T.Tensor((5,), "int32")):
        with T.Kernel(5, threads=32) as b:
            x, wrong = T.alloc_fragment((6,), "float32"), T.alloc_fragment((6,), "float32")
            worst, count = T.alloc_fragment((1,), "float32"), T.alloc_var("int32")
            T.copy(A[b, 0], x)
            count = 0
            worst[0] = 1.0
            while T.And(worst[0] > 1e-2, count < 50):
                for j in T.Parallel(6):
                    wrong[j] = T.abs(x[j] * x[j] - A[b, j])
                T.reduce_max(wrong, worst, dim=0)
                for j in T.Parallel(6):
                    x[j] = 0.5 * (x[j] + A[b, j] / x[j])
                count = count + 1
            T.copy(x, Y[b, 0])
            Count[b] = count

    a = torch.rand(5, 6) * 4 + 0.5
    roots, counts = a.clone(), torch.zeros(5, dtype=torch.int32)
    for row in range(5):
        worst = 1.0
        while worst > 1e-2:
            worst = float((roots[row] ** 2 - a[row]).abs().max())
            roots[row] = (roots[row] + a[row] / roots[row]) / 2
            counts[row] += 1
    check(kernel, [a], (roots, counts), MESHES)
    factors = mt.sharding_rule(kernel).factors
    assert [kind for kind in factors.values() if kind == "parallel"] == ["parallel"]
    assert any("worst" in kind or "x" in kind for kind in factors.values() if kind.startswith("whole"))
