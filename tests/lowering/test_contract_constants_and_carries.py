"""Clauses 7 and 8: constants keep their global meaning; values that a loop carries keep their factor whole."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.softmax import online_softmax, softmax_reference, three_pass_softmax

from .support import assert_right, local_kernels, lowered, outline, text


def mean(M=10, N=24, block=4):
    """B[m] = mean of A[m, :], divided by the N that is written into the kernel."""

    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M,), "float32")):
        with T.Kernel(T.ceildiv(M, block), threads=32) as bx:
            a = T.alloc_fragment((block, N), "float32")
            b = T.alloc_fragment((block,), "float32")
            T.copy(A[bx * block, 0], a)
            T.reduce_sum(a, b, dim=1)
            for i in T.Parallel(block):
                b[i] = b[i] / N
            T.copy(b, B[bx * block])

    return kernel


def test_the_n_of_a_mean_stays():
    first, second = local_kernels(lowered(mean(), {"x": 3}, {"A": {"x": 1}}))
    assert "T.float32(24.0)" in text(second), "not the 8 of a tile"
    assert "/" not in text(first)


def test_a_constant_in_a_bounds_test_stays():
    @T.prim_func
    def kernel(A: T.Tensor((24,), "float32"), B: T.Tensor((24,), "float32")):
        with T.Kernel(3, threads=8) as bx:
            for i in T.Parallel(8):
                B[bx * 8 + i] = T.if_then_else(bx * 8 + i < 17, A[bx * 8 + i], -1.0)

    layouts = {"A": {"x": 0}, "B": {"x": 0}}
    (local,) = local_kernels(lowered(kernel, {"x": 3}, layouts))
    assert "< 17" in text(local)
    kept = torch.arange(24) < 17
    assert_right(kernel, {"x": 3}, layouts, [torch.randn(24)], lambda a: torch.where(kept, a, -1.0))


@pytest.mark.parametrize("mesh", [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 2, "y": 3}], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", [(10, 24), (3, 7)], ids=str)
def test_mean_numbers(mesh, dim, sizes):
    layouts = {"A": dict.fromkeys(mesh, dim), "B": {"x": 0}}
    assert_right(mean(*sizes), mesh, layouts, [torch.randn(sizes)], lambda a: a.double().mean(1))


# -- clause 8 ----------------------------------------------------------------------------------------------------------


def test_a_running_maximum_and_its_sum_are_exchanged_where_that_is_less():
    """Else their factor is whole."""
    rows, layouts = 16, {"X": {"x": 1}, "Y": {"x": 1}}
    assert mt.sharding_rule(online_softmax(rows, 64, 8, 16)).factors["n"] == "max, sum"
    short = outline(lowered(online_softmax(rows, 64, 8, 16), {"x": 2}, layouts))
    assert short == ["all_gather(X, dim 1, x)", "kernel(X.1, Y)", "slice(Y, dim 1, x)"]
    long = outline(lowered(online_softmax(rows, 65536, 8, 1024), {"x": 2}, layouts))
    kinds = [step.split("(")[0] for step in long]
    assert kinds == ["kernel", "all_reduce", "kernel", "all_reduce", "kernel"]


def test_its_other_factor_is_split_all_the_same():
    result = lowered(online_softmax(16, 64, 8, 16), {"x": 2}, {"X": {"x": 0}, "Y": {"x": 0}})
    assert outline(result) == ["kernel(X, Y)"]


def test_a_softmax_in_passes_is_split_and_cut():
    result = lowered(three_pass_softmax(16, 64, 8, 16), {"x": 2}, {"X": {"x": 1}, "Y": {"x": 1}}, strict=True)
    kinds = [step.split("(")[0] for step in outline(result)]
    assert kinds == ["kernel", "all_reduce", "kernel", "all_reduce", "kernel"]
    ops = [step.rsplit(", ", 2)[1] for step in outline(result) if step.startswith("all_reduce")]
    assert ops == ["max", "sum"]


def running(update, M=8, N=24):
    """B[m] = the state after update(state, A[m, n]) for every n in order."""

    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M,), "float32")):
        with T.Kernel(2, threads=32) as bx:
            a = T.alloc_fragment((4, N), "float32")
            state = T.alloc_fragment((4,), "float32")
            T.copy(A[bx * 4, 0], a)
            T.clear(state)
            for k in T.serial(N):
                for i in T.Parallel(4):
                    state[i] = update(state[i], a[i, k])
            T.copy(state, B[bx * 4])

    return kernel


def decayed(a):
    state = torch.zeros(a.shape[0])
    for column in a.unbind(1):
        state = state * 0.5 + column
    return state


def clipped(a):
    state = torch.zeros(a.shape[0])
    for column in a.unbind(1):
        state = torch.clamp(state + column, max=1.0)
    return state


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("update", "reference"),
    [(lambda s, v: s * 0.5 + v, decayed), (lambda s, v: T.min(s + v, 1.0), clipped)],
    ids=["decayed", "clipped"],
)
def test_carried_numbers(update, reference, dim, devices):
    func = running(update)
    if dim == 1:
        assert not lowered(func, {"x": devices}, {"A": {"x": 1}}).whole
    assert_right(func, {"x": devices}, {"A": {"x": dim}}, [torch.randn(8, 24)], reference)


@pytest.mark.parametrize("make", [online_softmax, three_pass_softmax])
@pytest.mark.parametrize("layouts", [{"X": {"x": 1}, "Y": {"x": 1}}, {"X": {"x": 0, "y": 1}, "Y": {"x": 0}}], ids=str)
@pytest.mark.parametrize("sizes", [(16, 48), (9, 21)], ids=str)
def test_softmax_numbers(make, layouts, sizes):
    assert_right(make(*sizes, 8, 16), {"x": 2, "y": 3}, layouts, [torch.randn(sizes)], softmax_reference)
