"""Each collective by its own definition, on tiles whose padding is garbage."""

import pytest
import torch

from mesh_tensor import Mesh, Partial, Replicate, Shard, Sharding
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor
from tests.runtime.reference import FOLDS, assert_holds, scatter

MESHES = [({"x": 2}, "x"), ({"x": 3}, "x"), ({"x": 2, "y": 2}, "y"), ({"x": 2, "y": 3}, "x"), ({"x": 2, "y": 3}, "xy")]
SHAPES = [(8, 12), (7, 5), (2, 3)]


def layout(mesh: Mesh, axes, place) -> Sharding:
    """`place` on `axes`; the other axes of the mesh split dim 0."""
    return Sharding.of(mesh, 2, {axis: place if axis in axes else Shard(0) for axis in mesh})


def change(tensor: MeshTensor, axes, place) -> MeshTensor:
    """`tensor` with `place` on `axes`, all else as it is."""
    placements = tensor.sharding.placements() | dict.fromkeys(axes, place)
    return tensor.redistribute(Sharding.of(tensor.mesh, len(tensor.shape), placements))


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
    result = change(tiles, axes, Replicate())
    assert result.sharding == layout(mesh, axes, Replicate())
    assert_holds(result, expected)


@pytest.mark.parametrize("op", ["sum", "min"])
def test_reduce_scatter(mesh_and_axes, tensor, op):
    mesh, axes = mesh_and_axes
    tiles, expected = scatter(tensor, layout(mesh, axes, Partial(op)))
    assert_holds(change(tiles, axes, Shard(1)), expected)


def test_all_gather(mesh_and_axes, tensor):
    mesh, axes = mesh_and_axes
    tiles, expected = scatter(tensor, layout(mesh, axes, Shard(1)))
    assert_holds(change(tiles, axes, Replicate()), expected)


def test_all_to_all(mesh_and_axes, tensor):
    mesh, axes = mesh_and_axes
    tiles, expected = scatter(tensor, layout(mesh, axes, Shard(1)))
    assert_holds(change(tiles, axes, Shard(0)), expected)


def test_slice(mesh_and_axes, tensor):
    mesh, axes = mesh_and_axes
    tiles, expected = scatter(tensor, layout(mesh, axes, Replicate()))
    assert_holds(change(tiles, axes, Shard(1)), expected)


@pytest.mark.parametrize("op", list(FOLDS))
def test_to_partial(mesh_and_axes, tensor, op):
    mesh, axes = mesh_and_axes
    tiles, expected = scatter(tensor, layout(mesh, axes, Replicate()))
    result = change(tiles, axes, Partial(op))
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
    results = [change(MeshTensor(tiles, (33, 17), partial), "x", Replicate()).full() for _ in range(5)]
    wide = torch.float32 if dtype.is_floating_point else torch.int64
    expected = (((tiles[0].to(wide) + tiles[1].to(wide)) + tiles[2].to(wide)) + tiles[3].to(wide)).to(dtype)
    for result in results:
        assert torch.equal(result, expected)


def test_arguments_are_not_changed():
    mesh = Mesh({"x": 2})
    tiles, _ = scatter(torch.randn(4, 4), layout(mesh, "x", Partial("sum")))
    before = [tile.clone() for tile in tiles.tiles()]
    change(tiles, "x", Replicate())
    change(tiles, "x", Shard(0))
    assert all(torch.equal(a, b) for a, b in zip(before, tiles.tiles(), strict=True))
