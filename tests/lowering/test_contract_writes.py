"""Kernels that were once lowered to wrong results because of what they write, or leave: right, or refused."""

import tilelang.language as T
import torch

import mesh_tensor as mt

from .every_layout import check


def test_a_while_loop_writes_its_output():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), C: T.Tensor((8,))):
        with T.Kernel(8, threads=32) as bx:
            n = T.alloc_var("int32", init=0)
            while n < 3:
                C[bx] = A[bx] + T.cast(n, "float32")
                n = n + 1

    a = torch.randn(8)
    check(kernel, [a], a + 2)
    assert list(mt.sharding_rule(kernel).outputs) == ["C"]


def test_elements_that_a_loop_may_leave_out_keep_their_content():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), C: T.Tensor((8,))):
        with T.Kernel(8, threads=32) as bx:
            for j in T.serial(bx):
                C[bx] = A[bx] + T.cast(j, "float32")

    a = torch.randn(8)
    expected = a + torch.arange(8) - 1
    expected[0] = 0
    check(kernel, [a], expected)


def test_an_atomic_that_gives_the_previous_value_writes():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), C: T.Tensor((8,)), D: T.Tensor((1,))):
        with T.Kernel(8, threads=32) as bx:
            previous = T.atomic_add(D[0], A[bx], return_prev=True)
            C[bx] = previous

    rule = mt.sharding_rule(kernel)
    assert list(rule.outputs) == ["C", "D"]
    assert all(kind.startswith("whole") for kind in rule.factors.values())


def test_an_output_whose_content_one_iteration_leaves_to_the_next():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), B: T.Tensor((8,)), C: T.Tensor((1,))):
        with T.Kernel(1, threads=32):
            for i in T.serial(8):
                B[i] = A[i] + C[0]
                C[0] = 5.0

    a = torch.randn(8)
    expected = a + 5
    expected[0] = a[0]
    check(kernel, [a], (expected, torch.full((1,), 5.0)))


def test_an_output_that_every_iteration_changes():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), B: T.Tensor((8,)), C: T.Tensor((1,))):
        with T.Kernel(1, threads=32):
            C[0] = 0.5
            for i in T.serial(8):
                B[i] = A[i]
                C[0] = C[0] * C[0] + 0.25

    a, c = torch.randn(8), 0.5
    for _ in range(8):
        c = c * c + 0.25
    check(kernel, [a], (a, torch.full((1,), c)))
