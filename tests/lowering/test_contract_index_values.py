"""Clause 4: a loop variable that is a value means the global coordinate; one that is only an index has no offset."""

import pytest
import tilelang.language as T
import torch
from tvm import ir

import mesh_tensor as mt

from .kernels import scale
from .support import assert_right, coordinates, local_kernels, lowered, only_kernel, outline, text

ROWS = {"A": {"x": 0}, "B": {"x": 0}}
COLUMNS = {"A": {"x": 1}, "B": {"x": 1}}


def on_elements(value, M, N, block=8, name="elements"):
    """B[m, n] = value(m, n, A[m, n]); m and n are sums of a grid and an inner variable."""

    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(M, block), threads=32) as bx:
            for i, j in T.Parallel(block, N):
                B[bx * block + i, j] = value(bx * block + i, j, A[bx * block + i, j])

    return kernel.with_attr("global_symbol", name)


def as_float(index):
    return T.Cast("float32", index)


def test_an_index_gets_no_offset():
    result = only_kernel(lowered(scale(32, 16), {"x": 2, "y": 2}, {"A": {"x": 0, "y": 1}, "B": {"x": 0, "y": 1}}))
    ir.assert_structural_equal(result, scale(16, 8))
    assert coordinates(result) == []


def test_a_mask_compares_global_coordinates():
    """A causal mask: rows are split, columns are not."""

    def causal_local(M, N, block=8):
        @T.prim_func
        def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32"), x: T.int32):
            with T.Kernel(T.ceildiv(M, block), threads=32) as bx:
                for i, j in T.Parallel(block, N):
                    B[bx * block + i, j] = T.if_then_else(bx * block + (i + x * M) >= j, A[bx * block + i, j], 0.0)

        return kernel.with_attr("global_symbol", "elements")

    func = on_elements(lambda m, n, v: T.if_then_else(m >= n, v, 0.0), 32, 24)
    ir.assert_structural_equal(only_kernel(lowered(func, {"x": 2}, ROWS)), causal_local(16, 24))


def test_the_offset_is_that_of_the_dim_that_is_split():
    func = on_elements(lambda m, n, v: v + as_float(n), 32, 24)
    by_rows = only_kernel(lowered(func, {"x": 2}, ROWS))
    assert coordinates(by_rows) == [], "rows are not a value here"
    by_columns = only_kernel(lowered(func, {"x": 2}, COLUMNS))
    assert coordinates(by_columns) == ["x"]
    assert 'T.Cast("float32", j + x * 12)' in text(by_columns)


def test_two_axes_on_one_dim_have_nested_offsets():
    func = on_elements(lambda m, n, v: v + as_float(n), 8, 24)
    layouts = {"A": {"x": 1, "y": 1}, "B": {"x": 1, "y": 1}}
    kernel = only_kernel(lowered(func, {"x": 2, "y": 3}, layouts))
    assert coordinates(kernel) == ["x", "y"]
    assert "j + (x * 12 + y * 4)" in text(kernel)


def test_a_bounds_test_keeps_its_global_bound():
    func = on_elements(lambda m, n, v: T.if_then_else(n < 20, v, -1.0), 8, 24)
    kernel = only_kernel(lowered(func, {"x": 2}, COLUMNS))
    assert "if_then_else(j + x * 12 < 20" in text(kernel)


def test_an_index_into_a_dim_that_is_needed_whole_is_a_value():
    @T.prim_func
    def flip(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=8) as bx:
            for i in T.Parallel(8):
                B[bx * 8 + i] = A[31 - (bx * 8 + i)]

    result = lowered(flip, {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}})
    assert outline(result) == ["all_gather(A, dim 0, x)", "kernel(A.1, B)"]
    (kernel,) = local_kernels(result)
    assert "B[bx * 8 + i] = A[31 - (bx * 8 + (i + x * 16))]" in text(kernel)


def test_a_block_number_counts_the_blocks_before():
    @T.prim_func
    def numbers(B: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=8) as bx:
            for i in T.Parallel(8):
                B[bx * 8 + i] = T.Cast("float32", bx)

    kernel = only_kernel(lowered(numbers, {"x": 2}, {"B": {"x": 0}}))
    assert "for bx in T.thread_binding(2" in text(kernel)
    assert 'T.Cast("float32", bx + x * 16 // 8)' in text(kernel)


