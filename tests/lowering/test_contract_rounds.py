"""Loops of few iterations, each of which reduces something over a split dim and goes on with what came of it: the
reductions are completed round by round, and nothing is gathered."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.rounds import balanced, balanced_reference, top_k, top_k_reference
from tests.other_machines import AT_ONCE, planned_for

from .support import lowered, outline, run


@pytest.fixture(autouse=True)
def _no_start():
    """Collectives start at once, so that small tensors are worth them."""
    with planned_for(AT_ONCE):
        yield


def moved(func, mesh, layouts):
    """The kinds of collectives, with `strict=True`."""
    return {step.partition("(")[0] for step in outline(lowered(func, mesh, layouts, strict=True))} - {"kernel"}


@pytest.mark.parametrize(
    ("mesh", "layouts"),
    [
        ({"x": 2}, {"A": {"x": 1}}),
        ({"x": 3}, {"A": {"x": 1}, "High": {"x": 1}}),
        ({"x": 2, "y": 2}, {"A": {"x": 1, "y": 0}, "At": {"y": 0}}),
        ({"x": 2, "y": 3}, {"A": {"x": 1, "y": 1}}),
    ],
)
def test_the_largest_of_split_rows(mesh, layouts):
    a = torch.randn(21, 37)
    a[:, 34:] = a[:, :3]  # the same on the first and the last device
    func = top_k(21, 37, 3)
    assert "all_gather" not in moved(func, mesh, {"A": layouts["A"]})
    for result, wanted in zip(run(func, mesh, layouts, a), top_k_reference(a, 3), strict=True):
        assert torch.equal(result, wanted)


def test_fewer_columns_than_devices():
    a = torch.randn(5, 3)
    for result, wanted in zip(run(top_k(5, 3, 2), {"x": 5}, {"A": {"x": 1}}, a), top_k_reference(a, 2), strict=True):
        assert torch.equal(result, wanted)


def test_no_device_receives_more_than_candidates_take():
    """Each completes k maxima of M rows, and k places, the last ones of which with those of the results."""
    M, N, k = 64, 512, 4
    kernel = mt.compile(mt.annotate(top_k(M, N, k), mt.Mesh({"x": 2}), {"A": {"x": 1}}), target="interpret")
    assert sum(step.bytes for step in kernel.program.collectives) == 4 * M * (k + k - 1 + k)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("n", [8, 7])
def test_rows_and_columns_in_turns(dim, n):
    a = torch.randn(3, n, n)
    split = {"A": {"x": dim}, "B": {"x": dim}}
    assert moved(balanced(3, n), {"x": 3}, split) == {"all_reduce"}
    torch.testing.assert_close(run(balanced(3, n), {"x": 3}, split, a), balanced_reference(a), rtol=1e-5, atol=1e-6)


@T.prim_func
def from_the_second_on(A: T.Tensor((6, 10)), S: T.Tensor((6, 5)), Z: T.Tensor((6,))):
    """Places of a result between which sums are completed, and one that nothing is stored in; two of them go on."""
    with T.Kernel(2, threads=32) as b:
        x = T.alloc_fragment((3, 10), "float32")
        total = T.alloc_fragment((3,), "float32")
        T.copy(A[b * 3, 0], x)
        for r in T.serial(1, 4):
            T.reduce_sum(x, total, dim=1)
            for i, j in T.Parallel(3, 10):
                x[i, j] = x[i, j] * total[i] + T.cast(r, "float32")
            for i in T.Parallel(3):
                S[b * 3 + i, r] = total[i]
        T.reduce_sum(x, total, dim=1)
        for i in T.Parallel(3):
            S[b * 3 + i, 4] = total[i]
            Z[b * 3 + i] = total[i] * total[i]


def test_places_of_results_between_rounds():
    x = torch.randn(6, 10) * 0.3
    wanted, before = [torch.full((6,), 7.0)], x
    for r in range(1, 4):
        wanted.append(before.sum(1))
        before = before * wanted[-1][:, None] + r
    wanted.append(before.sum(1))
    given = torch.full((6, 5), 7.0)
    assert "all_gather" not in moved(from_the_second_on, {"x": 3}, {"A": {"x": 1}})
    sums, squares = run(from_the_second_on, {"x": 3}, {"A": {"x": 1}}, x, given, torch.zeros(6))
    torch.testing.assert_close(sums, torch.stack(wanted, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(squares, wanted[-1] ** 2, rtol=1e-5, atol=1e-5)


@T.prim_func
def read_again(A: T.Tensor((6, 10)), S: T.Tensor((6, 2)), Z: T.Tensor((6,))):
    """A result that is read again is completed once, wherever that is."""
    with T.Kernel(2, threads=32) as b:
        x = T.alloc_fragment((3, 10), "float32")
        total = T.alloc_fragment((3,), "float32")
        T.copy(A[b * 3, 0], x)
        for r in T.serial(2):
            T.reduce_sum(x, total, dim=1)
            for i in T.Parallel(3):
                S[b * 3 + i, r] = total[i]
            for i, j in T.Parallel(3, 10):
                x[i, j] = x[i, j] * total[i]
        for i in T.Parallel(3):
            Z[b * 3 + i] = S[b * 3 + i, 0] + S[b * 3 + i, 1]


def test_results_that_are_read_again():
    x = torch.randn(6, 10)
    first = x.sum(1)
    second = (x * first[:, None]).sum(1)
    sums, both = run(read_again, {"x": 3}, {"A": {"x": 1}}, x, torch.zeros(6, 2), torch.zeros(6))
    torch.testing.assert_close(sums, torch.stack([first, second], 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(both, first + second, rtol=1e-5, atol=1e-5)


@T.prim_func
def from_the_last_column_on(A: T.Tensor((6, 3)), W: T.Tensor((6, 10)), B: T.Tensor((6,))):
    """Rounds that take a parameter's places from the last to the first."""
    with T.Kernel(2, threads=32) as b:
        x = T.alloc_fragment((3, 10), "float32")
        total = T.alloc_fragment((3,), "float32")
        T.copy(W[b * 3, 0], x)
        for r in T.serial(3):
            T.reduce_sum(x, total, dim=1)
            for i, j in T.Parallel(3, 10):
                x[i, j] = x[i, j] * 0.5 - total[i] * 0.1 + A[b * 3 + i, 2 - r]
        T.reduce_sum(x, total, dim=1)
        T.copy(total, B[b * 3])


