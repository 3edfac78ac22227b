"""Clause 9: tables that are indexed by data, and results that are scattered into, with their rows split: every device
does what falls into its tile."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.embedding import embedding
from tests.kernels.adversarial.neighbours import histogram, scatter_rows
from tests.other_machines import AT_ONCE, planned_for

from .support import assert_right, lowered, outline

ROWS, TOKENS, WIDTH = 500, 13, 7
MESHES = [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}]
TABLE = {"ids": {}, "table": {"x": 0}, "out": {}}
SPLIT = {"ids": {"x": 0}, "table": {"x": 0}, "out": {"x": 0}}


@pytest.fixture(autouse=True)
def _no_start():
    """Collectives start at once, so that small tables are worth it."""
    with planned_for(AT_ONCE):
        yield


def row_copies(block=4):
    """`out[t, :] = table[ids[t], :]`, row by row through a block on chip."""

    @T.prim_func
    def kernel(
        ids: T.Tensor((TOKENS,), "int32"),
        table: T.Tensor((ROWS, WIDTH), "float32"),
        out: T.Tensor((TOKENS, WIDTH), "float32"),
    ):
        with T.Kernel(T.ceildiv(TOKENS, block), threads=128) as bx:
            rows = T.alloc_shared((block, WIDTH), "float32")
            for i in T.serial(block):
                if bx * block + i < TOKENS:
                    T.copy(table[ids[bx * block + i], 0:WIDTH], rows[i, 0:WIDTH])
            T.copy(rows, out[bx * block, 0])

    return kernel


def bags(op, per_bag=5, block=4):
    """`out[t, :]` combines `table[ids[t, l], :]` over l, doubled and less 1."""

    @T.prim_func
    def kernel(
        ids: T.Tensor((TOKENS, per_bag), "int32"),
        table: T.Tensor((ROWS, WIDTH), "float32"),
        out: T.Tensor((TOKENS, WIDTH), "float32"),
    ):
        with T.Kernel(T.ceildiv(TOKENS, block), threads=128) as bx:
            acc = T.alloc_fragment((block, WIDTH), "float32")
            T.fill(acc, 0.0 if op == "sum" else -T.infinity("float32"))
            for n in T.serial(per_bag):
                for i, j in T.Parallel(block, WIDTH):
                    if bx * block + i < TOKENS:
                        if op == "sum":
                            acc[i, j] += table[ids[bx * block + i, n], j] * 2 - 1
                        else:
                            acc[i, j] = T.max(acc[i, j], table[ids[bx * block + i, n], j] * 2 - 1)
            T.copy(acc, out[bx * block, 0])

    return kernel


def bag_reference(ids, table, op):
    found = table[ids.long()] * 2 - 1
    return found.sum(1) if op == "sum" else found.amax(1)


def ids_and_table(*shape):
    return [torch.randint(0, ROWS, shape or (TOKENS,)).int(), torch.randn(ROWS, WIDTH)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("layouts", [TABLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("make", [lambda: embedding(TOKENS, ROWS, WIDTH, 8, 8), row_copies], ids=["stores", "copies"])
def test_rows(make, layouts, mesh):
    kinds = [line.partition("(")[0] for line in outline(lowered(make(), mesh, layouts))]
    assert "all_reduce" in kinds or "reduce_scatter" in kinds
    assert_right(make(), mesh, layouts, ids_and_table(), lambda ids, table: table[ids.long()], rtol=0, atol=0)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_bags(op, mesh):
    assert outline(lowered(bags(op), mesh, TABLE))[1:] == [f"all_reduce(out, {op}, x)"]
    inputs = ids_and_table(TOKENS, 5)
    assert_right(bags(op), mesh, TABLE, inputs, lambda ids, table: bag_reference(ids, table, op))


def test_what_moves_is_the_result():
    func = embedding(TOKENS, ROWS, WIDTH, 8, 8)
    kernel = mt.compile(mt.annotate(func, {"x": 2}, TABLE), target="interpret")
    (step,) = kernel.program.collectives
    assert (step.kind, step.bytes) == ("all_reduce", TOKENS * WIDTH * 4)
    assert "table[k, n]" in kernel.explain()


def test_a_small_table_is_gathered():
    """Whatever is less: here all of the table is."""
    func = embedding(TOKENS * 40, 20, WIDTH, 8, 8)
    assert outline(lowered(func, {"x": 2}, TABLE)) == ["all_gather(table, dim 0, x)", "kernel(ids, table.1, out)"]


@pytest.mark.parametrize("target", ["interpret", "c"])
def test_ids_out_of_range_give_what_one_device_gives(target):
    func, (ids, table) = embedding(TOKENS, ROWS, WIDTH, 8, 8), ids_and_table()
    ids[3], ids[4], ids[5] = ROWS, -2, 2**31 - 1
    results = [
        mt.compile(mt.annotate(func, mesh, TABLE), target=target)(ids, table) for mesh in ({"x": 1}, {"x": 2}, {"x": 3})
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_infinite_factors_count_where_the_row_is():
    """0 of another device times infinity would be no number."""

    @T.prim_func
    def kernel(
        ids: T.Tensor((TOKENS,), "int32"),
        table: T.Tensor((ROWS,), "float32"),
        scale: T.Tensor((TOKENS,), "float32"),
        out: T.Tensor((TOKENS,), "float32"),
    ):
        with T.Kernel(TOKENS, threads=1) as bx:
            out[bx] = T.exp(table[ids[bx]] * scale[bx])

    ids, table = torch.randint(0, ROWS, (TOKENS,)).int(), torch.randn(ROWS)
    scale = torch.full((TOKENS,), torch.inf)
    expected = (table[ids.long()] * scale).exp()
    assert "all_reduce(out, sum, x)" in outline(lowered(kernel, {"x": 2}, TABLE))
    assert_right(kernel, {"x": 2}, TABLE, [ids, table, scale], lambda *_: expected)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_bins(mesh):
    """Every device counts what falls into its bins: nothing moves."""
    func, layouts = histogram(37, 11), {"ids": {}, "counts": {"x": 0}}
    assert outline(lowered(func, mesh, layouts)) == ["kernel(ids, counts)"]
    ids, counts = torch.randint(0, 11, (37,)).int(), torch.randint(0, 9, (11,)).int()
    expected = counts + torch.bincount(ids, minlength=11).int()
    mt.compile(mt.annotate(func, mesh, layouts), target="interpret", poison=True)(ids, counts)
    assert torch.equal(counts, expected)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_scattered_rows(mesh):
    """Rows that nothing is scattered into stay as they were."""
    func, layouts = scatter_rows(6, 13), {"ids": {}, "x": {}, "out": {"x": 0}}
    assert outline(lowered(func, mesh, layouts)) == ["kernel(ids, x, out)"]
    ids, x, out = torch.randperm(12)[:6].int(), torch.randn(6, 13), torch.randn(12, 13)
    expected = out.index_copy(0, ids.long(), x)
    mt.compile(mt.annotate(func, mesh, layouts), target="interpret", poison=True)(ids, x, out)
    assert torch.equal(out, expected)


# -- what can't be done so ---------------------------------------------------------------------------------------------


def two_rows():
    """Made of two rows at once: no device has both."""

    @T.prim_func
    def kernel(ids: T.Tensor((12,), "int32"), table: T.Tensor((ROWS,), "float32"), out: T.Tensor((6,), "float32")):
        with T.Kernel(6, threads=1) as bx:
            out[bx] = table[ids[2 * bx]] * table[ids[2 * bx + 1]]

    return kernel


def chased():
    """`out[i] = table[table[ids[i]]]`."""

    @T.prim_func
    def kernel(ids: T.Tensor((12,), "int32"), table: T.Tensor((ROWS,), "int32"), out: T.Tensor((12,), "int32")):
        with T.Kernel(12, threads=1) as bx:
            out[bx] = table[table[ids[bx]]]

    return kernel


def conditional():
    """Whether something is stored depends on the table."""

    @T.prim_func
    def kernel(ids: T.Tensor((12,), "int32"), table: T.Tensor((ROWS,), "int32"), out: T.Tensor((12,), "int32")):
        with T.Kernel(12, threads=1) as bx:
            out[bx] = 0
            if table[ids[bx]] > ROWS // 2:
                out[bx] = table[ids[bx]]

    return kernel


@pytest.mark.parametrize("make", [two_rows, chased, conditional], ids=lambda make: make.__name__)
def test_tables_that_are_needed_whole(make):
    func = make()
    assert outline(lowered(func, {"x": 2}, TABLE)) == ["all_gather(table, dim 0, x)", "kernel(ids, table.1, out)"]
    ids = torch.randint(0, ROWS, (12,)).int()
    table = torch.randn(ROWS) if make is two_rows else torch.randint(0, ROWS, (ROWS,)).int()
    one = mt.compile(mt.annotate(func, {"x": 1}, TABLE), target="interpret")(ids, table)
    assert_right(func, {"x": 2}, TABLE, [ids, table], lambda *_: one)


def test_counters_that_are_read_back():
    """The place that a counter gives depends on all that was counted before, in order."""

    @T.prim_func
    def kernel(ids: T.Tensor((12,), "int32"), counts: T.Tensor((8,), "int32"), out: T.Tensor((12,), "int32")):
        with T.Kernel(1, threads=1):
            for i in T.serial(12):
                out[i] = counts[ids[i]]
                counts[ids[i]] = counts[ids[i]] + 1

    layouts = {"ids": {}, "counts": {"x": 0}, "out": {}}
    assert "all_gather(counts, dim 0, x)" in outline(lowered(kernel, {"x": 2}, layouts))


def test_a_row_that_decays():
    """`acc = acc / 2 + table[ids[n]]`: no sum of what devices have."""

    @T.prim_func
    def kernel(ids: T.Tensor((12,), "int32"), table: T.Tensor((ROWS,), "float32"), out: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=1):
            acc = T.alloc_fragment((1,), "float32")
            T.clear(acc)
            for n in T.serial(12):
                acc[0] = acc[0] * 0.5 + table[ids[n]]
            out[0] = acc[0]

    assert "all_gather(table, dim 0, x)" in outline(lowered(kernel, {"x": 2}, TABLE))
    ids, table = torch.randint(0, ROWS, (12,)).int(), torch.randn(ROWS)
    weights = 0.5 ** torch.arange(11, -1, -1)
    assert_right(kernel, {"x": 2}, TABLE, [ids, table], lambda i, t: (t[i.long()] * weights).sum()[None])


@pytest.mark.parametrize("is_filled", [True, False])
def test_what_calls_leave_on_chip_is_not_cut_off(is_filled):
    """What is looked up is needed whole, but a call that nothing is known of wrote what is used behind that."""

    @T.prim_func
    def kernel(ids: T.Tensor((12,), "int32"), table: T.Tensor((ROWS,), "float32"), out: T.Tensor((12,), "float32")):
        with T.Kernel(1, threads=32):
            rows, more = T.alloc_shared((12,), "float32"), T.alloc_shared((12,), "float32")
            if is_filled:
                T.fill(more, 2.0)
            T.call_extern("handle", "change", more.data)
            for i in T.Parallel(12):
                rows[i] = table[ids[i]]
            for i in T.Parallel(12):
                out[i] = T.exp(rows[i]) * more[i]

    assert outline(lowered(kernel, {"x": 2}, TABLE)) == ["all_gather(table, dim 0, x)", "kernel(ids, table.1, out)"]


def test_a_store_beside_it_counts_once():
    """Where the id is negative, 7 is stored: on one device."""

    @T.prim_func
    def kernel(ids: T.Tensor((12,), "int32"), table: T.Tensor((ROWS,), "float32"), out: T.Tensor((12,), "float32")):
        with T.Kernel(12, threads=1) as bx:
            if ids[bx] >= 0:
                out[bx] = table[ids[bx]]
            else:
                out[bx] = 7.0

    ids, table = torch.randint(-ROWS, ROWS, (12,)).int(), torch.randn(ROWS)
    expected = torch.where(ids >= 0, table[ids.clamp(min=0).long()], 7.0)
    for mesh in MESHES:
        assert_right(kernel, mesh, TABLE, [ids, table], lambda *_: expected)