@pytest.mark.parametrize("mesh", [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 2, "y": 2}, {"x": 2, "y": 3}], ids=str)
@pytest.mark.parametrize("dims", [(0, 0), (1, 1), (0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("sizes", [(32, 24), (13, 7)], ids=str)
@pytest.mark.parametrize(
    ("value", "reference"),
    [
        (lambda m, n, v: T.if_then_else(m >= n, v, -1.0), lambda m, n, a: torch.where(m >= n, a, -1.0)),
        (lambda m, n, v: v + as_float(m * 100 + n), lambda m, n, a: a + m * 100 + n),
        (lambda m, n, v: v * as_float((m + n) % 3), lambda m, n, a: a * ((m + n) % 3)),
    ],
    ids=["mask", "iota", "modulo"],
)
def test_numbers(mesh, dims, sizes, value, reference):
    layout = dict(zip(mesh, dims, strict=False))
    m, n = torch.arange(sizes[0])[:, None], torch.arange(sizes[1])[None]
    func = on_elements(value, *sizes)
    assert_right(func, mesh, {"A": layout, "B": layout}, [torch.randn(sizes)], lambda a: reference(m, n, a))


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_block_numbers(devices):
    @T.prim_func
    def numbers(A: T.Tensor((28,), "float32"), B: T.Tensor((28,), "float32")):
        with T.Kernel(7, threads=4) as bx:
            for i in T.Parallel(4):
                B[bx * 4 + i] = A[bx * 4 + i] + T.Cast("float32", bx * 10 + i)

    at = torch.arange(28)
    expected = at // 4 * 10 + at % 4
    assert_right(numbers, {"x": devices}, {"A": {"x": 0}, "B": {"x": 0}}, [torch.randn(28)], lambda a: a + expected)


@pytest.mark.parametrize("layout", [{"A": {"x": 0}}, {"A": {"x": 1}}, {"A": {"x": 0, "y": 1}}], ids=str)
def test_positions_of_what_is_reduced(layout):
    """B[m] = sum over n of A[m, n] * n, for n up to m."""

    @T.prim_func
    def moments(A: T.Tensor((18, 20), "float32"), B: T.Tensor((18,), "float32")):
        with T.Kernel(3, threads=32) as bx:
            a = T.alloc_fragment((8, 20), "float32")
            weighted = T.alloc_fragment((8, 20), "float32")
            b = T.alloc_fragment((8,), "float32")
            T.copy(A[bx * 8, 0], a)
            for i, j in T.Parallel(8, 20):
                weighted[i, j] = T.if_then_else(j <= bx * 8 + i, a[i, j] * T.Cast("float32", j), 0.0)
            T.reduce_sum(weighted, b, dim=1)
            T.copy(b, B[bx * 8])

    n = torch.arange(20)
    kept = n <= torch.arange(18)[:, None]
    inputs = [torch.randn(18, 20)]
    assert_right(moments, {"x": 2, "y": 3}, layout, inputs, lambda a: (a * kept * n).double().sum(1), atol=1e-4)


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 2, "y": 3}], ids=str)
def test_a_block_of_one_has_one_offset(mesh):
    """The grid's variable walks rows by itself, and together with a loop that runs once."""

    @T.prim_func
    def tables(A: T.Tensor((12, 8), "float32"), P: T.Tensor((12,), "float32"), B: T.Tensor((12, 8), "float32")):
        with T.Kernel(12, threads=32) as bx:
            tile = T.alloc_fragment((1, 8), "float32")
            T.copy(A[bx, 0], tile)
            for i, j in T.Parallel(1, 8):
                B[bx + i, j] = tile[i, j] + P[bx + i] * T.Cast("float32", (bx + i) % 5)

    at = torch.arange(12)
    inputs = [torch.randn(12, 8), torch.randn(12)]
    layouts = dict.fromkeys("AB", dict.fromkeys(mesh, 0))
    assert_right(tables, mesh, {**layouts, "P": {}}, inputs, lambda a, p: a + (p * (at % 5))[:, None])


@pytest.mark.parametrize("rows", [{"x": 0}, {"x": 0, "y": 0}], ids=str)
def test_sizes_of_64_bits_and_loops_of_32(rows):
    """What carries the offset is as wide as its loop counts, not as the sizes are."""
    size = T.dynamic("size", "int64")

    @T.prim_func
    def looked_up(A: T.Tensor((5, 8), "float32"), P: T.Tensor((size,), "int64"), B: T.Tensor((size, 8), "float32")):
        with T.Kernel(T.ceildiv(size, 4), threads=32) as bx:
            for i, j in T.Parallel(4, 8):
                if bx * 4 + i < size:
                    B[bx * 4 + i, j] = A[P[bx * 4 + i], j] * T.Cast("float32", bx * 4 + i)

    a, p, b = torch.randn(5, 8), torch.randint(5, (13,)), torch.empty(13, 8)
    compiled = mt.compile(mt.annotate(looked_up, {"x": 2, "y": 2}, {"A": {}, "P": {}, "B": rows}), target="interpret")
    torch.testing.assert_close(compiled(a, p, b), a[p] * torch.arange(13)[:, None])
