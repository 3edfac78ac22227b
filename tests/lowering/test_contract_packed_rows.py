"""Rows at places that data names, one or a block of them: read, and written, on the device that has them."""

from itertools import pairwise

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.packed import packed_attention, packed_attention_reference
from kernels.rope import packed_rope
from kernels.sparse import searched_grouped_matmul, searched_grouped_matmul_reference
from tests.other_machines import machine

from .every_layout import check
from .support import lowered, outline, run

ROWS, DIM = 7, 5
ROWS_OF = torch.tensor([0, 5, 5, -1, 7, 6, 99, 2]).int()  # row 5 twice, and three that there are not


def written(body, rows=ROWS):
    """What `body` makes of the row of A that a table names for a program; Out is written there, too."""

    @T.prim_func
    def kernel(
        A: T.Tensor((rows, DIM), "float32"),
        table: T.Tensor((8,), "int32"),
        Out: T.Tensor((rows, DIM), "float32"),
    ):
        with T.Kernel(8, threads=32) as bx:
            row = T.alloc_shared((DIM,), "float32")
            T.copy(A[table[bx], 0], row)
            body(A, table, Out, row, bx)

    return kernel


@T.macro
def copied(A, table, Out, row, bx):
    for j in T.Parallel(DIM):
        row[j] = row[j] * 2 + bx
    T.copy(row, Out[table[bx], 0])


@T.macro
def stored(A, table, Out, row, bx):
    for j in T.Parallel(DIM):
        Out[table[bx], j] = row[j] * 2 + bx


@T.macro
def added(A, table, Out, row, bx):
    for j in T.Parallel(DIM):
        Out[table[bx], j] += row[j] * 2 + bx


def expected(a, adds=False):
    """Program by program, as the kernel says it."""
    out = torch.zeros(ROWS, DIM)
    for n, at in enumerate(ROWS_OF.tolist()):
        if 0 <= at < ROWS:
            out[at] = a[at] * 2 + n + (out[at] if adds else 0)
    return out


@pytest.mark.parametrize("body", [copied, stored, added], ids=["copied", "stored", "added"])
def test_rows_are_read_and_written_where_they_lie(body):
    a, layouts = torch.randn(ROWS, DIM), {"A": {"x": 0}, "Out": {"x": 0}}
    assert outline(lowered(written(body), {"x": 3}, layouts, strict=True)) == ["kernel(A, table, Out)"]
    check(written(body), [a, ROWS_OF], expected(a, adds=body is added))


@T.macro
def by_its_row(A, table, Out, row, bx):
    for n in T.serial(T.cast(A[table[bx], 0], "int32")):
        if A[table[bx], n] > 0:
            for j in T.Parallel(DIM):
                row[j] = row[j] * 2 + A[table[bx], n] + bx
    T.copy(row, Out[table[bx], 0])


@T.macro
def told_elsewhere(A, table, Out, row, bx):
    for j in T.Parallel(DIM):
        row[j] = row[j] + A[table[bx], T.cast(A[table[bx], 0], "int32")]
    T.copy(row, Out[table[bx], 0])
    Out[bx % ROWS, 1] = row[0]


@T.macro
def asserted(A, table, Out, row, bx):
    T.device_assert(table[bx] >= 0, "a row of the table")
    T.copy(row, Out[table[bx], 0])


def test_programs_of_no_row_still_assert():
    a, rows = torch.randn(ROWS, DIM), torch.tensor([0, 1, 2, 3, -1, 4, 5, 6]).int()
    with machine(1), pytest.raises(mt.MeshTensorError, match="a row of the table"):
        run(written(asserted), {"x": 3}, {"A": {"x": 0}, "Out": {"x": 0}}, a, rows, torch.zeros(ROWS, DIM))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_a_row_says_decides_what_its_program_does(elsewhere):
    """Rows that are none of the table are of programs that write nothing."""
    a, result = torch.randn(ROWS, DIM), torch.zeros(ROWS, DIM)
    a[:, 0] = torch.arange(ROWS) % (DIM - 1)
    body = told_elsewhere if elsewhere else by_its_row
    rows = torch.tensor([0, 5, 5, 3, 2, 6, 4, 2]).int() if elsewhere else ROWS_OF
    for n, at in enumerate(rows.tolist()):
        if not 0 <= at < ROWS:
            continue
        said, row = int(a[at, 0]), a[at].clone()
        if elsewhere:
            result[at] = row + a[at, said]
            result[n % ROWS, 1] = result[at, 0]
        else:
            for k in range(said):
                row = row * 2 + a[at, k] + n if a[at, k] > 0 else row
            result[at] = row
    layouts = {"A": {"x": 0}, "Out": {"x": 0}}
    with machine(1):
        assert (outline(lowered(written(body), {"x": 3}, layouts)) == ["kernel(A, table, Out)"]) != elsewhere
        got = run(written(body), {"x": 3}, layouts, a, rows, torch.zeros(ROWS, DIM))
    torch.testing.assert_close(got, result, rtol=1e-5, atol=1e-5)


