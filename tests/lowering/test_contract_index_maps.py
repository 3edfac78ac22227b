"""Clause 5: loops that walk a dim in order shrink; other maps of blocks to programs are right all the same."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from mesh_tensor.base.blocks import ceildiv

from .kernels import matmul
from .support import assert_right, extents, local_kernels, lowered, only_kernel, outline


def mapped(block_of, grid, M=32, N=12, block=8):
    """B = 2 * A over blocks of rows; program `bx` handles block `block_of(bx)`."""

    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")):
        with T.Kernel(grid, threads=32) as bx:
            a = T.alloc_shared((block, N), "float32")
            T.copy(A[block_of(bx) * block, 0], a)
            for i, j in T.Parallel(block, N):
                a[i, j] = a[i, j] * 2.0
            T.copy(a, B[block_of(bx) * block, 0])

    return kernel


def persistent(M=48, N=12, block=8, programs=3):
    """B = 2 * A, where each of a few programs loops over the blocks that fall to it."""

    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")):
        with T.Kernel(programs, threads=32) as bx:
            a = T.alloc_shared((block, N), "float32")
            for w in T.serial(T.ceildiv(M // block, programs)):
                T.copy(A[(w * programs + bx) * block, 0], a)
                for i, j in T.Parallel(block, N):
                    a[i, j] = a[i, j] * 2.0
                T.copy(a, B[(w * programs + bx) * block, 0])

    return kernel


MAPS = {
    "plain": mapped(lambda bx: bx, 4),
    "reversed": mapped(lambda bx: 3 - bx, 4),
    "swizzled": mapped(lambda bx: bx % 2 * 2 + bx // 2, 4),
    "xor": mapped(lambda bx: bx ^ 1, 4),
    "grouped": mapped(lambda bx: bx // 2 * 2 + bx % 2, 4),
    "more programs than blocks": mapped(lambda bx: bx // 2, 8),
    "persistent": persistent(),
}
LAYOUTS = [{"A": {"x": 0}, "B": {"x": 0}}, {"A": {"x": 0}, "B": {}}, {"A": {"x": 1}, "B": {"x": 0}}]


@pytest.mark.parametrize(("devices", "sizes"), [(2, (64, 48, 32)), (4, (64, 64, 64)), (3, (50, 70, 20))], ids=str)
def test_loops_that_walk_a_dim_shrink(devices, sizes):
    M, N, K = sizes
    rows = only_kernel(lowered(matmul(M, N, K), {"x": devices}, {"A": {"x": 0}, "C": {"x": 0}}))
    tile = ceildiv(M, devices)
    assert extents(rows) == {"by": ceildiv(tile, 16), "bx": ceildiv(N, 16), "ko": ceildiv(K, 16)}
    inner = local_kernels(lowered(matmul(M, N, K), {"x": devices}, {"A": {"x": 1}, "B": {"x": 0}}))[0]
    assert extents(inner)["ko"] == ceildiv(ceildiv(K, devices), 16)
    assert extents(inner)["by"] == ceildiv(M, 16)


def test_the_next_loop_shrinks_where_a_tile_is_less_than_a_block():
    @T.prim_func
    def nested(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(2, threads=8) as bx:
            for w in T.serial(4):
                for i in T.Parallel(8):
                    B[bx * 32 + w * 8 + i] = A[bx * 32 + w * 8 + i] * 2.0

    layouts = {"A": {"x": 0}, "B": {"x": 0}}
    assert extents(only_kernel(lowered(nested, {"x": 2}, layouts))) == {"bx": 1, "w": 4, "i": 8}
    assert extents(only_kernel(lowered(nested, {"x": 4}, layouts))) == {"bx": 1, "w": 2, "i": 8}
    assert_right(nested, {"x": 4}, layouts, [torch.randn(64)], lambda a: a * 2)


def test_a_block_that_holds_the_whole_dim_holds_the_tile():
    @T.prim_func
    def whole(A: T.Tensor((4, 32), "float32"), B: T.Tensor((4, 32), "float32")):
        with T.Kernel(4, threads=32) as bx:
            a = T.alloc_shared((32,), "float32")
            T.copy(A[bx, 0], a)
            for j in T.Parallel(32):
                a[j] = a[j] * 2.0
            T.copy(a, B[bx, 0])

    kernel = only_kernel(lowered(whole, {"x": 4}, {"A": {"x": 1}, "B": {"x": 1}}))
    assert extents(kernel) == {"bx": 4, "j": 8}
    (on_chip,) = kernel.body.block.body.body.seq[-1].block.alloc_buffers
    assert tuple(map(int, on_chip.shape)) == (8,)


def test_a_map_that_can_not_be_shrunk_is_guarded():
    rule = mt.sharding_rule(MAPS["reversed"])
    assert rule.inputs["A"] == (None, "m"), "the rows are needed whole"
    result = lowered(MAPS["reversed"], {"x": 2}, LAYOUTS[0], strict=True)
    assert outline(result) == ["kernel(A, B)"]
    assert not result.whole


def test_a_map_that_can_not_be_evaluated_is_gathered_and_says_so():
    rule = mt.sharding_rule(MAPS["xor"])
    assert rule.inputs["A"] == (None, "m"), "the rows are needed whole"
    result = lowered(MAPS["xor"], {"x": 2}, LAYOUTS[0])
    assert outline(result)[0] == "all_gather(A, dim 0, x)"
    assert set(result.whole) == {("A", 0), ("B", 0)}


def test_a_map_that_can_not_be_shrunk_still_allows_the_other_dims():
    result = lowered(MAPS["reversed"], {"x": 2}, {"A": {"x": 1}, "B": {"x": 1}})
    assert outline(result) == ["kernel(A, B)"]


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize("devices", [2, 3])
def test_numbers(name, layouts, devices):
    rows = 48 if name == "persistent" else 32
    a, b = torch.randn(rows, 12), torch.full((rows, 12), torch.nan)  # not all of these are seen to write all of B
    assert_right(MAPS[name], {"x": devices}, layouts, [a, b], lambda a, _: a * 2)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("layouts", [{"A": {"x": 1}, "B": {"x": 0}}, {"C": {"x": 0}}, {"A": {"x": 0}}], ids=str)
def test_a_reversed_reduction(devices, layouts):
    @T.prim_func
    def kernel(A: T.Tensor((16, 64), "float32"), B: T.Tensor((64, 16), "float32"), C: T.Tensor((16, 16), "float32")):
        with T.Kernel(1, threads=128):
            A_shared = T.alloc_shared((16, 16), "float32")
            B_shared = T.alloc_shared((16, 16), "float32")
            C_local = T.alloc_fragment((16, 16), "float32")
            T.clear(C_local)
            for ko in T.serial(4):
                T.copy(A[0, (3 - ko) * 16], A_shared)
                T.copy(B[(3 - ko) * 16, 0], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C)

    inputs = [torch.randn(16, 64), torch.randn(64, 16)]
    assert_right(kernel, {"x": devices}, layouts, inputs, lambda a, b: a.double() @ b.double())


@pytest.mark.parametrize("layouts", [{"A": {"x": 0}, "B": {"x": 0}}, {"A": {"x": 1}, "B": {"x": 1}}])
@pytest.mark.parametrize("place", [lambda first, i: 15 // i, lambda first, i: first + 14 // i], ids=["plain", "loaded"])
def test_divided_by_what_is_0_at_first(layouts, place):
    """Where a condition leaves that iteration out, nobody divides in it: TVM ends at a division by 0."""

    @T.prim_func
    def divided(A: T.Tensor((8, 16), "float32"), first: T.Tensor((8,), "int32"), B: T.Tensor((8, 16), "float32")):
        with T.Kernel(8, threads=32) as bx:
            for i in T.serial(16):
                if i > 0:
                    B[bx, i] = A[bx, place(first[bx], i)]
                else:
                    B[bx, i] = A[bx, 0]

    a, first = torch.randn(8, 16), torch.arange(8, dtype=torch.int32) % 2
    kern = mt.compile(mt.annotate(divided, {"x": 2}, layouts), target="interpret", poison=True)
    places = torch.tensor([[0, *(place(int(f), i) for i in range(1, 16))] for f in first])
    b = torch.zeros(8, 16)
    kern(a, first, b)
    assert torch.equal(b, a.gather(1, places))


@pytest.mark.parametrize("target", ["interpret", "c"])
def test_places_from_the_end(target):
    """In TileLang a place that is negative wherever it is used counts from the end of its dim; they were outside."""

    @T.prim_func
    def kernel(A: T.Tensor((12, 8), "float32"), C: T.Tensor((12, 8), "float32"), D: T.Tensor((12, 8), "float32")):
        with T.Kernel(3, threads=32) as bx:
            block = T.alloc_shared((4, 8), "float32")
            T.copy(A[-4, 0], block)
            for j in T.Parallel(8):
                block[-3, j] = 1.0
                D[-1 - bx, j] = A[bx, -1]
            for i, j in T.Parallel(4, 8):
                C[bx * 4 + i, j] = A[bx * 4 + i, j] + 2 * A[-1, j] + 4 * A[i - 4, j] + 8 * block[-2, j] + block[1, j]

    a, d = torch.randn(12, 8), torch.randn(12, 8)
    expected = a + 2 * a[-1] + 4 * a[-4:].repeat(3, 1) + 8 * a[-2] + 1
    turned = torch.cat([d[:9], a[:3, -1:].flip(0).expand(3, 8)])
    for layouts in {"A": {"x": 0}, "C": {"x": 0}}, {"A": {"x": 1}, "C": {"x": 1}}, {"D": {"x": 0}}, {"D": {"x": 1}}:
        for devices in 1, 2:
            run = mt.compile(mt.annotate(kernel, {"x": devices}, layouts), target=target)
            found, after = torch.empty(12, 8), d.clone()
            run(a, found, after)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(after, turned)


def test_bounds_that_an_integer_does_not_have():
    """TVM raises where it asks how far a variable of 8 bits goes."""

    @T.prim_func
    def kernel(A: T.Tensor((8, 8), "float32"), C: T.Tensor((8, 8), "float32")):
        with T.Kernel(2, threads=32) as bx:
            for i, j in T.Parallel(4, 8):
                x = T.cast(j * 40, "int8")
                C[bx * 4 + i, j] = A[bx * 4 + i, j] + T.cast(x + x, "float32")

    added = (torch.arange(8) * 40).to(torch.int8) * 2
    assert_right(kernel, {"x": 2}, {"A": {"x": 0}, "C": {"x": 0}}, [torch.randn(8, 8)], lambda a: a + added)
