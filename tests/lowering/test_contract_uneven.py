"""Clause 6: dims that the devices do not divide. Padding is never combined into anything."""

import pytest
import tilelang.language as T
import torch

from .kernels import matmul, row_sums, scale
from .support import assert_right, coordinates, local_kernels, lowered, only_kernel, text

MESHES = [{"x": 2}, {"x": 4}, {"x": 2, "y": 2}, {"x": 3, "y": 2}]


def reduced(reduce, before=None, M=10, N=13, block=4):
    """B[m] = reduce over n of before(A[m, n])."""
    change = before or (lambda value: value)

    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M,), "float32")):
        with T.Kernel(T.ceildiv(M, block), threads=32) as bx:
            loaded = T.alloc_shared((block, N), "float32")
            a = T.alloc_fragment((block, N), "float32")
            b = T.alloc_fragment((block,), "float32")
            T.copy(A[bx * block, 0], loaded)
            for i, j in T.Parallel(block, N):
                a[i, j] = change(loaded[i, j])
            reduce(a, b, dim=1)
            T.copy(b, B[bx * block])

    return kernel


def masks(kernel):
    """The conditions under which a local kernel keeps values that it sets to a neutral element elsewhere."""
    return [line.split("if_then_else(")[1] for line in text(kernel).splitlines() if "if_then_else(" in line]


def test_a_tile_is_rounded_up():
    kernel = only_kernel(lowered(scale(10, 7), {"x": 3, "y": 2}, {"A": {"x": 0, "y": 1}, "B": {"x": 0, "y": 1}}))
    assert [tuple(map(int, b.shape)) for b in kernel.buffer_map.values()] == [(4, 4), (4, 4)]


def test_what_is_element_by_element_needs_no_mask():
    kernel = only_kernel(lowered(scale(22, 8), {"x": 3}, {"A": {"x": 0}, "B": {"x": 0}}))
    assert masks(kernel) == []
    assert coordinates(kernel) == []


def test_direct_accesses_past_the_end_of_a_tile_are_guarded():
    kernel = only_kernel(lowered(scale(20, 8, block=8), {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}}))
    assert "if bx * 8 + i < 10:" in text(kernel), "two blocks of 8 rows over a tile of 10"


def test_a_sum_over_a_short_tile_masks_it_with_zero():
    (kernel, *_) = local_kernels(lowered(row_sums(10, 13), {"x": 2}, {"A": {"x": 1}}))
    (mask,) = masks(kernel)
    assert mask.endswith("a[m0, n1], T.float32(0.0))")
    assert mask.startswith("n1 < T.max(T.min(13 - x * 7, 7), 0)")


@pytest.mark.parametrize(
    ("reduce", "neutral"),
    [
        (T.reduce_max, 'T.float32("-inf")'),
        (T.reduce_min, 'T.float32("inf")'),
        (T.reduce_absmax, "T.float32(0.0)"),
        (T.reduce_sum, "T.float32(0.0)"),
    ],
    ids=["max", "min", "absmax", "sum"],
)
def test_the_mask_is_the_neutral_element_of_the_reduction(reduce, neutral):
    (kernel, *_) = local_kernels(lowered(reduced(reduce), {"x": 2}, {"A": {"x": 1}}))
    (mask,) = masks(kernel)
    assert mask.endswith(f", {neutral})")


def test_both_operands_of_a_gemm_are_masked():
    (kernel, *_) = local_kernels(lowered(matmul(16, 16, 37), {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}}))
    assert [name in mask for name, mask in zip(("A_shared", "B_shared"), masks(kernel), strict=True)] == [True, True]
    lines = [line.strip() for line in text(kernel).splitlines()]
    first_mask = next(n for n, line in enumerate(lines) if "if_then_else" in line)
    gemm = next(n for n, line in enumerate(lines) if line.startswith("T.gemm"))
    copies = [n for n, line in enumerate(lines) if line.startswith("T.copy(T.region(B[")]
    assert copies[-1] < first_mask < gemm


