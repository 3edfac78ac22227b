"""Clause 12: views are the memory that they alias. Every layout gives what row-major reinterpretation gives."""

import pytest
import tilelang.language as T
import torch
from tvm import tirx

import mesh_tensor as mt
from mesh_tensor.tir.views import left_views

from .every_layout import check
from .support import nodes

F = "float32"


def run_compiled(func, mesh, shardings, *tensors):
    """The results on a CPU, compiled."""
    return mt.compile(mt.annotate(func, mt.Mesh(mesh), shardings), target="c")(*tensors)


def check_all(func, inputs, expected):
    """Every layout interpreted, and the kernel on one device and on two as compiled code."""
    check(func, inputs, expected)
    outputs = [torch.zeros_like(expected)]
    for mesh in ({"x": 1}, {"x": 2}):
        result = run_compiled(func, mesh, {}, *(t.clone() for t in (*inputs, *outputs)))
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns", "block"), [(6, 8, 4), (4, 6, 8), (5, 7, 4), (3, 4, 8)])
def test_a_matrix_as_one_row(rows, columns, block):
    @T.prim_func
    def kernel(A: T.Tensor((rows, columns), F), C: T.Tensor((rows, columns), F)):
        with T.Kernel(T.ceildiv(rows * columns, block), threads=32) as bx:
            a, c = T.reshape(A, (rows * columns,)), T.view(C, (rows * columns,))
            for i in T.Parallel(block):
                c[bx * block + i] = a[bx * block + i] * 2.0 + T.cast(bx * block + i, F)

    a = torch.randn(rows, columns)
    check_all(kernel, [a], a * 2 + torch.arange(rows * columns).reshape(rows, columns))


@pytest.mark.parametrize(("rows", "columns", "block"), [(6, 8, 4), (4, 6, 4), (5, 7, 4)])
def test_copies_of_a_matrix_as_one_row(rows, columns, block):
    @T.prim_func
    def kernel(A: T.Tensor((rows, columns), F), C: T.Tensor((rows, columns), F)):
        with T.Kernel(T.ceildiv(rows * columns, block), threads=32) as bx:
            a, c = T.Tensor((rows * columns,), F, A.data), T.Tensor((rows * columns,), F, C.data)
            s = T.alloc_shared((block,), F)
            T.copy(a[bx * block], s)
            for i in T.Parallel(block):
                s[i] = s[i] + 1.0
            T.copy(s, c[bx * block])

    a = torch.randn(rows, columns)
    check_all(kernel, [a], a + 1)


@pytest.mark.parametrize(("rows", "columns"), [(6, 8), (5, 3)])
def test_one_row_as_a_matrix(rows, columns):
    @T.prim_func
    def kernel(A: T.Tensor((rows * columns,), F), B: T.Tensor((rows, columns), F), C: T.Tensor((rows * columns,), F)):
        with T.Kernel(T.ceildiv(rows, 2), threads=32) as bx:
            a, c = T.reshape(A, (rows, columns)), T.reshape(C, (rows, columns))
            s = T.alloc_fragment((2, columns), F)
            T.copy(a[bx * 2, 0], s)
            for i, j in T.Parallel(2, columns):
                s[i, j] = s[i, j] + B[bx * 2 + i, j]
            T.copy(s, c[bx * 2, 0])

    a, b = torch.randn(rows * columns), torch.randn(rows, columns)
    check_all(kernel, [a, b], a + b.flatten())


def test_dims_of_size_one_come_and_go():
    @T.prim_func
    def kernel(A: T.Tensor((1, 6, 8), F), B: T.Tensor((8, 4), F), C: T.Tensor((6, 1, 4), F)):
        with T.Kernel(3, threads=32) as bx:
            a, c = T.reshape(A, (6, 8)), T.reshape(C, (1, 6, 4))
            s, t = T.alloc_shared((2, 8), F), T.alloc_shared((8, 4), F)
            acc = T.alloc_fragment((2, 4), F)
            T.copy(a[bx * 2, 0], s)
            T.copy(B, t)
            T.clear(acc)
            T.gemm(s, t, acc)
            T.copy(acc, c[0, bx * 2, 0])

    a, b = torch.randn(1, 6, 8), torch.randn(8, 4)
    check_all(kernel, [a, b], (a[0] @ b)[:, None])
    assert str(mt.sharding_rule(kernel)) == "A[*, m, k], B[k, n] -> C[m, l, n]; m, n, l parallel; k sum"


