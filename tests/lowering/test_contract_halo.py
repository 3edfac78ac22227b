"""Clause 9: a bounded window of another tensor is no reason to gather it: margins are exchanged with neighbours."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.neighbourhoods import (
    filter_2d,
    filter_2d_reference,
    periodic_neighbours,
    periodic_neighbours_reference,
    sliding_attention,
    sliding_attention_reference,
)

from .halo_kernels import indexed, max_pool, staged, stencil, stencil_reference
from .support import assert_right, local_kernels, lowered, outline, run, text

BOTH = {"A": {"x": 0}, "B": {"x": 0}}
ROWS = {"A": {"x": 0}, "out": {"x": 0}}
ALL = {name: {"x": 0} for name in ("Q", "K", "V", "Out")}
MESHES = [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}]

# kernel, shapes of its inputs, layouts, reference, elements that a device receives of two: what an expert sends
KERNELS = {
    "stencil": (stencil(48), [(48,)], BOTH, stencil_reference, 1),
    "stencil, uneven": (stencil(37), [(37,)], BOTH, stencil_reference, 1),
    "shift": (indexed(lambda x: x + 2, 34, 32), [(34,)], BOTH, lambda a: a[2:], 1),
    "far shift": (indexed(lambda x: x + 30, 78, 48), [(78,)], BOTH, lambda a: a[30:], 15),
    "every second, but the first": (indexed(lambda x: 2 * x + 1, 66, 32), [(66,)], BOTH, lambda a: a[1:-1:2], 1),
    "repeat": (indexed(lambda x: x // 3, 16, 48), [(16,)], BOTH, lambda a: a.repeat_interleave(3), 0),
    "clamped": (indexed(lambda x: T.max(x - 2, 0), 32, 32), [(32,)], BOTH, lambda a: a[[0, 0, *range(30)]], 2),
    "roll": (indexed(lambda x: (x + 1) % 32, 32, 32), [(32,)], BOTH, lambda a: a.roll(-1), 1),
    "roll back": (indexed(lambda x: (x + 29) % 32, 32, 32), [(32,)], BOTH, lambda a: a.roll(3), 3),
    "staged": (staged(48), [(50,)], BOTH, lambda a: a[:-2] + 2 * a[1:-1] + 3 * a[2:], 1),
    "max pool": (max_pool(48), [(96,)], BOTH, lambda a: a.view(-1, 2).amax(1), 0),
    "convolution": (
        filter_2d(34, 18, block_h=4, block_w=8),
        [(34, 18), (3, 3)],
        ROWS,
        lambda a, k: filter_2d_reference(a, k, 1),
        18,
    ),
    "convolution, strided": (
        filter_2d(21, 37, stride=2, block_h=4, block_w=8),
        [(21, 37), (3, 3)],
        ROWS,
        lambda a, k: filter_2d_reference(a, k, 2),
        37,
    ),
    "sliding attention": (
        sliding_attention(96, 8, 8, block=8),
        [(96, 8)] * 3,
        ALL,
        lambda q, k, v: sliding_attention_reference(q, k, v, 8),
        2 * 8 * 8,
    ),
    "sliding attention, a loop from the first block": (
        sliding_attention(96, 8, 8, block=8, bounds=True),
        [(96, 8)] * 3,
        ALL,
        lambda q, k, v: sliding_attention_reference(q, k, v, 8),
        2 * 8 * 8,
    ),
}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_numbers(name, mesh):
    func, shapes, layouts, reference, _ = KERNELS[name]
    assert_right(func, mesh, layouts, [torch.randn(shape) for shape in shapes], reference)


@pytest.mark.parametrize("name", KERNELS)
def test_only_margins_move(name):
    func, _, layouts, _, elements = KERNELS[name]
    kernel = mt.compile(mt.annotate(func, {"x": 2}, layouts), target="interpret")
    assert {step.kind for step in kernel.program.collectives} == ({"halo"} if elements else set())
    assert sum(step.bytes for step in kernel.program.collectives) <= 4 * elements
    told = kernel.explain()
    assert ("what is next to tiles is read along dim 0" in told) == (elements > 0)
    assert "needed whole" not in told


def test_where_a_loop_starts_and_ends_with_its_row_only_what_is_before_moves():
    """The last block that a row reads is its own: nothing comes from the device behind."""
    func = sliding_attention(96, 8, 8, block=8)
    kernel = mt.compile(mt.annotate(func, {"x": 4}, ALL), target="interpret")
    assert [(step.kind, step.bytes) for step in kernel.program.collectives] == [("halo", 4 * 8 * 8)] * 2


def test_keys_that_are_all_in_reach_are_no_margin():
    func = sliding_attention(64, 8, 60, block=8, bounds=True)
    kernel = mt.compile(mt.annotate(func, {"x": 4}, ALL), target="interpret", poison=True)
    assert "halo" not in {step.kind for step in kernel.program.collectives}
    q, k, v = (torch.randn(64, 8) for _ in range(3))
    torch.testing.assert_close(kernel(q, k, v), sliding_attention_reference(q, k, v, 60), rtol=1e-5, atol=1e-5)


def test_keys_alone_are_split_as_ever():
    """Where no axis splits the queries, that which splits the keys adds up their parts."""
    func = sliding_attention(96, 8, 8, block=8, bounds=True)
    keys = {"K": {"x": 0}, "V": {"x": 0}}
    q, k, v = (torch.randn(96, 8) for _ in range(3))
    assert_right(func, {"x": 2}, keys, [q, k, v], lambda q, k, v: sliding_attention_reference(q, k, v, 8))


def test_both_dims_of_a_grid():
    """Corners come from the diagonal neighbour, in the same collective."""
    layouts = {"A": {"x": 0, "y": 1}, "out": {"x": 0, "y": 1}}
    func = filter_2d(34, 34, block_h=4, block_w=8)
    result = lowered(func, {"x": 2, "y": 2}, layouts)
    assert outline(result) == ["halo(A, x, y)", "kernel(A.1, K, out)"]
    inputs = [torch.randn(34, 34), torch.randn(3, 3)]
    assert_right(func, {"x": 2, "y": 2}, layouts, inputs, lambda a, k: filter_2d_reference(a, k, 1))


def test_two_axes_on_one_dim():
    layouts = {"A": {"x": 0, "y": 0}, "B": {"x": 0, "y": 0}}
    assert outline(lowered(stencil(37), {"x": 2, "y": 2}, layouts)) == ["halo(A, x, y)", "kernel(A.1, B)"]
    assert_right(stencil(37), {"x": 2, "y": 2}, layouts, [torch.randn(37)], stencil_reference)


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_windows_wider_than_tiles(n):
    """Of tiles of 1 to 3 elements: what is read lies on several neighbours, or on none."""
    func = indexed(lambda x: T.max(x - 3, 0), n, n)
    assert_right(func, {"x": 4}, BOTH, [torch.randn(n)], lambda a: a[(torch.arange(n) - 3).clamp(min=0)])


def test_a_whole_input_is_only_sliced():
    kernel = mt.compile(mt.annotate(stencil(48), {"x": 2}, {"A": {}, "B": {"x": 0}}), target="interpret", poison=True)
    assert sum(step.bytes for step in kernel.program.collectives) == 0
    a = torch.randn(48)
    torch.testing.assert_close(kernel(a), stencil_reference(a))


def test_an_input_in_another_layout_comes_at_once():
    func = filter_2d(34, 18, block_h=4, block_w=8)
    kernel = mt.compile(mt.annotate(func, {"x": 2}, {"A": {"x": 1}, "out": {"x": 0}}), target="interpret", poison=True)
    assert [step.kind for step in kernel.program.collectives] == ["halo"]
    assert kernel.program.collectives[0].bytes == 18 * 9 * 4  # 18 of 34 rows, of which 9 of 18 columns are not there
    a, k = torch.randn(34, 18), torch.randn(3, 3)
    torch.testing.assert_close(kernel(a, k), filter_2d_reference(a, k, 1), rtol=1e-5, atol=1e-5)


def test_a_local_kernel_needs_no_offset():
    """Positions in a window are those in the tile."""
    (kernel,) = local_kernels(lowered(indexed(lambda x: x + 2, 34, 32), {"x": 4}, BOTH))
    assert "B[bx * 8 + i] = A[bx * 8 + i]" in text(kernel)


def test_strict_allows_margins():
    assert outline(lowered(stencil(48), {"x": 2}, BOTH, strict=True)) == ["halo(A, x)", "kernel(A.1, B)"]


def test_blocks_that_tiles_cut_are_made_whole():
    """What is staged by blocks is that of whole blocks: of tiles of 19 it would be another."""
    result = lowered(staged(37), {"x": 2}, BOTH)
    assert outline(result) == ["halo(A, x)", "kernel(A.1, B)", "halo(B, x)"]
    assert_right(staged(37), {"x": 2}, BOTH, [torch.randn(39)], lambda a: a[:-2] + 2 * a[1:-1] + 3 * a[2:])


def test_c_gives_the_same():
    for name in ("stencil, uneven", "convolution, strided", "sliding attention"):
        func, shapes, layouts, reference, _ = KERNELS[name]
        inputs = [torch.randn(shape) for shape in shapes]
        result = mt.compile(mt.annotate(func, {"x": 3}, layouts), target="c")(*inputs)
        torch.testing.assert_close(result, reference(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "index",
    [
        lambda x: x // 4,
        lambda x: (x + 3) // 4,
        lambda x: (x * 3 + 5) // 4,
        lambda x: x // 4 + x // 8,
        lambda x: x // 6 * 2 + 1,
        lambda x: 40 - (x + 2) // 3,
    ],
    ids=["group", "between", "three of four", "two groups", "odd", "backwards"],
)
def test_windows_of_groups(index):
    """Wherever tiles start, in groups or between them, all that is read is in the window."""
    positions = torch.arange(47)
    for m in (24, 36, 47):
        func, a = indexed(index, 48, m, block=4), torch.randn(48)
        expected = a[torch.tensor([int(index(int(x))) for x in positions[:m]])]
        for mesh in ({"x": 2}, {"x": 3}, {"x": 5}, {"x": 2, "y": 2}):
            layouts = {name: dict.fromkeys(mesh, 0) for name in "AB"}
            kernel = mt.compile(mt.annotate(func, mesh, layouts), target="interpret", poison=True)
            assert torch.equal(kernel(a), expected), (m, mesh)


# -- what is no window -------------------------------------------------------------------------------------------------


def in_place(n, block=8):
    """A[x] += A[x + 1] (where there is one): what neighbours hold changes while they are read."""

    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=8) as bx:
            for i in T.serial(block):
                if bx * block + i < n - 1:
                    A[bx * block + i] = A[bx * block + i] + A[bx * block + i + 1]

    return kernel


def from_data(n, block=8):
    """B[x] = A[x + shift[0]]."""

    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), shift: T.Tensor((1,), "int32"), B: T.Tensor((n - 4,), "float32")):
        with T.Kernel(T.ceildiv(n - 4, block), threads=8) as bx:
            for i in T.Parallel(block):
                if bx * block + i < n - 4:
                    B[bx * block + i] = A[bx * block + i + shift[0]]

    return kernel


def test_what_is_written_meanwhile_is_no_window():
    func, a = in_place(32), torch.randn(32)
    assert "halo" not in str(outline(lowered(func, {"x": 2}, {"A": {"x": 0}})))
    result = a.clone()
    run(func, {"x": 2}, {"A": {"x": 0}}, result)
    expected = a.clone()
    expected[:-1] += a[1:]
    torch.testing.assert_close(result, expected)


def test_a_start_that_is_loaded_is_no_window():
    func = from_data(36)
    assert "halo" not in str(outline(lowered(func, {"x": 2}, BOTH)))
    a = torch.randn(36)
    assert_right(func, {"x": 2}, BOTH, [a, torch.tensor([3], dtype=torch.int32)], lambda a, _: a[3:35])


FAR = {"square": lambda x: x * x % 32, "flip": lambda x: 31 - x, "stride": lambda x: 3 * x % 32}


@pytest.mark.parametrize("name", FAR)
def test_what_goes_far_is_gathered(name):
    index = FAR[name]
    func = indexed(index, 32, 32)
    assert outline(lowered(func, {"x": 2}, BOTH)) == ["all_gather(A, dim 0, x)", "kernel(A.1, B)"]
    assert_right(func, {"x": 2}, BOTH, [torch.randn(32)], lambda a: a[[int(index(x)) for x in range(32)]])


def test_around_another_end_than_the_tensors():
    """`(x + 1) % 16` of a tensor of 32: it does not come in from the other end."""
    func = indexed(lambda x: (x + 1) % 16, 32, 32)
    (halo, _) = lowered(func, {"x": 2}, BOTH).steps
    assert halo.reason == "of dim 0 only 0 to 15 is read"
    assert_right(func, {"x": 2}, BOTH, [torch.randn(32)], lambda a: a[(torch.arange(32) + 1) % 16])


def test_another_value_outside_is_no_window():
    """T.copy reads what T.annotate_safe_value says outside of the tensor, and not 0."""

    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=8) as bx:
            T.annotate_safe_value({A: 7.0})
            rows = T.alloc_shared((9,), "float32")
            T.copy(A[bx * 8 : bx * 8 + 9], rows)
            for i in T.Parallel(8):
                B[bx * 8 + i] = rows[i + 1]

    assert "halo" not in str(outline(lowered(kernel, {"x": 2}, BOTH)))
    assert_right(kernel, {"x": 2}, BOTH, [torch.randn(32)], lambda a: torch.cat([a[1:], torch.tensor([7.0])]))


def test_positions_in_blocks_of_tiles_that_cut_them():
    """`rows[7 - i]` turns every block around: with tiles that cut blocks these would be other blocks."""

    @T.prim_func
    def kernel(A: T.Tensor((20,), "float32"), B: T.Tensor((20,), "float32")):
        with T.Kernel(3, threads=8) as bx:
            rows = T.alloc_shared((8,), "float32")
            T.copy(A[bx * 8], rows)
            for i in T.Parallel(8):
                if bx * 8 + i < 20:
                    B[bx * 8 + i] = rows[7 - i]

    order = torch.tensor([*range(7, -1, -1), *range(15, 7, -1), *range(23, 19, -1), *range(19, 15, -1)])[:20]
    assert_right(kernel, {"x": 2}, BOTH, [torch.randn(20)], lambda a: torch.nn.functional.pad(a, (0, 4))[order])


@pytest.mark.parametrize("row", [0, 16, 32])
def test_what_follows_a_loop_inside_of_blocks_only_is_no_window(row):
    """Every block of B gets the same rows of A: they are where the loop over a block's rows is, but not the block."""

    @T.prim_func
    def func(A: T.Tensor((64, 8), "float32"), B: T.Tensor((48, 8), "float32")):
        with T.Kernel(3, threads=32) as bx:
            for i, j in T.Parallel(16, 8):
                B[bx * 16 + i, j] = A[row + i, j]

    for layouts in ({"A": {}, "B": {"x": 0}}, {"A": {"x": 0}, "B": {"x": 0}}):
        for devices in (2, 3, 4):
            a = torch.randn(64, 8)
            assert_right(func, {"x": devices}, layouts, [a], lambda a: a[row : row + 16].repeat(3, 1))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(12, 8), (11, 7)])
def test_what_goes_around_is_next_to_the_other_end(dim, shape):
    """`(i + 11) % 12` is one back, and not eleven on."""
    func, layouts = periodic_neighbours(*shape), {"A": {"x": dim}, "out": {"x": dim}}
    made = mt.compile(mt.annotate(func, {"x": 2}, layouts), target="interpret").program.collectives
    margin = 4 * 2 * shape[1 - dim]
    assert [(step.kind, step.bytes <= margin * (1.5 if shape[dim] % 2 else 1)) for step in made] == [("halo", True)]
    for mesh in ({"x": 2}, {"x": 3}, {"x": 5}):
        assert_right(func, mesh, layouts, [torch.randn(shape)], periodic_neighbours_reference)


def test_a_window_with_several_clamped_ends_reaches_no_further_than_it_does():
    """The loop's first block, its end and its length are each the larger or smaller of two: nothing is read behind a
    tile, and before it the window, and what the first block has more."""
    func = sliding_attention(16384, 64, 512, bounds="clamped")
    made = mt.compile(mt.annotate(func, {"x": 4}, ALL), target="interpret").program.collectives
    assert [(step.kind, step.bytes) for step in made] == [("halo", (512 + 63) * 64 * 4)] * 2