def test_packed_tokens_stay():
    func = packed_rope(8, 3, 4, 2, 4)
    rows = {"x": {"x": 0}, "out": {"x": 0}}
    assert len(outline(lowered(func, {"x": 2}, rows, strict=True))) == 1


@T.macro
def from_the_row_before(A, table, Out, row, bx):
    T.copy(row, Out[table[(bx + 1) % 8], 0])


@T.macro
def cleared_elsewhere(A, table, Out, row, bx):
    for j in T.Parallel(DIM):
        Out[(bx + 1) % ROWS, j] = 0.0
    T.copy(row, Out[table[bx], 0])


def test_rows_that_go_elsewhere_move():
    """A row that is read in one place and written in another, and one that is written in two."""
    a = torch.randn(ROWS, DIM)
    moved, cleared = torch.zeros(ROWS, DIM), torch.zeros(ROWS, DIM)
    for n, at in enumerate(ROWS_OF.tolist()):
        row, to = (a[at] if 0 <= at < ROWS else torch.zeros(DIM)), ROWS_OF.tolist()[(n + 1) % 8]
        if 0 <= to < ROWS:
            moved[to] = row
        cleared[(n + 1) % ROWS] = 0.0
        if 0 <= at < ROWS:
            cleared[at] = row
    for body, result in ((from_the_row_before, moved), (cleared_elsewhere, cleared)):
        with machine(1):
            steps = outline(lowered(written(body), {"x": 3}, {"A": {"x": 0}, "Out": {"x": 0}}))
            assert len(steps) > 1, steps
            check(written(body), [a, ROWS_OF], result)


def test_a_longer_table_has_rows_where_the_other_has_none():
    """Row 50 is none of A, and one of S: it is read there all the same."""

    @T.prim_func
    def kernel(
        A: T.Tensor((ROWS, DIM), "float32"),
        S: T.Tensor((100, DIM), "float32"),
        table: T.Tensor((2, 4), "int32"),
        Out: T.Tensor((2, DIM), "float32"),
    ):
        with T.Kernel(2, threads=32) as bx:
            row, more = T.alloc_shared((DIM,), "float32"), T.alloc_shared((DIM,), "float32")
            total = T.alloc_fragment((DIM,), "float32")
            T.clear(total)
            for k in T.serial(4):
                T.copy(A[table[bx, k], 0], row)
                T.copy(S[table[bx, k], 0], more)
                for j in T.Parallel(DIM):
                    total[j] += row[j] * 2 + more[j]
            T.copy(total, Out[bx, 0])

    a, s, table = torch.randn(ROWS, DIM), torch.randn(100, DIM), torch.tensor([[0, 50, 6, -1], [7, 99, 3, 100]]).int()
    longer = torch.cat([a, torch.zeros(93, DIM)]) * 2 + s
    inside = ((table >= 0) & (table < 100))[..., None]
    result = (longer[table.clamp(0, 99).long()] * inside).sum(1)
    with machine(1):
        steps = outline(lowered(kernel, {"x": 2}, {"A": {"x": 0}}))
        assert steps == ["kernel(A, S, table, Out)", "all_reduce(Out, sum, x)"]
        torch.testing.assert_close(run(kernel, {"x": 2}, {"A": {"x": 0}}, a, s, table), result, rtol=1e-5, atol=1e-5)
        check(kernel, [a, s, table], result)


