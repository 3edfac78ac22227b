"""What MeshTensor and distribute refuse, and what they say."""

import torch

from mesh_tensor import Mesh, Sharding
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor, distribute
from tests.refusals import refusal

MESH = Mesh({"x": 2})


def test_not_a_tensor():
    assert "takes a torch tensor, not list" in refusal(distribute, [1, 2], MESH, {"x": 0})


def test_unknown_axis_and_dim_out_of_range():
    text = refusal(distribute, torch.zeros(4), MESH, {"y": 0, "x": 2})
    assert "unknown mesh axis 'y'" in text
    assert "dim 2" in text


def test_empty_mesh():
    assert "no axis" in refusal(distribute, torch.zeros(4), {}, {})


def test_a_sharding_for_something_else():
    other = Sharding.make(Mesh({"x": 4}), 1, {"x": 0})
    text = refusal(distribute, torch.zeros(4), MESH, other)
    assert 'a sharding on Mesh({"x": 4}) for a tensor on Mesh({"x": 2})' in text
    text = refusal(distribute, torch.zeros(4, 4), MESH, Sharding.make(MESH, 1, {"x": 0}))
    assert "a sharding of 1 dims for a tensor of 2" in text


def test_wrong_tiles():
    layout = Sharding.make(MESH, 1, {"x": 0})
    assert "1 tiles for 2 devices" in refusal(MeshTensor, [torch.zeros(2)], (4,), layout)
    tiles = [torch.zeros(2), torch.zeros(3), torch.zeros(2).double()]
    text = refusal(MeshTensor, tiles[:2], (4,), layout)
    assert "the tile of device 1 is (3,) torch.float32" in text
    assert "make every tile contiguous, (2,), torch.float32" in text
    assert "torch.float64" in refusal(MeshTensor, [tiles[0], tiles[2]], (4,), layout)


def test_unknown_device():
    tensor = distribute(torch.zeros(4), MESH, {"x": 0})
    assert "no device has rank 2" in refusal(tensor.tile, 2)
    assert "no coordinate on axis 'x'" in refusal(tensor.tile, {})
