"""Sub-axes of a mesh: which axes they are made of, and which layouts have a name on the whole axes."""

import itertools

import pytest

import mesh_tensor as mt
from mesh_tensor.base.sub_axes import Refinement, named_part

MESH = mt.Mesh({"x": 12, "y": 2})


def test_axes_that_names_are_made_of():
    made = Refinement.by_names(MESH, ["x:(1)6", "x:(2)3", "y"])
    assert made.mesh == mt.Mesh({"x:(1)2": 2, "x:(2)3": 3, "x:(6)2": 2, "y": 2})
    assert made.axes("x") == ("x:(1)2", "x:(2)3", "x:(6)2")
    assert made.axes("x:(1)6") == ("x:(1)2", "x:(2)3")
    assert made.axes("y") == ("y",)
    assert [made.mesh.rank(made.mesh.coordinate(rank)) for rank in range(24)] == list(range(24))


def test_names_of_other_axes_are_no_parts():
    assert named_part(MESH, "z:(1)2") is None
    assert named_part(MESH, "x") is None
    assert Refinement.by_names(MESH, ["z:(1)2", 3, None]).mesh == MESH


@pytest.mark.parametrize("other", [{"x": 12}, {"x:(1)5": 5, "y": 2}, {"x:(1)2": 2, "y": 2}, {"z": 24}])
def test_meshes_that_are_no_refinement(other):
    assert Refinement.between(MESH, mt.Mesh(other)) is None


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 9, 16])
def test_layouts_with_a_name_have_the_same_tiles(size):
    """Every layout of two dims on two parts: where there is a name, all devices have the same elements by it."""
    base = mt.Mesh({"x": 4})
    made, shape = Refinement.by_names(base, ["x:(1)2"]), (size, 6)
    for places in itertools.product((None, 0, 1), repeat=2):
        layout = mt.Sharding.make(made.mesh, 2, dict(zip(made.mesh, places, strict=True)))
        coarse = made.coarsen(layout, shape)
        assert coarse is None or places[0] == places[1]
        if coarse is not None:
            for rank in range(4):
                assert coarse.tile_offset(shape, rank) == layout.tile_offset(shape, rank)
                assert coarse.valid_extent(shape, rank) == layout.valid_extent(shape, rank)
        assert made.coarsen(made.coarse(layout, shape), shape) is not None
    assert (made.coarsen(mt.Sharding.make(made.mesh, 2, dict.fromkeys(made.mesh, 0)), shape) is None) == (
        size in (1, 5, 9)
    )
