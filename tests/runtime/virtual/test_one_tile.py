"""Rows of a table that lies on several devices: each device writes those that it has into one tile, and nothing is
summed. The same tables with programs that look up at one place, or write a position twice, are summed as ever."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.embedding import embedding
from mesh_tensor.runtime.virtual.one_tile import one_tiles
from mesh_tensor.targets.tile_memory import LARGE
from tests.other_machines import AT_ONCE, planned_for

ROWS, TOKENS, WIDTH = 61, 23, 18


@pytest.fixture(autouse=True)
def _no_start():
    """Collectives start at once, so that small tables are worth it."""
    with planned_for(AT_ONCE):
        yield


def tensors(rows=ROWS, tokens=TOKENS, width=WIDTH):
    """Places in the table, and the table, with zeros of both signs."""
    ids, table = torch.randint(0, rows, (tokens,)).int(), torch.randn(rows, width)
    table[::3, ::2] = -0.0
    return ids, table


def compiled(func, axes, layouts, **options):
    mesh = mt.Mesh(axes)
    layouts = {buffer.name: layouts.get(buffer.name, {}) for buffer in func.buffer_map.values()}
    return mt.compile(mt.annotate(func, mesh, layouts), **options), mesh, layouts


@pytest.mark.parametrize(
    ("axes", "layouts"),
    [
        ({"x": 3}, {"table": {"x": 0}}),
        ({"x": 3}, {"table": {"x": 0}, "out": {"x": 0}}),
        ({"x": 2, "y": 2}, {"table": {"x": 0}, "out": {"x": 1}}),
        ({"x": 2, "y": 2}, {"table": {"x": 0}, "ids": {"y": 0}, "out": {"y": 0}}),
        ({"x": 2, "y": 2}, {"table": {"y": 0}, "ids": {"x": 0}, "out": {"x": 0, "y": 0}}),
        ({"x": 2, "y": 3}, {"table": ["y", "x"]}),
    ],
    ids=["all", "rows", "columns", "tokens", "tokens_and_rows", "two_axes"],
)
def test_rows_are_looked_up_right(axes, layouts):
    if isinstance(layouts["table"], list):
        layouts = {"table": dict.fromkeys(layouts["table"], 0)}
    func = embedding(TOKENS, ROWS, WIDTH, block_M=4, block_N=8)
    kernel, mesh, layouts = compiled(func, axes, layouts, target="interpret", poison=True)
    assert one_tiles(kernel.program)
    ids, table = tensors()
    wanted = table[ids.long()]
    assert torch.equal(kernel(ids, table), wanted)
    given = torch.full_like(wanted, torch.nan)
    kernel(ids, table, given)
    assert torch.equal(given, wanted)
    tiles = [mt.distribute(tensor, mesh, layouts[name]) for name, tensor in (("ids", ids), ("table", table))]
    assert torch.equal(kernel(*tiles).full(), wanted)


@pytest.mark.parametrize("layouts", [{"table": {"x": 0}}, {"table": {"x": 0}, "out": {"x": 0}}])
def test_zeros_are_those_of_sums(layouts):
    func, (ids, table) = embedding(TOKENS, ROWS, WIDTH), tensors()
    kernel, _, _ = compiled(func, {"x": 2}, layouts, target="c")
    assert not kernel(ids, table)[table[ids.long()] == 0].signbit().any()


def test_large_results_come_without_another_copy():
    """Rows of results that lie side by side are looked up where they are to be: each device has a half of them."""
    width = 256
    tokens = 2 * LARGE // (width * 4)
    rows = 4 * tokens
    kernel, mesh, _ = compiled(
        embedding(tokens, rows, width), {"x": 2}, {"table": {"x": 0}, "out": {"x": 0}}, target="c"
    )
    assert one_tiles(kernel.program)
    ids, table = tensors(rows, tokens, width)
    tiles = mt.distribute(ids, mesh, {}), mt.distribute(table, mesh, {"x": 0})
    result = kernel(*tiles)
    first, second = result.tiles()
    assert second.data_ptr() - first.data_ptr() == first.nbytes
    assert torch.equal(result.full(), table[ids.long()])


@T.prim_func
def last_of_four(
    ids: T.Tensor((TOKENS, 4), "int32"), table: T.Tensor((ROWS, WIDTH)), out: T.Tensor((TOKENS, WIDTH), "float32")
):
    """Rows that stay are those that are written last: whose they are, another device may have written before."""
    with T.Kernel(TOKENS, threads=32) as b:
        for k in T.serial(4):
            for j in T.Parallel(WIDTH):
                out[b, j] = table[ids[b, k], j]


def test_positions_that_are_written_several_times():
    kernel, _, _ = compiled(last_of_four, {"x": 3}, {"table": {"x": 0}}, target="interpret", poison=True)
    assert not one_tiles(kernel.program)
    ids, table = torch.randint(0, ROWS, (TOKENS, 4)).int(), torch.randn(ROWS, WIDTH)
    assert torch.equal(kernel(ids, table), table[ids[:, 3].long()])


@T.prim_func
def of_two_tables(
    ids: T.Tensor((TOKENS,), "int32"),
    others: T.Tensor((TOKENS,), "int32"),
    table: T.Tensor((ROWS, WIDTH)),
    other: T.Tensor((ROWS, WIDTH)),
    out: T.Tensor((TOKENS, WIDTH), "float32"),
    more: T.Tensor((TOKENS, WIDTH), "float32"),
):
    with T.Kernel(TOKENS, threads=32) as b:
        for j in T.Parallel(WIDTH):
            out[b, j] = table[ids[b], j] * 2.0
            more[b, j] = other[others[b], j]


def test_several_results_of_one_kernel():
    layouts = {"table": {"x": 0}, "other": {"y": 0}, "more": {"y": 0}}
    kernel, _, _ = compiled(of_two_tables, {"x": 3, "y": 2}, layouts, target="interpret", poison=True)
    assert len(one_tiles(kernel.program)) == 2
    (ids, table), (others, other) = tensors(), tensors()
    ids[3], others[5] = ROWS - 1, 0
    out, more = kernel(ids, others, table, other)
    assert torch.equal(out, table[ids.long()] * 2)
    assert torch.equal(more, other[others.long()])


@T.prim_func
def by_a_table(
    ids: T.Tensor((TOKENS,), "int32"),
    places: T.Tensor((ROWS,), "int32"),
    table: T.Tensor((ROWS, WIDTH)),
    out: T.Tensor((TOKENS, WIDTH), "float32"),
):
    """Whose a row is says another table."""
    with T.Kernel(TOKENS, threads=32) as b:
        place = T.alloc_local((1,), "int32")
        place[0] = places[ids[b]]
        for j in T.Parallel(WIDTH):
            out[b, j] = table[place[0], j]


@pytest.mark.parametrize("layouts", [{}, {"places": {"x": 0}}, {"ids": {"x": 0}}])
def test_places_that_a_table_says(layouts):
    kernel, _, _ = compiled(by_a_table, {"x": 3}, {"table": {"x": 0}, **layouts}, target="interpret", poison=True)
    (ids, table), places = tensors(), torch.randint(0, ROWS, (ROWS,)).int()
    assert torch.equal(kernel(ids, places, table), table[places[ids.long()].long()])
    assert one_tiles(kernel.program)
