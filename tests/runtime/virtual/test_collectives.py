"""Each collective by its own definition, on tiles whose padding is garbage."""

import pytest
import torch

from mesh_tensor import Mesh, Partial, Replicate, Shard, Sharding
from mesh_tensor.runtime.virtual import collectives
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor, distribute
from tests.runtime.reference import FOLDS, assert_holds, scatter

MESHES = [({"x": 2}, "x"), ({"x": 3}, "x"), ({"x": 2, "y": 2}, "y"), ({"x": 2, "y": 3}, "x"), ({"x": 2, "y": 3}, "xy")]
SHAPES = [(8, 12), (7, 5), (2, 3)]


def layout(mesh: Mesh, axes, place) -> Sharding:
    """`place` on `axes`; the other axes of the mesh split dim 0."""
    return Sharding.of(mesh, 2, {axis: place if axis in axes else Shard(0) for axis in mesh})


@pytest.fixture(params=MESHES, ids=lambda p: f"{p[0]}-{p[1]}")
def mesh_and_axes(request):
    return Mesh(request.param[0]), tuple(request.param[1])


@pytest.fixture(params=SHAPES, ids=str)
def tensor(request):
    return torch.randint(-50, 50, request.param[:2])


@pytest.mark.parametrize("op", list(FOLDS))
def test_all_reduce(mesh_and_axes, tensor, op):
    mesh, axes = mesh_and_axes
    tiles, expected = scatter(tensor, layout(mesh, axes, Partial(op)))
    result = collectives.all_reduce(tiles, axes)
    assert result.sharding == layout(mesh, axes, Replicate())
    assert_holds(result, expected)


@pytest.mark.parametrize("op", ["sum", "min"])
def test_reduce_scatter(mesh_and_axes, tensor, op):
    mesh, axes = mesh_and_axes
    tiles, expected = scatter(tensor, layout(mesh, axes, Partial(op)))
    assert_holds(collectives.reduce_scatter(tiles, axes, 1), expected)


def test_all_gather(mesh_and_axes, tensor):
    mesh, axes = mesh_and_axes
    tiles, expected = scatter(tensor, layout(mesh, axes, Shard(1)))
    assert_holds(collectives.all_gather(tiles, axes), expected)


def test_all_to_all(mesh_and_axes, tensor):
    mesh, axes = mesh_and_axes
    tiles, expected = scatter(tensor, layout(mesh, axes, Shard(1)))
    assert_holds(collectives.all_to_all(tiles, axes, 0), expected)


def test_slice(mesh_and_axes, tensor):
    mesh, axes = mesh_and_axes
    tiles, expected = scatter(tensor, layout(mesh, axes, Replicate()))
    assert_holds(collectives.slice_(tiles, axes, 1), expected)


@pytest.mark.parametrize("op", list(FOLDS))
def test_to_partial(mesh_and_axes, tensor, op):
    mesh, axes = mesh_and_axes
    tiles, expected = scatter(tensor, layout(mesh, axes, Replicate()))
    result = collectives.to_partial(tiles, axes, op)
    assert_holds(result, expected)
    first, other = mesh.groups(axes)[0][:2]
    assert torch.equal(result.tile(first), tiles.tile(first))
    neutral = torch.iinfo(torch.int64)
    blank = {"prod": 1, "max": neutral.min, "min": neutral.max, "bitand": -1}.get(op, 0)
    assert (result.tile(other) == blank).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8])
def test_runs_agree_bit_for_bit(dtype):
    mesh = Mesh({"x": 4})
    tiles = [torch.randn(33, 17).mul(9).to(dtype) for _ in range(4)]
    partial = Sharding.make(mesh, 2, {}, partial={"x": "sum"})
    results = [collectives.all_reduce(MeshTensor(tiles, (33, 17), partial), "x").full() for _ in range(5)]
    wide = torch.float32 if dtype.is_floating_point else torch.int64
    expected = (((tiles[0].to(wide) + tiles[1].to(wide)) + tiles[2].to(wide)) + tiles[3].to(wide)).to(dtype)
    for result in results:
        assert torch.equal(result, expected)


def test_arguments_are_not_changed():
    mesh = Mesh({"x": 2})
    tiles, _ = scatter(torch.randn(4, 4), layout(mesh, "x", Partial("sum")))
    before = [tile.clone() for tile in tiles.tiles()]
    collectives.all_reduce(tiles, "x")
    collectives.reduce_scatter(tiles, "x", 0)
    assert all(torch.equal(a, b) for a, b in zip(before, tiles.tiles(), strict=True))


@pytest.mark.parametrize("root", [1, {"y": 1}])
def test_broadcast(root):
    mesh = Mesh({"x": 2, "y": 2})
    tiles = [torch.full((3, 4), float(rank)) for rank in range(4)]
    tensor = MeshTensor(tiles, (5, 4), Sharding.make(mesh, 2, {"x": 0}))
    result = collectives.broadcast(tensor, "y", root)
    assert [result.tile(rank)[0, 0].item() for rank in range(4)] == [1.0, 1.0, 3.0, 3.0]
    assert [tile[0, 0].item() for tile in tensor.tiles()] == [0.0, 1.0, 2.0, 3.0]
    assert result.sharding == tensor.sharding


def test_permute():
    mesh = Mesh({"x": 2, "y": 3})
    tensor = distribute(torch.arange(6), mesh, {"x": 0, "y": 0})
    ring = collectives.permute(tensor, "y", [(0, 1), (1, 2), (2, 0)])
    assert ring.full().tolist() == [2, 0, 1, 5, 3, 4]
    shift = collectives.permute(tensor, "y", [(0, 1), (1, 2)])
    assert shift.full().tolist() == [0, 0, 1, 0, 3, 4]
    swap = collectives.permute(tensor, "x", [(0, 1), (1, 0)])
    assert swap.full().tolist() == [3, 4, 5, 0, 1, 2]
