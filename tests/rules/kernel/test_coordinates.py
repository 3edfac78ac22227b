"""Coordinates: where on-chip buffers and statements lie in the factors."""

import tilelang.language as T

from kernels.matmul import matmul

from .kernels import analysis, factor, on_rows


def test_on_chip_dims_have_the_coordinate_of_their_elements():
    found = analysis(matmul(64, 48, 32, 16, 16, 8))
    ranges = {r.buffer.name: r for r in found.coordinates.ranges.all}
    k, base = found.coordinates.of_node((ranges["A_shared"], 1))
    assert k is factor(found, "A", 1)
    assert {var.name: step for var, step in base.terms.items()} == {"ko": 8}
    _, base = found.coordinates.of_node((ranges["C_local"], 1))
    assert {var.name: step for var, step in base.terms.items()} == {"bx": 16}


def test_a_dim_held_whole_has_no_base():
    @T.macro
    def body(A, B, a, b, bx):
        T.reduce_sum(a, b, dim=1)

    found = analysis(on_rows(body))
    ranges = {r.buffer.name: r for r in found.coordinates.ranges.all}
    n, base = found.coordinates.of_node((ranges["a"], 1))
    assert n is factor(found, "A", 1)
    assert not base.terms


def test_loops_around_a_statement_are_its_coordinate_if_they_walk_the_factor():
    @T.prim_func
    def func(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=8) as bx:
            for i in T.Parallel(8):
                count = T.alloc_var("float32")
                count = 1.0
                B[bx * 8 + i] = A[bx * 8 + i] + count

    found = analysis(func)
    m = factor(found, "A")
    start = found.kernel.statements[0]
    assert found.coordinates.of_statement(start) == {}
    assert {v.name: c for v, c in found.coordinates.around(start, m).terms.items()} == {"bx": 8, "i": 1}