def test_even_tiles_need_no_mask():
    (kernel, *_) = local_kernels(lowered(matmul(16, 16, 64), {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}}))
    assert masks(kernel) == []
    (kernel, *_) = local_kernels(lowered(matmul(16, 16, 40), {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}}))
    assert masks(kernel) == [], "blocks past the end of an even tile read zeros"


def test_every_axis_of_a_dim_bounds_what_is_valid():
    layouts = {"A": {"x": 1, "y": 1}}
    (kernel, *_) = local_kernels(lowered(row_sums(10, 13), {"x": 2, "y": 2}, layouts))
    (mask,) = masks(kernel)
    assert mask.startswith("n1 < T.max(T.min(T.max(T.min(13 - x * 7, 7), 0) - y * 4, 4), 0)")


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("size", [1, 5, 13], ids=lambda n: f"N={n}")
@pytest.mark.parametrize(
    ("reduce", "before", "reference"),
    [
        (T.reduce_sum, None, lambda a: a.double().sum(1)),
        (T.reduce_sum, T.exp, lambda a: a.double().exp().sum(1)),
        (T.reduce_max, lambda v: v - 9.0, lambda a: (a - 9).amax(1)),
        (T.reduce_min, lambda v: v + 9.0, lambda a: (a + 9).amin(1)),
        (T.reduce_absmax, None, lambda a: a.abs().amax(1)),
        (T.reduce_abssum, lambda v: v + 3.0, lambda a: (a.double() + 3).abs().sum(1)),
    ],
    ids=["sum", "sum of exp", "max", "min", "absmax", "abssum"],
)
def test_reduction_numbers(mesh, size, reduce, before, reference):
    layout = dict.fromkeys(mesh, 1)
    func = reduced(reduce, before, N=size)
    assert_right(func, mesh, {"A": layout, "B": {"x": 0}}, [torch.randn(10, size)], reference)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("layouts", [(0, None, 0), (1, 0, None), (None, 1, 1), (1, 0, 0), (1, 0, 1)], ids=str)
@pytest.mark.parametrize("sizes", [(13, 11, 19), (2, 33, 3)], ids=str)
def test_matmul_numbers(mesh, layouts, sizes):
    M, N, K = sizes
    asked = {name: dict.fromkeys(mesh, dim) for name, dim in zip("ABC", layouts, strict=True)}
    inputs = [torch.randn(M, K), torch.randn(K, N)]
    assert_right(matmul(M, N, K), mesh, asked, inputs, lambda a, b: a.double() @ b.double())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("block", [4, 8])
def test_a_block_that_reaches_past_a_tile_is_not_stored(mesh, block):
    layout = dict.fromkeys(mesh, 0)
    func = scale(21, 6, block=block)
    assert_right(func, mesh, {"A": layout, "B": layout}, [torch.randn(21, 6)], lambda a: a * 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float8_e4m3fn", "int8", "uint8"])
@pytest.mark.parametrize(("reduce", "sign"), [(T.reduce_max, -1), (T.reduce_min, 1)], ids=["max", "min"])
def test_extremes_of_every_dtype_ignore_padding(dtype, reduce, sign):
    """Tiles of 5, 5 and 3 columns: every number is on the side of 0 that a padding of zeros would beat."""

    @T.prim_func
    def kernel(A: T.Tensor((6, 13), dtype), B: T.Tensor((6,), dtype)):
        with T.Kernel(T.ceildiv(6, 4), threads=32) as bx:
            a, b = T.alloc_fragment((4, 13), dtype), T.alloc_fragment((4,), dtype)
            T.copy(A[bx * 4, 0], a)
            reduce(a, b, dim=1)
            T.copy(b, B[bx * 4])

    numbers = torch.randint(1, 100, (6, 13))
    numbers = (numbers if dtype == "uint8" else sign * numbers).to(getattr(torch, dtype))
    amost = torch.amax if reduce is T.reduce_max else torch.amin
    assert_right(kernel, {"x": 3}, {"A": {"x": 1}}, [numbers], lambda a: amost(a.float(), 1), rtol=0.0, atol=0.0)
