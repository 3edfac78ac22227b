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


def left_early(rows=6, width=9):
    """The sum of each row up to a number that ends it, without those that are skipped."""

    @T.prim_func
    def kernel(A: T.Tensor((rows, width), "float32"), Y: T.Tensor((rows,), "float32"), Z: T.Tensor((rows, width))):
        with T.Kernel(rows, threads=32) as b:
            total = T.alloc_var("float32")
            total = 0.0
            for i in T.serial(width):
                if A[b, i] < -1.0:
                    break
                if A[b, i] < 0.0:
                    continue
                total += A[b, i]
                Z[b, i] = total
            Y[b] = total

    return kernel


def test_rows_that_are_left_each_for_itself_are_split():
    func = left_early()
    assert str(mt.sharding_rule(func)) == "A[m, *] -> Y[m], Z[m, *]; m parallel"
    a = torch.randn(6, 9)
    sums, prefixes = torch.zeros(6), torch.zeros(6, 9)
    for row in range(6):
        for column in range(9):
            if a[row, column] < -1:
                break
            if a[row, column] >= 0:
                sums[row] += a[row, column]
                prefixes[row, column] = sums[row]
    check(func, [a], (sums, prefixes))


def test_blocks_that_are_skipped_are_no_reason_to_gather():
    """A product over the blocks that a mask names: rows, columns and what is summed over may be split."""

    @T.prim_func
    def kernel(A: T.Tensor((8, 12)), B: T.Tensor((12, 6)), M: T.Tensor((2, 3), "int32"), Y: T.Tensor((8, 6))):
        with T.Kernel(2, threads=32) as b:
            a, w = T.alloc_shared((4, 4), "float32"), T.alloc_shared((4, 6), "float32")
            c = T.alloc_fragment((4, 6), "float32")
            T.clear(c)
            for k in T.Pipelined(3, num_stages=2):
                if M[b, k] == 0:
                    continue
                T.copy(A[b * 4, k * 4], a)
                T.copy(B[k * 4, 0], w)
                T.gemm(a, w, c)
            T.copy(c, Y[b * 4, 0])

    assert str(mt.sharding_rule(kernel)) == "A[m, k], B[k, n], M[*, *] -> Y[m, n]; m, n parallel; k sum"
    a, b, mask = torch.randn(8, 12), torch.randn(12, 6), torch.tensor([[1, 0, 1], [0, 1, 1]], dtype=torch.int32)
    check(kernel, [a, b, mask], (a * mask.repeat_interleave(4, 0).repeat_interleave(4, 1)) @ b)


def test_what_depends_on_where_a_loop_was_left_is_not_split():
    """Columns are added up until their sum is large: that depends on all of them."""

    @T.prim_func
    def kernel(A: T.Tensor((6, 5, 4), "float32"), Y: T.Tensor((6, 4), "float32")):
        with T.Kernel(6, threads=32) as b:
            s, total = T.alloc_fragment((4,), "float32"), T.alloc_fragment((1,), "float32")
            T.clear(s)
            for i in T.serial(5):
                for j in T.Parallel(4):
                    s[j] += A[b, i, j]
                T.reduce_sum(s, total, dim=0)
                if total[0] > 2.0:
                    break
                for j in T.Parallel(4):
                    s[j] = s[j] * 0.5
            T.copy(s, Y[b, 0])

    a, expected = torch.randn(6, 5, 4), torch.zeros(6, 4)
    for row in range(6):
        for block in a[row]:
            expected[row] += block
            if expected[row].sum() > 2:
                break
            expected[row] *= 0.5
    check(kernel, [a], expected)
    factors = mt.sharding_rule(kernel).factors
    assert factors["m"] == "parallel"
    assert all(kind.startswith("whole") for name, kind in factors.items() if name != "m")


def test_a_loop_that_is_always_left():
    @T.prim_func
    def kernel(A: T.Tensor((9,)), C: T.Tensor((9,))):
        with T.Kernel(1, threads=32):
            for i in T.serial(9):
                C[i] = A[i]
                T.loop_break()

    a = torch.randn(9)
    check(kernel, [a], torch.where(torch.arange(9) < 1, a, 0))
