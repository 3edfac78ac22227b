"""MeshTensor and distribute."""

import pytest
import torch

from mesh_tensor import Mesh, Partial, Replicate, Sharding
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor, distribute
from tests.runtime.reference import cut, shardings

MESHES = [
    Mesh({"x": 1}),
    Mesh({"x": 4}),
    Mesh({"x": 2, "y": 2}),
    Mesh({"x": 2, "y": 3}),
    Mesh({"x": 2, "y": 2, "z": 2}),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", [(8, 6), (5, 7), (1, 1), (16, 64)], ids=str)
def test_round_trip_of_every_layout(mesh, shape):
    tensor = torch.randn(shape)
    for sharding in shardings(mesh, 2):
        tiles = distribute(tensor, mesh, sharding)
        assert torch.equal(tiles.full(), tensor), str(sharding)
        if not sharding.partial:
            for rank in range(mesh.num_devices):
                assert torch.equal(tiles.tile(rank), cut(tensor, sharding, rank)), f"{rank} of {sharding}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.uint16])
def test_dtypes(dtype):
    tensor = torch.randint(0, 2, (5, 3)).to(dtype)
    tiles = distribute(tensor, {"x": 2}, {"x": 0})
    assert tiles.dtype == dtype
    assert torch.equal(tiles.full(), tensor)


def test_what_it_says_of_itself():
    mesh = Mesh({"x": 2, "y": 2})
    tiles = distribute(torch.arange(10).reshape(5, 2), mesh, {"x": 0})
    assert (tiles.shape, tiles.dtype, tiles.mesh) == ((5, 2), torch.int64, mesh)
    assert tiles.device == torch.device("cpu")
    assert tiles.sharding == Sharding.make(mesh, 2, {"x": 0})
    assert repr(tiles) == 'MeshTensor((5, 2), int64, S[0], R, Mesh({"x": 2, "y": 2}))'


def test_three_ways_to_say_a_sharding():
    mesh, tensor = Mesh({"x": 2, "y": 2}), torch.randn(4, 4)
    layouts = [{"x": 0, "y": 1}, "S[0], S[1]", '{"x": 0, "y": 1}', Sharding.make(mesh, 2, {"x": 0, "y": 1})]
    assert len({distribute(tensor, mesh, layout).sharding for layout in layouts}) == 1


def test_tiles_by_rank_and_by_coordinate():
    tiles = distribute(torch.arange(5), {"x": 2, "y": 2}, {"x": 0})
    assert tiles.tile(3).tolist() == tiles.tile({"x": 1, "y": 1}).tolist() == [3, 4]
    assert tiles.padded_tile(3).tolist() == [3, 4, 0]
    assert tiles.tile(0).tolist() == [0, 1, 2]


def test_a_partial_tensor_counts_once():
    tensor = torch.tensor([3.0, -1.0])
    tiles = distribute(tensor, {"x": 3}, "P[sum]")
    assert [tiles.tile(rank).tolist() for rank in range(3)] == [[3, -1], [0, 0], [0, 0]]
    assert tiles.full().tolist() == [3, -1]
    low = distribute(tensor, {"x": 2}, "P[max]")
    assert low.tile(1).tolist() == [float("-inf")] * 2
    assert low.full().tolist() == [3, -1]


def test_partial_tiles_are_combined():
    mesh = Mesh({"x": 3})
    tiles = [torch.tensor([1.0, 5.0]), torch.tensor([2.0, 4.0]), torch.tensor([3.0, 3.0])]
    for op, expected in (("sum", [6, 12]), ("max", [3, 5]), ("prod", [6, 60])):
        assert MeshTensor(tiles, (2,), Sharding.make(mesh, 1, {}, partial={"x": op})).full().tolist() == expected


def test_distribute_and_full_copy():
    tensor = torch.zeros(4)
    tiles = distribute(tensor, {"x": 2}, {})
    tensor.fill_(1)
    assert tiles.full().sum() == 0
    tiles.full().fill_(2)
    assert tiles.full().sum() == 0


def test_replicas_share_memory():
    tiles = distribute(torch.zeros(4), {"x": 2, "y": 2}, {"x": 0})
    assert len({tile.data_ptr() for tile in tiles.tiles()}) == 2


@pytest.mark.parametrize("start", [Partial("sum"), Replicate()])
def test_contributions_that_are_written(start):
    """The zeros of devices that contribute nothing yet are their own."""
    tiles = distribute(torch.ones(4), {"x": 3}, [start]).redistribute([Partial("sum")])
    tiles.tile(1)[...] = 5
    assert tiles.full().tolist() == [6] * 4


def test_tensors_that_are_not_contiguous_and_gradients_that_nobody_records():
    tensor = torch.randn(6, 4, requires_grad=True)
    with torch.no_grad():
        tiles = distribute(tensor.t(), {"x": 2}, {"x": 1})
    assert torch.equal(tiles.full(), tensor.detach().t())
    assert not tiles.full().requires_grad


def test_large_tiles_lie_side_by_side_and_are_tensors_of_their_own():
    """Also on a second axis, whose devices share them. Nothing that is done to one is seen by the others."""
    tensor = torch.randn(1024, 512)
    spread = distribute(tensor, {"x": 2, "y": 2}, {"x": 0})
    first, second, third, fourth = spread.tiles()
    assert first is second
    assert third is fourth
    assert first.data_ptr() + first.nbytes == third.data_ptr() != tensor[512:].data_ptr()
    before = first._version
    third.add_(1)
    assert first._version == before
    assert torch.equal(first, tensor[:512])
    assert torch.equal(spread.full()[512:], tensor[512:] + 1)
