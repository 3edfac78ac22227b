"""ZeRO's layouts: what is split, and along which dim."""

import pytest

from mesh_tensor.api.module import small_ones, with_axes, zero_layouts
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.placement import Shard
from mesh_tensor.base.sharding import Sharding

MESH = Mesh({"data": 2, "model": 2})


@pytest.mark.parametrize(("level", "parameter", "kept"), [(0, 1, 1), (1, 1, 2), (2, 1, 2), (3, 2, 2)])
def test_levels(level, parameter, kept):
    layouts = zero_layouts(MESH, level, ["data"], {"w": (4, 4)}, {"w": ("mean",)}, {})
    assert [layouts[name].num_shards(0) for name in ("w", "mean")] == [parameter, kept]


def test_the_first_dim_that_is_divided():
    whole = Sharding.of(MESH, 2, {})
    assert with_axes(whole, (4, 100), ["data"]).axes_of(0) == ("data",)
    assert with_axes(whole, (3, 100), ["data"]).axes_of(1) == ("data",)
    assert with_axes(whole, (3, 5), ["data"]) == whole


def test_a_large_tensor_is_split_where_nothing_divides_it():
    assert with_axes(Sharding.of(MESH, 2, {}), (301, 303), ["data"]).axes_of(1) == ("data",)


def test_a_dim_that_nothing_splits_comes_first():
    rows, both = (Sharding.of(MESH, 2, placements) for placements in ({"model": Shard(0)}, {"model": Shard(1)}))
    assert with_axes(rows, (8, 4), ["data"]).as_dict() == {"model": 0, "data": 1}
    assert with_axes(rows, (8, 3), ["data"]).as_dict() == {"model": 0, "data": 0}
    assert with_axes(both, (3, 8), ["data"]).as_dict() == {"model": 1, "data": 1}
    vector = Sharding.of(MESH, 1, {"model": Shard(0)})
    assert with_axes(vector, (8,), ["data"]) == vector


def test_small_parameters_stay_whole():
    assert small_ones({"weight": 10_000, "bias": 60, "norm": 30, "gate": 1000}) == {"bias", "norm"}
    assert small_ones({"weight": 240, "bias": 20}) == set()
    assert small_ones({f"weight{n}": 10**8 for n in range(99)} | {"large": 10**6}) == set()
    layouts = zero_layouts(MESH, 3, ["data"], {"w": (100, 100), "b": (100,)}, {"w": ("v",), "b": ("u",)}, {})
    assert [layouts[name].num_shards(0) for name in ("w", "v", "b", "u")] == [2, 2, 1, 1]