def sought(how):
    """Two rows of A, doubled, that every program seeks in a table."""

    @T.prim_func
    def kernel(
        A: T.Tensor((ROWS, DIM), "float32"),
        table: T.Tensor((8,), "int32"),
        Out: T.Tensor((ROWS, DIM), "float32"),
    ):
        with T.Kernel(8, threads=32) as bx:
            row = T.alloc_shared((2, DIM), "float32")
            at = T.alloc_var("int32")
            at = 0
            for n in T.serial(8):
                at = T.if_then_else(n <= bx, table[n], at)
            T.copy(A[at, 0], row)
            if how == "moved on":
                at = (at + 1) % ROWS
            for i, j in T.Parallel(2, DIM):
                row[i, j] = row[i, j] * 2 + bx
            T.copy(row, Out[at, 0])

    return kernel


@pytest.mark.parametrize("how", ["kept", "moved on"])
def test_rows_at_places_that_programs_seek(how):
    a, layouts, result = torch.randn(ROWS, DIM), {"A": {"x": 0}, "Out": {"x": 0}}, torch.zeros(ROWS, DIM)
    for n, at in enumerate(ROWS_OF.tolist()):
        moved = (at + 1) % ROWS if how == "moved on" else at
        for row, to in ((at, moved), (at + 1, moved + 1)):
            if 0 <= to < ROWS:
                result[to] = (a[row] if 0 <= row < ROWS else torch.zeros(DIM)) * 2 + n
    with machine(1):
        assert (outline(lowered(sought(how), {"x": 3}, layouts)) == ["kernel(A, table, Out)"]) == (how == "kept")
        got = run(sought(how), {"x": 3}, layouts, a, ROWS_OF, torch.zeros(ROWS, DIM))
    torch.testing.assert_close(got, result, rtol=1e-5, atol=1e-5)


def test_rows_of_groups_that_programs_seek_stay():
    func, counts = searched_grouped_matmul(3, 40, 24, 32), torch.tensor([7, 0, 33]).int()
    a, b = torch.randn(40, 32), torch.randn(3, 32, 24)
    steps = outline(lowered(func, {"x": 3}, {"A": {"x": 0}, "C": {"x": 0}}, strict=True))
    assert steps == ["kernel(A, B, counts, C)"]
    got = run(func, {"x": 3}, {"A": {"x": 0}, "C": {"x": 0}}, a, b, counts)
    torch.testing.assert_close(got, searched_grouped_matmul_reference(a, b, counts), rtol=1e-5, atol=1e-5)


STARTS = torch.tensor([0, 5, 6, 13]).int()


def test_blocks_of_packed_rows():
    """Sequences of 5, 1 and 7 rows, in blocks of 4 that start anywhere; tiles of 7 and 6, or 5, 5 and 3 rows."""
    func, layouts = packed_attention(13, 3, 7, 5, block=4), {"Q": {"x": 0}, "Out": {"x": 0}}
    q, k, v = torch.randn(3, 13, 5)
    for devices in (2, 3):
        assert outline(lowered(func, {"x": devices}, layouts, strict=True)) == ["kernel(Q, K, V, starts, Out)"]
    check(func, [q, k, v, STARTS], packed_attention_reference(q, k, v, STARTS))


def blocks(body):
    """What `body` makes of blocks of 4 rows, of sequences that start where a table says."""

    @T.prim_func
    def kernel(
        A: T.Tensor((13, DIM), "float32"),
        starts: T.Tensor((4,), "int32"),
        Out: T.Tensor((13, DIM), "float32"),
        Sum: T.Tensor((DIM,), "float32"),
    ):
        with T.Kernel(2, 3, threads=32) as (bx, by):
            own, made = T.alloc_shared((4, DIM), "float32"), T.alloc_fragment((4, DIM), "float32")
            kept, one = T.alloc_fragment((4,), "float32"), T.alloc_fragment((DIM,), "float32")
            first = starts[by] + bx * 4
            for i, j in T.Parallel(4, DIM):
                own[i, j] = A[first + i, j]
            body(A, Sum, own, made, kept, one, first, by)
            for i, j in T.Parallel(4, DIM):
                if first + i < starts[by + 1]:
                    Out[first + i, j] = made[i, j]

    return kernel


@T.macro
def twice(A, Sum, own, made, kept, one, first, by):
    for i, j in T.Parallel(4, DIM):
        made[i, j] = own[i, j] * 2


@T.macro
def by_their_sums(A, Sum, own, made, kept, one, first, by):
    T.reduce_sum(own, kept, dim=1)
    for i, j in T.Parallel(4, DIM):
        made[i, j] = T.if_then_else(kept[i] > 0, own[i, j], -kept[i])


@T.macro
def the_next_one(A, Sum, own, made, kept, one, first, by):
    for i, j in T.Parallel(4, DIM):
        made[i, j] = own[(i + 1) % 4, j]


