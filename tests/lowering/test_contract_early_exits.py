"""Loops that are left early: what stands in them may not run, so nothing in them certainly writes."""

import tilelang.language as T
import torch

import mesh_tensor as mt

from .every_layout import check


def test_a_loop_that_ends_before_its_store():
    @T.prim_func
    def kernel(A: T.Tensor((9,)), C: T.Tensor((9,))):
        with T.Kernel(1, threads=32):
            for i in T.serial(9):
                if A[i] > 1:
                    T.loop_break()
                C[i] = A[i]

    a = torch.tensor([0.5, -1, 1, 2, 0, 0, 3, 0, 0])
    check(kernel, [a], torch.where(torch.arange(9) < 3, a, 0))
    assert list(mt.sharding_rule(kernel).outputs) == ["C"]


def test_a_loop_that_ends_after_its_store():
    @T.prim_func
    def kernel(A: T.Tensor((9,)), C: T.Tensor((9,))):
        with T.Kernel(1, threads=32):
            for i in T.serial(9):
                C[i] = A[i]
                if A[i] > 1:
                    break

    a = torch.tensor([0.5, -1, 1, 2, 0, 0, 3, 0, 0])
    check(kernel, [a], torch.where(torch.arange(9) < 4, a, 0))


def test_iterations_that_are_given_up():
    @T.prim_func
    def kernel(A: T.Tensor((9,)), C: T.Tensor((9,))):
        with T.Kernel(1, threads=32):
            for i in T.serial(9):
                if A[i] > 1:
                    continue
                C[i] = A[i]

    a = torch.tensor([0.5, -1, 1, 2, 0, 0, 3, 0, 0])
    check(kernel, [a], torch.where(a > 1, 0, a))


def test_programs_that_return():
    @T.prim_func
    def kernel(A: T.Tensor((9,)), C: T.Tensor((9,))):
        with T.Kernel(9, threads=32) as bx:
            if A[bx] > 1:
                T.thread_return()
            C[bx] = A[bx]

    a = torch.tensor([0.5, -1, 1, 2, 0, 0, 3, 0, 0])
    check(kernel, [a], torch.where(a > 1, 0, a))


def test_only_the_loop_that_is_left_is_uncertain():
    @T.prim_func
    def kernel(A: T.Tensor((5, 9)), C: T.Tensor((5,)), D: T.Tensor((5,))):
        with T.Kernel(5, threads=32) as bx:
            total = T.alloc_var("float32", init=0.0)
            C[bx] = 3.0
            for i in T.serial(9):
                if A[bx, i] > 1:
                    T.loop_break()
                D[bx] = A[bx, i]
                total += A[bx, i]
            C[bx] = total

    a = torch.randn(5, 9)
    runs = (a > 1).cumsum(1) == 0
    count = runs.sum(1)
    last = torch.where(count > 0, a.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0], 0)
    check(kernel, [a], ((a * runs).sum(1), last))
    kernel = mt.compile(mt.annotate(kernel, mt.Mesh({"x": 2}), {"A": {"x": 0}}), target="interpret")
    kept = {p.name: p.kept for p in kernel.program.parameters}
    assert kept == {"A": False, "C": False, "D": True}
