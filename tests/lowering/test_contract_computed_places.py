"""Blocks at computed places: axes split dims that are walked in any order, and devices skip the blocks of others."""

import pytest
import tilelang.language as T
import torch

from kernels.schedules import backwards_rows, causal_product, waves_matmul
from tests.kernels.adversarial.grids import grouped_matmul, persistent_matmul, reversed_grid_scale, reversed_loop_matmul
from tests.other_machines import machine

from .every_layout import check
from .support import lowered, only_kernel, outline, run, text

ROWS, COLUMNS, K = {"A": {"x": 0}, "C": {"x": 0}}, {"B": {"x": 1}, "C": {"x": 1}}, {"A": {"x": 1}, "B": {"x": 0}}
PRODUCTS = {
    "persistent": persistent_matmul(15, 31, 16, 4, 5),
    "grouped": grouped_matmul(15, 31, 16, 4, 2),
    "waves": waves_matmul(15, 31, 16, 4, 4, 4, 3, 2),
    "reversed": reversed_loop_matmul(15, 31, 16, 4),
}
A, B = torch.randn(15, 16), torch.randn(16, 31)


@pytest.mark.parametrize("layouts", [ROWS, COLUMNS])
@pytest.mark.parametrize("name", ["persistent", "grouped", "waves"])
def test_blocks_in_another_order(name, layouts):
    """15 rows are tiles of 8 and 7, 31 columns of 16 and 15: whole blocks of 4, and a short last one."""
    assert outline(lowered(PRODUCTS[name], {"x": 2}, layouts, strict=True)) == ["kernel(A, B, C)"]
    torch.testing.assert_close(run(PRODUCTS[name], {"x": 2}, layouts, A, B), A @ B, rtol=1e-5, atol=1e-5)


def test_both_dims_over_two_axes():
    layouts = {"A": {"x": 0}, "B": {"y": 1}, "C": {"x": 0, "y": 1}}
    for name in ("persistent", "waves"):
        assert outline(lowered(PRODUCTS[name], {"x": 2, "y": 2}, layouts, strict=True)) == ["kernel(A, B, C)"]
        torch.testing.assert_close(run(PRODUCTS[name], {"x": 2, "y": 2}, layouts, A, B), A @ B, rtol=1e-5, atol=1e-5)


def test_a_reversed_reduction():
    with machine(1):
        steps = outline(lowered(PRODUCTS["reversed"], {"x": 2}, K))
    assert steps == ["kernel(A, B, C)", "all_reduce(C, sum, x)"]


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_in_every_layout(name):
    with machine(1):
        check(PRODUCTS[name], [A, B], A @ B, [{"x": 2, "y": 2}])


@pytest.mark.parametrize("start", ["row", "zero"])
def test_loops_whose_bounds_depend_on_the_row(start):
    """Every device walks the row's part of its own blocks."""
    s, v = torch.randn(15, 15), torch.randn(15, 6)
    func, expected = causal_product(15, 6, 4, start), (s.triu() if start == "row" else s.tril()) @ v
    with machine(1):
        steps = outline(lowered(func, {"x": 2}, {"S": {"x": 1}, "V": {"x": 0}}))
        assert steps == ["kernel(S, V, C)", "all_reduce(C, sum, x)"]
        check(func, [s, v], expected, [{"x": 2, "y": 2}])


def test_a_loop_from_the_row_on_stays_inside_its_tile():
    """The elements that it reads itself are seen to lie in the tile of every device."""

    @T.prim_func
    def kernel(A: T.Tensor((3, 16), "float32"), B: T.Tensor((3,), "float32")):
        with T.Kernel(1, threads=32):
            x, total = T.alloc_fragment((1, 2), "float32"), T.alloc_fragment((1,), "float32")
            for row in T.serial(3):
                T.clear(total)
                for ko in T.serial(row, 8):
                    for j in T.Parallel(2):
                        x[0, j] = A[row, ko * 2 + j]
                    T.reduce_sum(x, total, dim=1, clear=False)
                T.copy(total, B[row])

    a = torch.randn(3, 16)
    with machine(1):
        check(kernel, [a], torch.stack([a[row, 2 * row :].sum() for row in range(3)]), [{"x": 2}])