@pytest.mark.parametrize("layouts", [{"W": {"x": 1}}, {"A": {"x": 1}}])
def test_rounds_from_the_last_place_to_the_first(layouts):
    a, x = torch.randn(6, 3), torch.randn(6, 10)
    wanted = x
    for r in range(3):
        wanted = wanted * 0.5 - wanted.sum(1, keepdim=True) * 0.1 + a[:, 2 - r, None]
    result = run(from_the_last_column_on, {"x": 3}, layouts, a, x)
    torch.testing.assert_close(result, wanted.sum(1), rtol=1e-5, atol=1e-5)


def stopped(most, stops):
    """Rows that are divided by their sums; with `stops`, until the first one is small."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 6)), B: T.Tensor((4, 6))):
        with T.Kernel(1, threads=32):
            x = T.alloc_fragment((4, 6), "float32")
            total = T.alloc_fragment((4,), "float32")
            T.copy(A, x)
            for _r in T.serial(most):
                T.reduce_sum(x, total, dim=1)
                for i, j in T.Parallel(4, 6):
                    x[i, j] = x[i, j] / total[i] + 0.5
                if stops and total[0] < 5.0:
                    T.loop_break()
            T.copy(x, B)

    return kernel


@pytest.mark.parametrize(("most", "stops"), [(3, True), (40, False)])
def test_loops_that_are_left_or_long_stay_whole(most, stops):
    x = torch.rand(4, 6) + 1
    wanted = x
    for _ in range(most):
        total = wanted.sum(1)
        wanted = wanted / total[:, None] + 0.5
        if stops and total[0] < 5:
            break
    torch.testing.assert_close(run(stopped(most, stops), {"x": 2}, {"A": {"x": 1}}, x), wanted)
    with pytest.raises(mt.MeshTensorError, match="buffer 'A' dim 1 on axis 'x' needs replication"):
        lowered(stopped(most, stops), {"x": 2}, {"A": {"x": 1}}, strict=True)
