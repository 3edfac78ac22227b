"""Scalars that programs compute before a cut and use after it."""

import pytest
import tilelang.language as T
import torch

from kernels.sparse import searched_grouped_matmul, searched_grouped_matmul_reference
from tests.other_machines import machine

from .support import lowered, outline, run

ROWS, COLUMNS = 16, 32


def sums(how):
    """exp of a sum of rows, by what a copy brought from a place that programs find; how they do, and what changes
    then."""

    @T.prim_func
    def kernel(
        X: T.Tensor((ROWS, COLUMNS), "float32"),
        W: T.Tensor((8, 4), "float32"),
        n: T.Tensor((4,), "int32"),
        Y: T.Tensor((ROWS,), "float32"),
    ):
        with T.Kernel(4, threads=32) as bx:
            x = T.alloc_fragment((4, COLUMNS), "float32")
            w = T.alloc_shared((4,), "float32")
            s = T.alloc_fragment((4,), "float32")
            v = T.alloc_var("int32")
            v = 2
            if n[bx] > 1:
                v = v + n[bx]
            if how == "by data":
                T.copy(W[T.if_then_else(n[bx] > 1, n[bx], 0) + 2, 0], w)
            else:
                T.copy(W[v, 0], w)
            if how == "changed":
                v = v - 1
            T.copy(X[bx * 4, 0], x)
            T.reduce_sum(x, s, dim=1)
            for i in T.Parallel(4):
                s[i] = T.exp(s[i] * 0.1) * w[i]
            if how == "changed":
                for i in T.Parallel(4):
                    s[i] = s[i] + T.Cast("float32", v)
            T.copy(s, Y[bx * 4])

    return kernel


COUNTS = torch.tensor([3, 0, 5, 1], dtype=torch.int32)


def _inputs():
    return torch.randn(ROWS, COLUMNS), torch.randn(8, 4), COUNTS.clone()


def _scaled_rows(x, w, counts):
    return torch.exp(x.sum(1) * 0.1) * w[_place(counts)].reshape(-1)


def _place(counts):
    return torch.where(counts > 1, counts, 0) + 2


@pytest.mark.parametrize("how", ["by a scalar", "by data"])
def test_a_copy_at_a_computed_place_is_repeated_with_what_computes_it(how):
    x, w, counts = _inputs()
    with machine(1):
        steps = outline(lowered(sums(how), {"x": 2}, {"X": {"x": 1}}))
        assert steps[1:] == ["all_reduce(s_w1, sum, x)", "kernel(W, n, Y, s_w1.1)"]
        y = run(sums(how), {"x": 2}, {"X": {"x": 1}}, x, w, counts)
    torch.testing.assert_close(y, _scaled_rows(x, w, counts))


def test_a_copy_is_not_repeated_where_its_place_is_another_by_then():
    x, w, counts = _inputs()
    kernel = sums("changed")
    with machine(1):
        steps = outline(lowered(kernel, {"x": 2}, {"X": {"x": 1}}))
        assert steps[1:] == ["all_reduce(s_w1, sum, x)", "kernel(n, Y, w_w1, s_w1.1)"], "W comes as it was"
        y = run(kernel, {"x": 2}, {"X": {"x": 1}}, x, w, counts)
    torch.testing.assert_close(y, _scaled_rows(x, w, counts) + _place(counts).repeat_interleave(4) - 1)