def rotated_rows(M, block=4):
    """`B = A`, from the third block of rows on, and the first two in the end."""
    blocks = -(-M // block)

    @T.prim_func
    def rotated(A: T.Tensor((M, 8), "float32"), B: T.Tensor((M, 8), "float32")):
        with T.Kernel(1, threads=32):
            for step in T.serial(blocks):
                T.copy(
                    A[(step + 2) % blocks * block : (step + 2) % blocks * block + block, :],
                    B[(step + 2) % blocks * block, 0],
                )

    return rotated


def test_the_local_kernel_skips_blocks():
    rows = {"A": {"x": 0}, "B": {"x": 0}}
    local = text(only_kernel(lowered(rotated_rows(32), {"x": 2}, rows)))
    assert "if (step + 2) % 8 - x * 4 >= 0 and (step + 2) % 8 - x * 4 < 4:" in local
    assert "A[((step + 2) % 8 - x * 4) * 4, 0]" in local
    whole = text(only_kernel(lowered(reversed_grid_scale(32, 8, 4), {"x": 2}, {"A": {"x": 1}, "B": {"x": 1}})))
    assert "one_iteration" not in whole
    assert "A[(7 - by) * 4, bx * 4]" in whole or "A[28 - by * 4, bx * 4]" in whole


def test_tiles_that_are_no_whole_blocks_are_made_so():
    x = torch.randn(13, 8)
    rows = {"A": {"x": 0}, "B": {"x": 0}}
    steps = outline(lowered(rotated_rows(13), {"x": 2}, rows))
    assert steps == ["halo(A, x)", "halo(B, x)", "kernel(A.1, B.1)", "halo(B.1, x)"]
    torch.testing.assert_close(run(rotated_rows(13), {"x": 2}, rows, x), x)


@pytest.mark.parametrize("M", [13, 32])
def test_blocks_from_the_last_to_the_first_are_those_of_the_tile(M):
    x, rows = torch.randn(M, 8), {"A": {"x": 0}, "B": {"x": 0}}
    made = lowered(backwards_rows(M, 8, 4), {"x": 2}, rows, strict=True)
    assert outline(made) == ["kernel(A, B)"]
    assert "for step in range(4):" in text(only_kernel(made)) or M == 13
    assert "mesh_tensor." not in text(only_kernel(made))
    torch.testing.assert_close(run(backwards_rows(M, 8, 4), {"x": 2}, rows, x), 2 * x)


N, BLOCK = 30, 4
BLOCKS = -(-N // BLOCK)


def over_blocks(body, programs=2):
    """`body(place, tile, ...)` for the blocks of X from the last one on, in two programs."""

    @T.prim_func
    def main(X: T.Tensor((N, 6), "float32"), Y: T.Tensor((N, 6), "float32"), S: T.Tensor((6,), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_fragment((BLOCK, 6), "float32")
            state = T.alloc_fragment((6,), "float32")
            counts = T.alloc_fragment((BLOCKS,), "float32")
            T.clear(state)
            T.clear(counts)
            for k in T.serial(BLOCKS * programs):
                body(X, Y, tile, state, counts, BLOCKS - 1 - k // programs, k)
            for j in T.Parallel(6):
                S[j] = state[j] + counts[2] * 10.0

    return main


X = torch.randn(N, 6)


def _plain(double=False):
    sums = X.sum(0) * (2 if double else 1)
    return X * 2, sums + (20.0 if double else 10.0)


def blocks_of_x():
    return X.split(BLOCK)


@T.macro
def _sums(X, Y, tile, state, counts, place, k):
    T.copy(X[place * BLOCK, 0], tile)
    T.reduce_sum(tile, state, dim=0, clear=False)
    counts[place] += 1.0
    for i, j in T.Parallel(BLOCK, 6):
        tile[i, j] = tile[i, j] * 2.0
    T.copy(tile, Y[place * BLOCK, 0])


@T.macro
def _decayed(X, Y, tile, state, counts, place, k):
    T.copy(X[place * BLOCK, 0], tile)
    for j in T.Parallel(6):
        state[j] = state[j] * 0.5 + tile[0, j]
    counts[place] += 1.0
    T.copy(tile, Y[place * BLOCK, 0])


@T.macro
def _last_block(X, Y, tile, state, counts, place, k):
    T.copy(X[place * BLOCK, 0], tile)
    for j in T.Parallel(6):
        state[j] = tile[1, j]
    counts[place] += 1.0
    T.copy(tile, Y[place * BLOCK, 0])


@T.macro
def _numbered(X, Y, tile, state, counts, place, k):
    T.copy(X[place * BLOCK, 0], tile)
    for i, j in T.Parallel(BLOCK, 6):
        tile[i, j] = tile[i, j] + place * 100.0 + k
    T.copy(tile, Y[place * BLOCK, 0])


@T.macro
def _mirrored(X, Y, tile, state, counts, place, k):
    T.copy(X[place * BLOCK, 0], tile)
    for i, j in T.Parallel(BLOCK, 6):
        if k * BLOCK + i < N:
            Y[k * BLOCK + i, j] = tile[i, j]


@T.macro
def _every_other(X, Y, tile, state, counts, place, k):
    if place % 2 == 0:
        T.copy(X[place * BLOCK, 0], tile)
        T.copy(tile, Y[place * BLOCK, 0])


def _expected_decay():
    state = torch.zeros(6)
    for part in reversed(blocks_of_x()):
        state = state * 0.5 + part[0]
    return X, state + 10.0


def _expected_numbers():
    numbers = torch.arange(N) // BLOCK
    return X + (numbers * 100.0 + BLOCKS - 1 - numbers)[:, None], torch.zeros(6)


def _expected_mirror():
    padded = torch.cat([X, torch.zeros(BLOCKS * BLOCK - N, 6)])
    return torch.cat(padded.split(BLOCK)[::-1])[:N], torch.zeros(6)


def _expected_half():
    return X * (torch.arange(N) // BLOCK % 2 == 0)[:, None], torch.zeros(6)


ADVERSARIES = {
    "sums and counts": (over_blocks(_sums, 1), _plain()),
    "blocks that come twice": (over_blocks(_sums, 2), _plain(double=True)),
    "a state in order": (over_blocks(_decayed, 1), _expected_decay()),
    "the last block's value": (over_blocks(_last_block, 1), (X, X[1] + 10.0)),
    "numbers of blocks": (over_blocks(_numbered, 1), _expected_numbers()),
    "two orders": (over_blocks(_mirrored, 1), _expected_mirror()),
    "blocks that are left out": (over_blocks(_every_other, 1), _expected_half()),
}


@pytest.mark.parametrize("name", ADVERSARIES)
def test_adversaries_in_every_layout(name):
    func, expected = ADVERSARIES[name]
    with machine(1):
        check(func, [X], expected, [{"x": 2}])


def test_what_depends_on_the_order_is_not_split():
    for name in ("a state in order", "the last block's value", "two orders"):
        with machine(1):
            steps = outline(lowered(ADVERSARIES[name][0], {"x": 2}, {"X": {"x": 0}}))
        assert steps[0] == "all_gather(X, dim 0, x)"
