"""From any layout to any layout."""

import pytest
import torch

from mesh_tensor import Mesh, Sharding, distribute
from mesh_tensor.redistribution.plan import elements_received, illegal_move, plan_moves
from mesh_tensor.runtime.placement import layout_of
from mesh_tensor.runtime.reshard import Reshard, reshard_of

from .reference import assert_holds, elements_of, garbage, scatter, shardings, windowed

MESHES = [Mesh({"x": 1}), Mesh({"x": 3}), Mesh({"x": 2, "y": 2}), Mesh({"x": 2, "y": 3})]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", [(12, 6), (7, 5), (1, 4)], ids=str)
def test_every_pair_of_layouts(mesh, shape):
    tensor = torch.arange(shape[0] * shape[1]).reshape(shape)
    for src in shardings(mesh, 2):
        tiles, expected = scatter(tensor, src)
        for dst in shardings(mesh, 2):
            assert_holds(tiles.redistribute(dst), expected)


@pytest.mark.parametrize("shape", [(8, 8), (11, 3)], ids=str)
def test_some_pairs_on_three_axes(shape):
    mesh = Mesh({"x": 2, "y": 2, "z": 2})
    tensor = torch.arange(shape[0] * shape[1]).reshape(shape)
    layouts = list(shardings(mesh, 2))
    for src in layouts[::5]:
        tiles, expected = scatter(tensor, src)
        for dst in layouts[::7]:
            assert_holds(tiles.redistribute(dst), expected)


@pytest.mark.parametrize("shape", [(), (0,), (5, 0)], ids=str)
def test_scalars_and_empty_tensors(shape):
    mesh = Mesh({"x": 2})
    tensor = torch.ones(shape)
    for src in shardings(mesh, len(shape)):
        tiles, expected = scatter(tensor, src)
        for dst in shardings(mesh, len(shape)):
            assert_holds(tiles.redistribute(dst), expected)


def test_an_axis_that_goes_major_takes_from_other_groups():
    """x is major: to split by x what y splits already, device (0, 1) needs elements that (0, 0) and (1, 0) hold."""
    mesh = Mesh({"x": 2, "y": 2})
    tensor = torch.arange(8)
    tiles, expected = scatter(tensor, Sharding.make(mesh, 1, {"y": 0}))
    result = tiles.redistribute({"x": 0, "y": 0})
    assert_holds(result, expected)
    assert result.tile({"x": 0, "y": 1}).tolist() == [2, 3]


def test_in_place_where_nobody_else_reads_what_is_overwritten():
    mesh = Mesh({"x": 2, "y": 2})
    partial = Sharding.make(mesh, 1, {}, partial={"x": "sum"})
    replicated = Sharding.make(mesh, 1, {})
    assert Reshard((4,), torch.float32, partial, replicated).in_place
    assert Reshard((4,), torch.float32, replicated, partial).in_place
    columns, rows = Sharding.make(mesh, 2, {"x": 1}), Sharding.make(mesh, 2, {"x": 0})
    assert not Reshard((4, 4), torch.float32, columns, rows).in_place
    tiles = [torch.full((4,), float(rank)) for rank in range(4)]
    before = list(tiles)
    Reshard((4,), torch.float32, partial, replicated)(tiles, tiles)
    assert [tile[0].item() for tile in before] == [2.0, 4.0, 2.0, 4.0]


def test_shared_results_have_one_memory():
    mesh = Mesh({"x": 3})
    partial, replicated = Sharding.make(mesh, 1, {}, partial={"x": "sum"}), Sharding.make(mesh, 1, {})
    tiles = [torch.full((4,), float(rank)) for rank in range(3)]
    Reshard((4,), torch.float32, partial, replicated)(tiles, tiles, share=True)
    assert len({tile.data_ptr() for tile in tiles}) == 1
    assert tiles[2].tolist() == [3.0] * 4


