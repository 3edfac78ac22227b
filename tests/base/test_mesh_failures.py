"""What a Mesh refuses, and how it says so."""

import re

import pytest

from mesh_tensor import Mesh
from tests.refusals import refusal


def test_empty():
    message = refusal(Mesh, {})
    assert "the mesh has no axis" in message
    assert '{"x": 1} is the mesh of one device' in message


@pytest.mark.parametrize("axes", [None, 4, [("x", 2)], "x"])
def test_no_dict(axes):
    message = refusal(Mesh, axes)
    assert f"not {axes!r}" in message
    assert '{"x": 2, "y": 2}' in message


@pytest.mark.parametrize("size", [0, -3])
def test_axis_of_size_below_one(size):
    message = refusal(Mesh, {"x": 2, "y": size})
    assert f"axis 'y' has size {size}, but a size is at least 1" in message
    assert f"where: mesh {{'x': 2, 'y': {size}}}" in message


@pytest.mark.parametrize("size", [2.0, "2", None, True])
def test_size_is_no_int(size):
    assert f"axis 'x' has size {size!r}, which is not an int" in refusal(Mesh, {"x": size})


@pytest.mark.parametrize("name", ["", 0, None])
def test_axis_name_is_no_text(name):
    assert f"axis name {name!r} is not a non-empty str" in refusal(Mesh, {name: 2})


def test_all_offenders_are_listed():
    message = refusal(Mesh, {"x": 0, "y": 1.5, "": 2})
    assert message.startswith("3 problems:")
    assert all(part in message for part in ("'x' has size 0", "'y' has size 1.5", "name ''"))


@pytest.mark.parametrize(
    "call",
    [
        lambda mesh: mesh.size("z"),
        lambda mesh: mesh.groups(["x", "z"]),
        lambda mesh: mesh.group_of(0, "z"),
        lambda mesh: mesh.rank({"x": 0, "y": 0, "z": 0}),
    ],
)
def test_unknown_axis(call):
    message = refusal(call, Mesh({"x": 2, "y": 3}))
    assert "unknown mesh axis 'z'" in message
    assert 'where: Mesh({"x": 2, "y": 3})' in message
    assert "fix: use the axes of the mesh: 'x', 'y'" in message


@pytest.mark.parametrize("rank", [-1, 6, 1.0, "x"])
def test_rank_out_of_range(rank):
    message = refusal(Mesh({"x": 2, "y": 3}).coordinate, rank)
    assert f"no device has rank {rank!r}" in message
    assert "ranks go from 0 to 5" in message


def test_coordinate_that_names_no_device():
    message = refusal(Mesh({"x": 2, "y": 3, "z": 1}).rank, {"x": 2, "y": -1})
    assert re.search(r"coordinate 2 on axis 'x' is not in 0\.\.1", message)
    assert "coordinate -1 on axis 'y' is not in 0..2" in message
    assert "no coordinate on axis 'z'" in message


def test_immutable_says_what_to_do():
    with pytest.raises(AttributeError, match="immutable.*make a new Mesh"):
        Mesh({"x": 2}).shape = {}


def test_a_device_mesh_of_torch():
    class DeviceMesh:
        mesh_dim_names, shape = ("x", "y"), (2, 3)

    assert "fix: give its axes with their sizes: {'x': 2, 'y': 3}" in refusal(Mesh, DeviceMesh())
