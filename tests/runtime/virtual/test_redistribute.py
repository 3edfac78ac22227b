"""redistribute on the virtual mesh: exact for every pair of layouts (`python -m tests.redistributions` has all)."""

import pytest
import torch

import mesh_tensor as mt
from tests.redistributions import EVEN, MESHES, UNEVEN, check


@pytest.mark.parametrize("shape", EVEN + UNEVEN, ids=str)
@pytest.mark.parametrize("mesh", MESHES[:-1], ids=str)
def test_every_pair_of_layouts(mesh, shape):
    check(mesh, shape)


@pytest.mark.parametrize("shape", EVEN + UNEVEN, ids=str)
def test_many_pairs_on_eight_devices(shape):
    assert check(MESHES[-1], shape, step=(1, 4, 13)[len(shape) - 1]) > 700


def test_all_ways_to_call():
    mesh = mt.Mesh({"x": 2, "y": 2})
    tensor = torch.arange(15.0).reshape(5, 3)
    given = mt.distribute(tensor, mesh, {"x": 0})
    for sharding in ({"y": 0}, "R, S[0]", mt.Sharding.make(mesh, 2, {"y": 0})):
        result = mt.redistribute(given, sharding)
        assert str(result.sharding) == "R, S[0]"
        assert torch.equal(result.full(), tensor)
        assert result.tile({"x": 0, "y": 1}).tolist() == tensor[3:].tolist()
    assert mt.redistribute(given, {"x": 0}) is given


def test_the_plan_says_what_happens():
    mesh = mt.Mesh({"x": 2, "y": 2})
    plan = mt.plan_redistribution((8, 8), torch.float16, mt.Sharding.make(mesh, 2, {"x": 0}), {"y": 0})
    assert [(move.kind, move.axes) for move in plan.moves] == [("permute", ("x", "y"))]
    assert plan.bytes == 4 * 8 * 2
    assert str(plan) == (
        "(8, 8) float16, 'S[0], R' -> 'R, S[0]' on Mesh({\"x\": 2, \"y\": 2}): 64 bytes per device\n"
        "  step     over  layout after  bytes per device\n"
        "  permute  x, y  R, S[0]       64"
    )


def test_what_is_refused():
    mesh = mt.Mesh({"x": 2})
    with pytest.raises(mt.MeshTensorError, match="takes a MeshTensor or a DTensor, not Tensor"):
        mt.redistribute(torch.zeros(4), {"x": 0})
    with pytest.raises(mt.MeshTensorError, match="unknown mesh axis 'y'"):
        mt.redistribute(mt.distribute(torch.zeros(4), mesh, {}), {"y": 0})
    with pytest.raises(mt.MeshTensorError, match="the layout {'x': 0} is of no mesh"):
        mt.plan_redistribution((4,), torch.float32, {"x": 0}, {})
    with pytest.raises(mt.MeshTensorError, match="has 2 dims, but the sharding"):
        mt.plan_redistribution((4, 4), torch.float32, mt.Sharding.make(mesh, 1, {"x": 0}), {})
