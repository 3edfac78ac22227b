"""Mesh: values, the device order, groups."""

import copy
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_tensor import Mesh

meshes = st.dictionaries(
    st.sampled_from(["x", "y", "z", "data-parallel"]), st.integers(1, 4), min_size=1, max_size=4
).map(Mesh)


def test_what_it_is_made_of():
    mesh = Mesh({"x": 2, "y": 3})
    assert mesh.shape == {"x": 2, "y": 3}
    assert mesh.axis_names == ("x", "y")
    assert (mesh.size("x"), mesh.size("y"), mesh.num_devices) == (2, 3, 6)
    assert list(mesh) == ["x", "y"]
    assert len(mesh) == 2
    assert "x" in mesh
    assert "z" not in mesh


def test_text():
    mesh = Mesh({"x": 2, "y": 3})
    assert repr(mesh) == str(mesh) == 'Mesh({"x": 2, "y": 3})'
    assert eval(repr(mesh)) == mesh


def test_equality_counts_the_order_of_the_axes():
    assert Mesh({"x": 2, "y": 3}) == Mesh({"x": 2, "y": 3})
    assert hash(Mesh({"x": 2, "y": 3})) == hash(Mesh({"x": 2, "y": 3}))
    assert Mesh({"x": 2, "y": 3}) != Mesh({"y": 3, "x": 2})
    assert Mesh({"x": 2}) != {"x": 2}


def test_a_mesh_of_a_mesh_and_copies_are_equal():
    mesh = Mesh({"x": 2, "y": 3})
    assert Mesh(mesh) == mesh
    assert copy.deepcopy(mesh) == mesh
    assert pickle.loads(pickle.dumps(mesh)) == mesh


def test_what_goes_in_and_out_is_copied():
    axes = {"x": 2}
    mesh = Mesh(axes)
    axes["x"] = 5
    mesh.shape["x"] = 7
    assert mesh == Mesh({"x": 2})


def test_sizes_of_numpy_become_ints():
    assert type(Mesh({"x": np.int64(2)}).size("x")) is int


def test_names_of_numpy_become_plain():
    """The first mesh that is made is everybody's."""
    first = Mesh({np.str_("of numpy"): 2})
    assert first is Mesh({"of numpy": 2})
    assert type(first.axis_names[0]) is str


def test_a_huge_mesh_costs_nothing():
    mesh = Mesh({"x": 2**20, "y": 2**20})
    assert mesh.num_devices == 2**40
    assert mesh.rank({"x": 2**20 - 1, "y": 5}) == (2**20 - 1) * 2**20 + 5
    assert len(mesh.group_of(2**30, "x")) == 2**20


def test_groups_by_hand():
    mesh = Mesh({"x": 2, "y": 3})
    assert mesh.groups("y") == ((0, 1, 2), (3, 4, 5))
    assert mesh.groups(["x"]) == ((0, 3), (1, 4), (2, 5))
    assert mesh.groups(["y", "x"]) == mesh.groups(["x", "y"]) == ((0, 1, 2, 3, 4, 5),)
    assert mesh.groups([]) == ((0,), (1,), (2,), (3,), (4,), (5,))
    assert mesh.group_of(4, "x") == (1, 4)


@given(meshes)
def test_ranks_are_row_major(mesh):
    grid = np.arange(mesh.num_devices).reshape(tuple(mesh.shape.values()))
    for place in itertools.product(*map(range, grid.shape)):
        coordinate = dict(zip(mesh.axis_names, place, strict=True))
        assert mesh.rank(coordinate) == grid[place]
        assert mesh.coordinate(int(grid[place])) == coordinate


@given(meshes, st.data())
def test_groups_partition_the_devices(mesh, data):
    axes = data.draw(st.lists(st.sampled_from(mesh.axis_names), unique=True))
    groups = mesh.groups(axes)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.num_devices))
    others = [axis for axis in mesh if axis not in axes]
    for group in groups:
        places = [mesh.coordinate(rank) for rank in group]
        assert len({tuple(place[axis] for axis in others) for place in places}) == 1
        by_axes = [tuple(place[axis] for axis in mesh if axis in axes) for place in places]
        assert by_axes == list(itertools.product(*(range(mesh.size(axis)) for axis in mesh if axis in axes)))
        assert all(mesh.group_of(rank, axes) == group for rank in group)


@pytest.mark.parametrize("name", ["shape", "axes", "_axes"])
def test_it_is_immutable(name):
    with pytest.raises(AttributeError):
        setattr(Mesh({"x": 2}), name, {"x": 3})