def test_dims_taken_apart_in_another_way():
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), F), C: T.Tensor((4, 6), F)):
        with T.Kernel(3, threads=32) as bx:
            a = T.reshape(A, (3, 8))
            for j in T.Parallel(8):
                T.reshape(C, (8, 3))[j, bx] = a[bx, j]

    a = torch.randn(4, 6)
    check_all(kernel, [a], a.reshape(3, 8).T.contiguous().reshape(4, 6))


def test_a_view_of_a_view():
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), F), C: T.Tensor((4, 6), F)):
        with T.Kernel(8, threads=32) as bx:
            a = T.reshape(T.reshape(A, (24,)), (8, 3))
            for j in T.Parallel(3):
                T.view(T.view(C, (2, 12)), (8, 3))[bx, j] = a[bx, j] + 1.0

    a = torch.randn(4, 6)
    check_all(kernel, [a], a + 1)


def test_an_output_is_read_through_the_parameter_after_it_was_written_through_a_view():
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), F), B: T.Tensor((4, 6), F), C: T.Tensor((4, 6), F)):
        with T.Kernel(1, threads=32):
            b = T.reshape(B, (24,))
            for i in T.serial(24):
                b[i] = T.reshape(A, (24,))[i] * 2.0
            for i, j in T.Parallel(4, 6):
                C[i, j] = B[3 - i, j] + 1.0

    a = torch.randn(4, 6)
    check(kernel, [a], (2 * a, (2 * a).flip(0) + 1))


def test_what_one_iteration_writes_through_a_view_the_next_reads_through_the_parameter():
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), F), C: T.Tensor((4, 6), F)):
        with T.Kernel(1, threads=32):
            c = T.reshape(C, (24,))
            for j in T.serial(6):
                C[0, j] = A[0, j]
            for i in T.serial(18):
                c[i + 6] = C[i // 6, i % 6] + A[i // 6 + 1, i % 6]

    a = torch.randn(4, 6)
    check_all(kernel, [a], a.cumsum(0))


def test_two_views_that_overlap():
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), F), C: T.Tensor((4, 6), F)):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((4, 6), F)
            T.copy(A, s)
            long, tall = T.reshape(s, (2, 12)), T.reshape(s, (8, 3))
            for j in T.serial(12):
                long[1, j] = long[0, j] + 1.0
            for i, j in T.Parallel(8, 3):
                tall[i, j] = tall[i, j] * 2.0
            T.copy(s, C)

    a = torch.randn(4, 6)
    top = a[:2].reshape(-1)
    check_all(kernel, [a], torch.cat([top, top + 1]).reshape(4, 6) * 2)


def test_an_on_chip_buffer_that_is_only_used_in_other_shapes():
    @T.prim_func
    def kernel(A: T.Tensor((6, 8), F), C: T.Tensor((6, 8), F)):
        with T.Kernel(3, threads=32) as bx:
            s = T.alloc_shared((16,), F)
            v = T.reshape(s, (2, 8))
            T.copy(A[bx * 2, 0], v)
            for i, j in T.Parallel(2, 8):
                v[i, j] = v[i, j] - 1.0
            T.copy(v, C[bx * 2, 0])

    a = torch.randn(6, 8)
    check_all(kernel, [a], a - 1)
    assert str(mt.sharding_rule(kernel)) == "A[m, n] -> C[m, n]; m, n parallel"


def test_halves_of_a_shared_buffer_take_turns():
    @T.prim_func
    def kernel(A: T.Tensor((8, 6), F), C: T.Tensor((2, 6), F)):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((24,), F)
            halves = T.reshape(s, (2, 2, 6))
            acc = T.alloc_fragment((2, 6), F)
            T.clear(acc)
            T.copy(A[0:2, 0:6], halves[0, 0:2, 0:6])
            for k in T.serial(4):
                if k < 3:
                    T.copy(A[(k + 1) * 2 : (k + 1) * 2 + 2, 0:6], halves[(k + 1) % 2, 0:2, 0:6])
                for i, j in T.Parallel(2, 6):
                    acc[i, j] = acc[i, j] + s[(k % 2) * 12 + i * 6 + j]
            T.copy(acc, C)

    a = torch.randn(8, 6)
    check_all(kernel, [a], a.reshape(4, 2, 6).sum(0))


def test_groups_of_columns_are_reduced_through_a_view():
    @T.prim_func
    def kernel(A: T.Tensor((6, 16), F), C: T.Tensor((6, 4), F)):
        with T.Kernel(3, threads=32) as bx:
            s, top = T.alloc_fragment((2, 16), F), T.alloc_fragment((2, 4), F)
            T.copy(A[bx * 2, 0], s)
            groups = T.reshape(s, (2, 4, 4))
            T.reduce_absmax(groups, top, dim=2)
            T.copy(top, C[bx * 2, 0])

    a = torch.randn(6, 16)
    check_all(kernel, [a], a.reshape(6, 4, 4).abs().amax(2))
    factors = mt.sharding_rule(kernel).factors
    assert factors["m"] == "parallel"
    assert factors["k"].startswith("whole: groups dim 1 is indexed by")