@T.macro
def all_of_a_block(A, Sum, own, made, kept, one, first, by):
    T.reduce_sum(own, one, dim=0)
    for i, j in T.Parallel(4, DIM):
        made[i, j] = one[j]


@T.macro
def another_row(A, Sum, own, made, kept, one, first, by):
    for i, j in T.Parallel(4, DIM):
        made[i, j] = own[i, j] + A[by + i, j]


@T.macro
def summed_up(A, Sum, own, made, kept, one, first, by):
    for i, j in T.Parallel(4, DIM):
        made[i, j] = own[i, j]
        T.atomic_add(Sum[j], own[i, j])


@T.macro
def columns_for_rows(A, Sum, own, made, kept, one, first, by):
    for i, j in T.Parallel(4, 4):
        made[i, j] = own[j, i]
    for i in T.Parallel(4):
        made[i, 4] = 0.0


@T.macro
def as_often_as_it_says(A, Sum, own, made, kept, one, first, by):
    T.clear(made)
    for i in T.Parallel(4):
        for k in T.serial(T.cast(own[i, 0] * own[i, 0], "int32")):
            for j in T.serial(DIM):
                made[i, j] += k


def _flipped(own):
    return torch.cat([own[:, :4].T, torch.zeros(4, 1)], 1)


def _sum_below(own):
    count = (own[:, :1] ** 2).int()
    return (count * (count - 1) // 2).float().expand(-1, DIM)


#: What a block of 4 rows becomes, of A that 0 rows follow, and whether devices need no rows of others for that.
BODIES = [
    (twice, lambda own, a, by: own * 2, True),
    (by_their_sums, lambda own, a, by: own.where(own.sum(1, keepdim=True) > 0, -own.sum(1, keepdim=True)), True),
    (the_next_one, lambda own, a, by: own.roll(-1, 0), False),
    (all_of_a_block, lambda own, a, by: own.sum(0, keepdim=True).expand(4, -1), False),
    (another_row, lambda own, a, by: own + a[by : by + 4], False),
    (summed_up, lambda own, a, by: own, False),
    (columns_for_rows, lambda own, a, by: _flipped(own), False),
    (as_often_as_it_says, lambda own, a, by: _sum_below(own), False),
]


@pytest.mark.parametrize(("body", "made", "stays"), BODIES, ids=[str(n) for n in range(len(BODIES))])
def test_rows_stay_where_nothing_else_is_made_of_them(body, made, stays):
    a, out, total = torch.randn(13, DIM), torch.zeros(13, DIM), torch.zeros(DIM)
    padded = torch.cat([a, torch.zeros(8, DIM)])
    for by, (low, high) in enumerate(pairwise(STARTS.tolist())):
        for first in (low, low + 4):
            own, end = padded[first : first + 4], max(first, min(first + 4, high))
            out[first:end] = made(own, padded, by)[: end - first]
            total += own.sum(0)
    rows = {"A": {"x": 0}, "Out": {"x": 0}}
    with machine(1):
        steps = outline(lowered(blocks(body), {"x": 2}, rows))
        assert (steps == ["kernel(A, starts, Out, Sum)"]) == stays, steps
        results = (out, total) if body is summed_up else out
        check(blocks(body), [a, STARTS], results, [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}])


@pytest.mark.parametrize("rows", [13, 17])
def test_tensors_of_other_lengths_lie_otherwise(rows):
    """Row 6 of 13 is on the first of 2 devices, of 17 as well, but row 7 is not."""

    @T.prim_func
    def kernel(
        A: T.Tensor((rows, DIM), "float32"), starts: T.Tensor((4,), "int32"), Out: T.Tensor((13, DIM), "float32")
    ):
        with T.Kernel(2, 3, threads=32) as (bx, by):
            for i, j in T.Parallel(4, DIM):
                if bx * 4 + i < starts[by + 1] - starts[by]:
                    Out[starts[by] + bx * 4 + i, j] = A[starts[by] + bx * 4 + i, j] * 2

    a, layouts = torch.randn(rows, DIM), {"A": {"x": 0}, "Out": {"x": 0}}
    assert (len(outline(lowered(kernel, {"x": 2}, layouts))) == 1) == (rows == 13)
    check(kernel, [a, STARTS], a[:13] * 2, [{"x": 2}, {"x": 3}])
