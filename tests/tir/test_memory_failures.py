"""Buffers that are in no memory that is known, and views that are no view of theirs: refused by name, with the line."""

import tilelang.language as T

import mesh_tensor as mt
from tests.refusals import refusal

F = "float32"


def assert_refused(func, *facts):
    """The rule and every target say the same."""
    messages = []
    for attempt in (
        lambda: mt.sharding_rule(func),
        lambda: mt.lower(mt.annotate(func, mt.Mesh({"x": 2}), {})),
        lambda: mt.compile(mt.annotate(func, mt.Mesh({"x": 1}), {}), target="interpret"),
        lambda: mt.compile(mt.annotate(func, mt.Mesh({"x": 2}), {}), target="c"),
    ):
        message = refusal(attempt)
        messages.append(message)
    assert len(set(messages)) == 1
    for fact in (*facts, "where: kernel 'kernel'", "why: only parameters", "fix: "):
        assert fact in messages[0]


def test_a_tensor_behind_a_pointer_from_a_table():
    @T.prim_func
    def kernel(table: T.Tensor((4,), T.ptr), A: T.Tensor((4, 32), F)):
        with T.Kernel(4, threads=32) as bx:
            out = T.make_tensor(table[bx], (32,), F)
            for i in T.Parallel(32):
                out[i] = A[bx, i]

    assert_refused(kernel, "buffer 'out' (32) float32, ", "test_memory_failures.py:", "lies behind a pointer")


def test_a_tensor_at_an_address_in_a_parameter():
    @T.prim_func
    def kernel(A: T.Tensor((4, 32), F), B: T.Tensor((4, 32), F)):
        with T.Kernel(4, threads=32) as bx:
            row = T.make_tensor(T.address_of(A[bx, 0]), (32,), F)
            for i in T.Parallel(32):
                B[bx, i] = row[i]

    assert_refused(kernel, "buffer 'row' (32) float32, ", "lies behind a pointer, in no memory of the kernel's own")


def test_the_address_of_a_parameter():
    @T.prim_func
    def kernel(A: T.Tensor((4, 32), F), B: T.Tensor((4, 32), F)):
        with T.Kernel(4, threads=32) as bx:
            T.evaluate(T.call_extern("handle", "scale", A.data))
            for i in T.Parallel(32):
                B[bx, i] = A[bx, i]

    assert_refused(kernel, "the address of parameter 'A' is used by itself (`A.data`)")


def test_a_part_of_a_buffer():
    @T.prim_func
    def kernel(A: T.Tensor((64, 32), F), B: T.Tensor((64, 32), F)):
        with T.Kernel(32, threads=32) as bx:
            part = T.match_buffer(A[0:32, 0:32], (32, 32))
            for i in T.Parallel(32):
                B[bx, i] = part[bx, i]

    assert_refused(kernel, "buffer 'part' (32, 32) float32, ", "is a part of another buffer (match_buffer)")


def test_a_view_that_is_larger_than_its_buffer():
    @T.prim_func
    def kernel(A: T.Tensor((4, 32), F), B: T.Tensor((4, 64), F)):
        with T.Kernel(4, threads=32) as bx:
            wide = T.Tensor((4, 64), F, A.data)
            for i in T.Parallel(64):
                B[bx, i] = wide[bx, i]

    assert_refused(
        kernel, "buffer 'wide' (4, 64) float32, ", "is a view of 'A'", "it needs 256 elements", "128 of float32"
    )


def test_a_view_with_larger_elements_than_fit():
    @T.prim_func
    def kernel(A: T.Tensor((4, 32), "float16"), B: T.Tensor((4, 32), F)):
        with T.Kernel(4, threads=32) as bx:
            wide = T.Tensor((4, 32), F, A.data)
            for i in T.Parallel(32):
                B[bx, i] = wide[bx, i]

    assert_refused(kernel, "is a view of 'A': it needs 128 elements of float32, which 128 of float16 are not known to")


def test_a_view_of_bits():
    @T.prim_func
    def kernel(A: T.Tensor((4, 32), "bool"), B: T.Tensor((4, 32), "int8")):
        with T.Kernel(4, threads=32) as bx:
            small = T.Tensor((4, 32), "int8", A.data)
            for i in T.Parallel(32):
                B[bx, i] = small[bx, i]

    assert_refused(kernel, "buffer 'small' (4, 32) int8, ", "is a view of 'A': it takes bool for int8")


def test_a_view_of_rows_with_gaps():
    @T.prim_func
    def kernel(A: T.StridedTensor((4, 32), (64, 1), F), B: T.Tensor((4, 32), F)):
        with T.Kernel(4, threads=32) as bx:
            flat = T.Tensor((128,), F, A.data)
            for i in T.Parallel(32):
                B[bx, i] = flat[bx * 32 + i]

    assert_refused(kernel, "buffer 'flat' (128) float32, ", "is a view of 'A': the rows of 'A' have strides [64, 1]")


def test_all_of_them_are_named():
    @T.prim_func
    def kernel(A: T.Tensor((4, 32), F), B: T.Tensor((4, 32), F)):
        with T.Kernel(4, threads=32) as bx:
            wide, tall = T.Tensor((4, 64), F, A.data), T.Tensor((8, 32), F, A.data)
            for i in T.Parallel(32):
                B[bx, i] = wide[bx, i] + tall[bx, i]

    assert_refused(kernel, "2 problems:", "buffer 'wide' (4, 64)", "buffer 'tall' (8, 32)")