def test_a_product_of_a_view_of_a_shared_buffer():
    @T.prim_func
    def kernel(A: T.Tensor((4, 8), F), B: T.Tensor((4, 4), F), C: T.Tensor((8, 4), F)):
        with T.Kernel(1, threads=32):
            s, t, acc = T.alloc_shared((4, 8), F), T.alloc_shared((4, 4), F), T.alloc_fragment((8, 4), F)
            T.copy(A, s)
            T.copy(B, t)
            T.gemm(T.reshape(s, (8, 4)), t, acc, clear_accum=True)
            T.copy(acc, C)

    a, b = torch.randn(4, 8), torch.randn(4, 4)
    check_all(kernel, [a, b], a.reshape(8, 4) @ b)


def test_products_of_two_views_of_one_buffer():
    @T.prim_func
    def kernel(A: T.Tensor((4, 8), F), B: T.Tensor((4, 8), F), C: T.Tensor((8, 8), F)):
        with T.Kernel(1, threads=32):
            s, t = T.alloc_shared((4, 8), F), T.alloc_shared((4, 8), F)
            acc, more = T.alloc_fragment((8, 8), F), T.alloc_fragment((4, 4), F)
            T.copy(A, s)
            T.copy(B, t)
            T.gemm(T.reshape(s, (8, 4)), t, acc, clear_accum=True)
            T.gemm(s, t, more, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(4, 4):
                acc[i, j] = acc[i, j] + more[i, j]
            T.copy(acc, C)

    a, b = torch.randn(4, 8), torch.randn(4, 8)
    expected = a.reshape(8, 4) @ b
    expected[:4, :4] += a @ b.T
    check_all(kernel, [a, b], expected)


def test_atomics_through_a_view():
    @T.prim_func
    def kernel(A: T.Tensor((6, 8), F), C: T.Tensor((2, 4), F)):
        with T.Kernel(6, threads=32) as bx:
            c = T.reshape(C, (8,))
            for j in T.Parallel(8):
                T.atomic_add(c[7 - j], A[bx, j])

    a = torch.randn(6, 8)
    check_all(kernel, [a], a.sum(0).flip(0).reshape(2, 4))


def test_a_block_is_added_through_a_view():
    @T.prim_func
    def kernel(A: T.Tensor((6, 8), F), C: T.Tensor((2, 4), F)):
        with T.Kernel(6, threads=32) as bx:
            s = T.alloc_shared((8,), F)
            T.copy(A[bx, 0:8], s)
            T.atomic_add(T.reshape(C, (8,)), s)

    a = torch.randn(6, 8)
    check_all(kernel, [a], a.sum(0).reshape(2, 4))


def test_an_output_is_added_to_through_a_view():
    @T.prim_func
    def kernel(A: T.Tensor((6, 8), F), C: T.Tensor((48,), F)):
        with T.Kernel(6, threads=32) as bx:
            c = T.reshape(C, (6, 8))
            for _ in T.serial(3):
                for j in T.Parallel(8):
                    c[bx, j] += A[bx, j]

    a = torch.randn(6, 8)
    check_all(kernel, [a], 3 * a.flatten())


def test_a_view_of_the_first_part():
    @T.prim_func
    def kernel(A: T.Tensor((6, 8), F), C: T.Tensor((3, 8), F)):
        with T.Kernel(3, threads=32) as bx:
            a, b = T.Tensor((3, 8), F, A.data), T.Tensor((20,), F, A.data)
            for j in T.Parallel(8):
                C[bx, j] = a[bx, j] + b[bx * 4 + j]

    a = torch.randn(6, 8)
    shifted = torch.stack([a.flatten()[i * 4 : i * 4 + 8] for i in range(3)])
    check_all(kernel, [a], a[:3] + shifted)


def test_a_view_with_strides():
    @T.prim_func
    def kernel(A: T.Tensor((6, 8), F), C: T.Tensor((6, 8), F)):
        with T.Kernel(8, threads=32) as bx:
            turned = T.view(A, (8, 6), strides=(1, 8))
            for i in T.Parallel(6):
                T.view(C, (8, 6), strides=(1, 8))[bx, i] = turned[bx, i] + T.cast(i, F)

    a = torch.randn(6, 8)
    check_all(kernel, [a], a + torch.arange(6)[:, None])
    assert str(mt.sharding_rule(kernel)) == "A[m, n] -> C[m, n]; m, n parallel"


def test_what_is_outside_a_view_reads_as_zero_and_is_not_written():
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), F), C: T.Tensor((4, 6), F)):
        with T.Kernel(4, threads=32) as bx:
            a, c = T.reshape(A, (8, 3)), T.reshape(C, (8, 3))
            for i, j in T.Parallel(2, 4):
                c[bx * 2 + i, j] = a[bx * 2 + i, 3 - j] + a[bx * 2 + i, j + 1]

    a = torch.randn(4, 6)
    rows = torch.nn.functional.pad(a.reshape(8, 3), (0, 1))
    expected = torch.stack([rows[:, 3 - j] + rows[:, j + 1] for j in range(3)], 1)
    check_all(kernel, [a], expected.reshape(4, 6))


