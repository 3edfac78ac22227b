"""Blocks on chip with more rows than count, as padded blocks of heads: what is behind those that count is dropped, and
never stands for anything."""

import pytest
import tilelang.language as T
import torch
from tvm import tirx

from kernels.grouped_query import grouped_decode, grouped_decode_reference
from mesh_tensor.tir.tile_calls import parse_tile_op

from .support import assert_right, lowered, nodes, only_kernel, outline

ROWS, WIDTH = 12, 5
PER_BLOCK, PADDED = 3, 8
SPLIT = {"A": {"x": 0}, "out": {"x": 0}}


def padded(body):
    """`out` is made of blocks of three rows of `A`, each in a block of eight on chip; `body(block, out, bx)` computes
    it of the block."""

    @T.prim_func
    def kernel(A: T.Tensor((ROWS, WIDTH), "float32"), out: T.Tensor((ROWS, WIDTH), "float32")):
        with T.Kernel(ROWS // PER_BLOCK, threads=32) as bx:
            block = T.alloc_shared((PADDED, WIDTH), "float32")
            T.copy(A[bx * PER_BLOCK : bx * PER_BLOCK + PADDED, :], block)
            body(block, out, bx)

    return kernel


@T.macro
def doubled(block, out, bx):
    twice = T.alloc_fragment((PADDED, WIDTH), "float32")
    for i, j in T.Parallel(PADDED, WIDTH):
        twice[i, j] = block[i, j] * 2
    T.copy(twice[0:PER_BLOCK, :], out[bx * PER_BLOCK : (bx + 1) * PER_BLOCK, :])


@T.macro
def guarded(block, out, bx):
    twice = T.alloc_fragment((PADDED, WIDTH), "float32")
    for i, j in T.Parallel(PADDED, WIDTH):
        twice[i, j] = block[i, j] * 2
    for i, j in T.Parallel(PADDED, WIDTH):
        if i < PER_BLOCK:
            out[bx * PER_BLOCK + i, j] = twice[i, j]


@T.macro
def all_rows_count(block, out, bx):
    total = T.alloc_fragment((WIDTH,), "float32")
    T.reduce_sum(block, total, dim=0)
    for i, j in T.Parallel(PER_BLOCK, WIDTH):
        out[bx * PER_BLOCK + i, j] = block[i, j] + total[j]


@T.macro
def next_row_counts(block, out, bx):
    for i, j in T.Parallel(PER_BLOCK, WIDTH):
        out[bx * PER_BLOCK + i, j] = block[i, j] + block[i + 1, j]


@T.macro
def last_row_counts(block, out, bx):
    for i, j in T.Parallel(PER_BLOCK, WIDTH):
        out[bx * PER_BLOCK + i, j] = block[i, j] - block[PADDED - 1, j]


@T.macro
def row_by_data(block, out, bx):
    for i, j in T.Parallel(PER_BLOCK, WIDTH):
        out[bx * PER_BLOCK + i, j] = block[T.if_then_else(block[i, j] > 0, PADDED - 1, i), j]


@T.macro
def moved_before_use(block, out, bx):
    moved = T.alloc_fragment((PADDED, WIDTH), "float32")
    for i, j in T.Parallel(PADDED, WIDTH):
        moved[PADDED - 1 - i, j] = block[i, j]
    T.copy(moved[0:PER_BLOCK, :], out[bx * PER_BLOCK : (bx + 1) * PER_BLOCK, :])


@T.macro
def counted(block, out, bx):
    count = T.alloc_fragment((1,), "float32")
    count[0] = 0.0
    for i in T.serial(PADDED):
        if block[i, 0] > 0:
            count[0] += 1.0
    for i, j in T.Parallel(PER_BLOCK, WIDTH):
        out[bx * PER_BLOCK + i, j] = block[i, j] * count[0]


@T.macro
def square(block, out, bx):
    """Rows and columns of one product: padded on both sides."""
    across = T.alloc_shared((PADDED, WIDTH), "float32")
    products = T.alloc_fragment((PADDED, PADDED), "float32")
    T.copy(block, across)
    T.gemm(block, across, products, transpose_B=True, clear_accum=True)
    for i, j in T.Parallel(PER_BLOCK, PER_BLOCK):
        out[bx * PER_BLOCK + i, j] = products[i, j]
    for i, j in T.Parallel(PER_BLOCK, WIDTH - PER_BLOCK):
        out[bx * PER_BLOCK + i, PER_BLOCK + j] = block[i, j]


@T.macro
def seen_flat(block, out, bx):
    flat = T.view(block, (PADDED * WIDTH,))
    for i, j in T.Parallel(PER_BLOCK, WIDTH):
        out[bx * PER_BLOCK + i, j] = flat[(PADDED - 1 - i) * WIDTH + j]


@T.macro
def carried_from_the_last(block, out, bx):
    acc = T.alloc_fragment((PADDED, WIDTH), "float32")
    T.clear(acc)
    for i in T.serial(PADDED - 1):
        for j in T.Parallel(WIDTH):
            acc[PADDED - 2 - i, j] = acc[PADDED - 1 - i, j] + block[PADDED - 1 - i, j]
    for i, j in T.Parallel(PER_BLOCK, WIDTH):
        out[bx * PER_BLOCK + i, j] = acc[i, j]


@T.macro
def last_that_holds(block, out, bx):
    flag = T.alloc_fragment((1,), "int32")
    flag[0] = 0
    for i in T.serial(PADDED):
        with T.If(block[i, 0] > 1.0), T.Then():
            flag[0] = i
    for i, j in T.Parallel(PER_BLOCK, WIDTH):
        out[bx * PER_BLOCK + i, j] = block[i, j] + T.cast(flag[0], "float32")


@T.macro
def as_far_as_it_holds(block, out, bx):
    n = T.alloc_var("int32")
    n = 0
    while n < PADDED - 1 and block[n, 0] < 0.5:
        n += 1
    for i, j in T.Parallel(PER_BLOCK, WIDTH):
        out[bx * PER_BLOCK + i, j] = block[i, j] + T.cast(n, "float32")


@T.macro
def largest_in_a_variable(block, out, bx):
    m = T.alloc_var("float32")
    m = -1e9
    for i in T.serial(PADDED):
        m = T.max(m, block[i, 1])
    for i, j in T.Parallel(PER_BLOCK, WIDTH):
        out[bx * PER_BLOCK + i, j] = block[i, j] + m


@T.macro
def totals_from_the_last(block, out, bx):
    c = T.alloc_shared((PADDED, WIDTH), "float32")
    T.copy(block, c)
    T.cumsum(c, dim=0, reverse=True)
    for i, j in T.Parallel(PER_BLOCK, WIDTH):
        out[bx * PER_BLOCK + i, j] = c[i, j]


def _moved(block):
    return block.flip(0)[:PER_BLOCK]


def _square(block):
    return torch.cat([(block @ block.T)[:PER_BLOCK, :PER_BLOCK], block[:PER_BLOCK, : WIDTH - PER_BLOCK]], 1)


def _totals(block):
    return block.flip(0).cumsum(0).flip(0)


def _last_that_holds(block):
    return block[:PER_BLOCK] + max((i for i in range(PADDED) if block[i, 0] > 1), default=0)


def _as_far_as_it_holds(block):
    return block[:PER_BLOCK] + next((i for i in range(PADDED - 1) if block[i, 0] >= 0.5), PADDED - 1)


def _by_data(block):
    return torch.where(block > 0, block[-1], block)[:PER_BLOCK]


#: What a program computes, and that of eight rows in torch.
BODIES = {
    "doubled": (doubled, lambda block: 2 * block[:PER_BLOCK]),
    "guarded": (guarded, lambda block: 2 * block[:PER_BLOCK]),
    "square": (square, _square),
    "all rows count": (all_rows_count, lambda block: block[:PER_BLOCK] + block.sum(0)),
    "the next row counts": (next_row_counts, lambda block: block[:PER_BLOCK] + block[1 : PER_BLOCK + 1]),
    "the last row counts": (last_row_counts, lambda block: block[:PER_BLOCK] - block[-1]),
    "rows by data": (row_by_data, _by_data),
    "rows in another order": (moved_before_use, _moved),
    "rows are counted": (counted, lambda block: block[:PER_BLOCK] * (block[:, 0] > 0).sum()),
    "a flat view": (seen_flat, lambda block: block.flip(0)[:PER_BLOCK]),
    "a row is made of the next": (carried_from_the_last, lambda block: _totals(block)[:PER_BLOCK] - block[:PER_BLOCK]),
    "a guard reads rows": (last_that_holds, _last_that_holds),
    "a loop goes on by rows": (as_far_as_it_holds, _as_far_as_it_holds),
    "a variable has seen all": (largest_in_a_variable, lambda block: block[:PER_BLOCK] + block[:, 1].max()),
    "running sums": (totals_from_the_last, lambda block: _totals(block)[:PER_BLOCK]),
}


@pytest.mark.parametrize("what", BODIES)
def test_what_padded_blocks_give(what):
    body, reference = BODIES[what]

    def expected(a):
        blocks = torch.cat([a, torch.zeros(PADDED, WIDTH)]).unfold(0, PADDED, PER_BLOCK)[: ROWS // PER_BLOCK]
        return torch.cat([reference(block.T) for block in blocks])

    func = padded(body)
    for devices in (1, 2, 3, 5):
        a = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(devices))
        assert_right(func, {"x": devices}, SPLIT, [a], expected)


@pytest.mark.parametrize("what", ["doubled", "guarded", "square"])
def test_rows_that_are_dropped_are_not_gathered(what):
    assert outline(lowered(padded(BODIES[what][0]), {"x": 2}, SPLIT, strict=True)) == ["kernel(A, out)"]


def test_blocks_stay_as_long_as_they_were():
    local = only_kernel(lowered(padded(guarded), {"x": 2}, SPLIT))
    shapes = {
        b.name: [int(size) for size in b.shape] for block in nodes(local, tirx.SBlock) for b in block.alloc_buffers
    }
    assert shapes == {"block": [PADDED, WIDTH], "twice": [PADDED, WIDTH]}
    copies = [op for op in map(parse_tile_op, nodes(local, tirx.Evaluate)) if op is not None]
    assert [[int(extent) for extent in copy.dst.extents] for copy in copies] == [[PADDED, WIDTH]]
    # what is stored of a row is stored of those that count only: its neighbours are other programs'
    assert sorted(int(loop.extent) for loop in nodes(local, tirx.For) if loop.loop_var.name == "i") == [
        PER_BLOCK,
        PADDED,
    ]


def test_padded_blocks_of_heads_move_no_keys():
    sizes = {"batch": 2, "heads": 8, "groups": 4, "seq": 16, "dim": 8}
    func = grouped_decode(**sizes, block_N=8, rows=8)
    split = {"Q": {"x": 1}, "K": {"x": 2}, "V": {"x": 2}, "Out": {"x": 1}}
    q, k, v = (torch.randn(2, *shape) for shape in ((8, 8), (16, 4, 8), (16, 4, 8)))
    assert outline(lowered(func, {"x": 2}, split, strict=True)) == ["kernel(Q, K, V, lengths, Out)"]
    for devices in (2, 3):
        assert_right(func, {"x": devices}, split, [q, k, v, torch.tensor([16, 9]).int()], grouped_decode_reference)