def test_a_copy_is_not_repeated_where_the_data_that_say_its_place_change():
    @T.prim_func
    def kernel(
        X: T.Tensor((ROWS, COLUMNS), "float32"),
        W: T.Tensor((8, 4), "float32"),
        n: T.Tensor((4,), "int32"),
        Y: T.Tensor((ROWS,), "float32"),
    ):
        with T.Kernel(4, threads=32) as bx:
            x = T.alloc_fragment((4, COLUMNS), "float32")
            w = T.alloc_shared((4,), "float32")
            s = T.alloc_fragment((4,), "float32")
            T.copy(W[T.if_then_else(n[bx] > 1, n[bx], 0) + 2, 0], w)
            n[bx] = 1
            T.copy(X[bx * 4, 0], x)
            T.reduce_sum(x, s, dim=1)
            for i in T.Parallel(4):
                s[i] = T.exp(s[i] * 0.1) * w[i]
            T.copy(s, Y[bx * 4])

    x, w, counts = _inputs()
    with machine(1):
        changed, y = run(kernel, {"x": 2}, {"X": {"x": 1}}, x, w, counts.clone())
    assert changed.tolist() == [1, 1, 1, 1]
    torch.testing.assert_close(y, _scaled_rows(x, w, counts))


def test_what_was_bound_of_a_scalar_before_it_changed():
    @T.prim_func
    def kernel(X: T.Tensor((ROWS, COLUMNS), "float32"), n: T.Tensor((4,), "int32"), Y: T.Tensor((ROWS,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            x = T.alloc_fragment((4, COLUMNS), "float32")
            s = T.alloc_fragment((4,), "float32")
            v = T.alloc_var("int32")
            v = 0
            if n[bx] > 1:
                v = n[bx]
            first = v * 3
            v = v + 10
            T.copy(X[bx * 4, 0], x)
            T.reduce_sum(x, s, dim=1)
            for i in T.Parallel(4):
                s[i] = T.exp(s[i] * 0.1) * T.Cast("float32", first) + T.Cast("float32", v)
            T.copy(s, Y[bx * 4])

    x, counts = torch.randn(ROWS, COLUMNS), COUNTS
    with machine(1):
        steps = outline(lowered(kernel, {"x": 2}, {"X": {"x": 1}}))
        assert steps[1:] == ["all_reduce(s_w1, sum, x)", "kernel(n, Y, s_w1.1)"]
        y = run(kernel, {"x": 2}, {"X": {"x": 1}}, x, counts)
    rows = torch.where(counts > 1, counts, 0).repeat_interleave(4)
    torch.testing.assert_close(y, torch.exp(x.sum(1) * 0.1) * 3 * rows + rows + 10)


def test_a_sum_in_a_scalar_is_not_computed_again():
    @T.prim_func
    def kernel(X: T.Tensor((ROWS, COLUMNS), "float32"), Y: T.Tensor((ROWS,), "float32")):
        with T.Kernel(ROWS, threads=32) as bx:
            s = T.alloc_var("float32")
            s = 0.0
            for k in T.serial(COLUMNS):
                s = s + X[bx, k]
            Y[bx] = T.exp(s * 0.1)

    x = torch.randn(ROWS, COLUMNS)
    with machine(1):
        steps = outline(lowered(kernel, {"x": 2}, {"X": {"x": 1}}))
        assert steps == ["kernel(X, s_w1)", "all_reduce(s_w1, sum, x)", "kernel(Y, s_w1.1)"]
        torch.testing.assert_close(run(kernel, {"x": 2}, {"X": {"x": 1}}, x), torch.exp(x.sum(1) * 0.1))


@pytest.mark.parametrize("devices", [2, 3])
def test_a_group_that_programs_search_for(devices):
    """Each program finds its group before the loop over k, and asks how long it is after it."""
    sizes = {"groups": 3, "rows": 50, "N": 20, "K": 48}
    kernel = searched_grouped_matmul(**sizes)
    a, b = torch.randn(50, 48), torch.randn(3, 48, 20)
    counts = torch.tensor([17, 0, 33], dtype=torch.int32)
    layouts = {"A": {"x": 1}, "B": {"x": 1}}
    with machine(1):
        steps = outline(lowered(kernel, {"x": devices}, layouts))
        assert [step.split("(")[0] for step in steps] == ["kernel", "all_reduce", "kernel"]
        got = run(kernel, {"x": devices}, layouts, a, b, counts)
    torch.testing.assert_close(got, searched_grouped_matmul_reference(a, b, counts))