def test_a_view_in_another_dtype():
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), F), C: T.Tensor((4, 6), F)):
        with T.Kernel(4, threads=32) as bx:
            s = T.alloc_shared((6,), F)
            T.copy(A[bx, 0:6], s)
            bits = T.view(s, (3, 2), "int32")
            c = T.view(C, (4, 6), "int32")
            for i, j in T.Parallel(3, 2):
                c[bx, i * 2 + j] = bits[i, j] + 1

    a = torch.rand(4, 6) + 0.5
    check_all(kernel, [a], (a.view(torch.int32) + 1).view(torch.float32))
    assert mt.sharding_rule(kernel).factors["m"] == "parallel"


def test_a_parameter_in_parts_of_its_elements():
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), F), C: T.Tensor((4, 6), F)):
        with T.Kernel(4, threads=32) as bx:
            a, c = T.view(A, (4, 12), "uint16"), T.view(C, (4, 12), "uint16")
            for j in T.Parallel(12):
                c[bx, j] = a[bx, j]

    a = torch.randn(4, 6)
    for target in ("interpret", "c"):
        for shardings in ({}, {"A": {"x": 0}, "C": {"x": 1}}):
            compiled = mt.compile(mt.annotate(kernel, mt.Mesh({"x": 2}), shardings), target=target)
            assert torch.equal(compiled(a, torch.zeros(4, 6)), a)


def test_symbolic_sizes():
    m, n = T.dynamic("m"), T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((m, n), F), C: T.Tensor((m, n), F)):
        with T.Kernel(T.ceildiv(m * n, 8), threads=32) as bx:
            a, c = T.reshape(A, (m * n,)), T.reshape(C, (m * n,))
            for i in T.Parallel(8):
                c[bx * 8 + i] = a[bx * 8 + i] * 2.0

    for shardings in ({}, {"A": {"x": 0}, "C": {"x": 0}}, {"A": {"x": 1}, "C": {"x": 0}}):
        for target in ("interpret", "c"):
            compiled = mt.compile(mt.annotate(kernel, mt.Mesh({"x": 2}), shardings), target=target)
            for rows, columns in ((4, 8), (3, 5), (8, 16)):
                a = torch.randn(rows, columns)
                torch.testing.assert_close(compiled(a, torch.zeros_like(a)), 2 * a)


def test_the_lowered_function_views_its_own_memory():
    @T.prim_func
    def kernel(A: T.Tensor((4, 8), F), B: T.Tensor((4, 8), F), C: T.Tensor((8, 8), F)):
        with T.Kernel(1, threads=32):
            s, t = T.alloc_shared((4, 8), F), T.alloc_shared((4, 8), F)
            acc, more = T.alloc_fragment((8, 8), F), T.alloc_fragment((4, 4), F)
            T.copy(A, s)
            T.copy(T.view(B, (4, 16), "uint16"), T.view(t, (4, 16), "uint16"))
            T.gemm(T.reshape(s, (8, 4)), t, acc, clear_accum=True)
            T.gemm(s, t, more, transpose_B=True, clear_accum=True)
            T.copy(acc, C)

    (func,) = mt.lower(mt.annotate(kernel, mt.Mesh({"x": 2}), {"A": {"x": 0}})).functions.values()
    views = left_views(func)
    assert sorted(str(owner.name) for owner in views.values()) == ["B", "s", "t"]
    memories = [*func.buffer_map.values(), *(b for block in nodes(func, tirx.SBlock) for b in block.alloc_buffers)]
    assert all(any(owner.same_as(buffer) for buffer in memories) for owner in views.values())
    assert tirx.analysis.verify_well_formed(func, assert_mode=False)