@pytest.mark.parametrize("mesh", [Mesh({"x": 3}), Mesh({"x": 2, "y": 2})], ids=str)
def test_from_any_layout_to_windows(mesh):
    shape = (7, 5)
    tensor = torch.arange(1, 36).reshape(shape)
    for src in shardings(mesh, 2):
        if src.partial:
            continue
        tiles, _ = scatter(tensor, src)
        for dst in windowed(mesh, shape):
            made = [garbage(dst.tile_shape(shape), tensor.dtype) for _ in range(mesh.num_devices)]
            Reshard(shape, tensor.dtype, src, dst)(list(tiles.tiles()), made)
            (move,) = plan_moves(src, dst, shape)
            assert illegal_move(src, move) == []
            received = [_lacking(shape, src, dst, rank) for rank in range(mesh.num_devices)]
            assert elements_received(move.kind, shape, src, dst, move.axes) == max(received)
            for rank, tile in enumerate(made):
                valid = tuple(slice(0, size) for size in dst.valid_extent(shape, rank))
                assert torch.equal(tile[valid], elements_of(tensor, dst, rank)[valid]), f"{src} -> {dst}, device {rank}"


def _lacking(shape, src, dst, rank):
    """How many elements of its windows a device does not have."""
    offset, extent = src.tile_offset(shape, rank), src.valid_extent(shape, rank)
    have = torch.ones(shape, dtype=torch.int64)
    have[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))] = 0
    valid = tuple(slice(0, size) for size in dst.valid_extent(shape, rank))
    return int(elements_of(have, dst, rank)[valid].sum())


@pytest.mark.parametrize(
    ("window", "borrowed"),
    [
        ("W[0](1022, 1, 0, 513)", [True, True]),
        ("W[0](1024, 1, -1, 514)", [False, False]),
        ("W[0](1024, 1, -1, 514, True)", [False, False]),
        ("W[0](1024, 1, 0, 514)", [True, False]),
    ],
)
def test_windows_on_tiles_that_lie_side_by_side(window, borrowed):
    """Inside of the tensor they are where the tiles are; over its ends, or around, they are copied."""
    mesh, tensor = Mesh({"x": 2}), torch.randn(1024, 512)
    tiles = distribute(tensor, mesh, {"x": 0})
    src, dst = tiles.sharding, Sharding.parse(mesh, 2, f"S[0]; {window}")
    change = reshard_of(tensor.shape, tensor.dtype, src, dst)
    layout = layout_of(tensor.shape, tensor.dtype, dst)
    found, expected = (layout.allocate(tensor.device) for _ in range(2))
    change(list(tiles.tiles()), found, share=True, borrow=True)
    change(list(tiles.tiles()), expected)
    assert all(map(torch.equal, found, expected))
    memory = tiles.tile(0).untyped_storage().data_ptr()
    assert [tile.untyped_storage().data_ptr() == memory for tile in found] == borrowed


def test_tiles_of_one_memory_in_storages_of_different_lengths():
    """As from numpy: the first one ends where its tile does."""
    mesh, tensor = Mesh({"x": 2}), torch.randn(1024, 512)
    tiles = [torch.from_numpy(tensor.numpy()[:512]), torch.from_numpy(tensor.numpy())[512:]]
    src, dst = Sharding.parse(mesh, 2, "S[0]"), Sharding.parse(mesh, 2, "R")
    found = [torch.empty_like(tensor) for _ in range(2)]
    Reshard(tensor.shape, tensor.dtype, src, dst)(tiles, found, share=True, borrow=True)
    assert all(tile.data_ptr() == tensor.data_ptr() and torch.equal(tile, tensor) for tile in found)


def test_tiles_apart_are_copied():
    mesh, tensor = Mesh({"x": 2}), torch.randn(1024, 512)
    tiles = [half.clone() for half in tensor.split(512)]
    src, dst = Sharding.parse(mesh, 2, "S[0]"), Sharding.parse(mesh, 2, "R")
    found = [torch.empty_like(tensor) for _ in range(2)]
    Reshard(tensor.shape, tensor.dtype, src, dst)(tiles, found, share=True, borrow=True)
    assert torch.equal(found[1], tensor)
