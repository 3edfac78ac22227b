"""Sharding: forms, values, and the tiles of every device against an independent count."""

import copy
import itertools
import math
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_tensor import Mesh, MeshTensorError, Partial, Replicate, Shard, Sharding
from mesh_tensor.base.blocks import ceildiv
from mesh_tensor.base.reductions import PARTIAL_OPS

MESH = Mesh({"x": 2, "y": 3})


@st.composite
def shardings(draw, max_dim=9):
    """A sharding on some mesh and the shape of its tensor: even, uneven, empty, fewer elements than tiles."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    mesh = Mesh(dict(zip("zyx", sizes, strict=False)))
    shape = tuple(draw(st.lists(st.integers(0, max_dim), min_size=1, max_size=3)))
    choice = st.one_of(
        st.just(Replicate()),
        st.integers(0, len(shape) - 1).map(Shard),
        st.just(Partial(draw(st.sampled_from(tuple(PARTIAL_OPS))))),  # one op for all axes
    )
    return Sharding.of(mesh, len(shape), {axis: draw(choice) for axis in mesh}), shape


def test_make():
    sharding = Sharding.make(MESH, 2, {"y": 0, "x": 1})
    assert sharding.dims == (("y",), ("x",))
    assert sharding.partial == ()
    assert (sharding.dim_of("x"), sharding.axes_of(0), sharding.num_shards(0)) == (1, ("y",), 3)
    assert sharding.as_dict() == {"x": 1, "y": 0}


def test_the_mesh_may_be_a_dict():
    expected = Sharding.make(MESH, 2, {"x": 0})
    assert expected == Sharding.make(MESH.shape, 2, {"x": 0}) == Sharding.parse(MESH.shape, 2, "S[0], R")
    assert expected == Sharding.of(MESH.shape, 2, {"x": Shard(0)}) == Sharding(MESH.shape, 2, (("x",), ()))


def test_axes_that_are_left_out_replicate():
    replicated = Sharding.make(MESH, 2)
    assert replicated == Sharding.make(MESH, 2, {}) == Sharding.make(MESH, 2, {"x": None, "y": None})
    assert replicated == Sharding.make(MESH, 2, {"x": None}, replicate=("x", "y"))
    assert Sharding.make(MESH, 2, {"x": 0}, replicate="y") == Sharding.make(MESH, 2, {"x": 0})
    assert replicated.placements() == {"x": Replicate(), "y": Replicate()}


def test_two_axes_on_one_dim_go_in_mesh_order():
    sharding = Sharding.make(MESH, 2, {"y": 1, "x": 1})
    assert sharding.axes_of(1) == ("x", "y")
    assert sharding.num_shards(1) == 6
    assert sharding == Sharding(MESH, 2, ((), ("x", "y"))) == Sharding.make(MESH, 2, {("x", "y"): 1})
    assert sharding.is_in_mesh_order


def test_another_order_of_axes():
    sharding = Sharding.make(MESH, 2, {("y", "x"): 1})
    assert sharding.axes_of(1) == ("y", "x")
    assert sharding == Sharding(MESH, 2, ((), ("y", "x"))) != Sharding.make(MESH, 2, {"x": 1, "y": 1})
    assert str(sharding) == "S[1:1], S[1]"
    assert Sharding.parse(MESH, 2, str(sharding)) == Sharding.parse(MESH, 2, '{("y", "x"): 1}') == sharding
    assert Sharding.of(MESH, 2, sharding.placements()) == pickle.loads(pickle.dumps(sharding)) == sharding
    assert not sharding.is_in_mesh_order
    assert sharding.tile_steps(1, 12) == (("y", 4), ("x", 2))
    assert [sharding.tile_offset((1, 12), rank)[1] for rank in range(6)] == [0, 4, 8, 2, 6, 10]
    assert sharding.with_replicate("y") == Sharding.make(MESH, 2, {"x": 1})


def test_partial():
    sharding = Sharding.make(MESH, 1, {"x": 0}, partial={"y": "max"})
    assert sharding.partial == (("y", "max"),)
    assert (sharding.partial_op("x"), sharding.partial_op("y")) == (None, "max")
    assert sharding.placements() == {"x": Shard(0), "y": Partial("max")}


def test_negative_dims_count_from_the_end():
    assert Sharding.make(MESH, 3, {"x": -1, "y": -3}) == Sharding.make(MESH, 3, {"x": 2, "y": 0})


def test_scalars_have_no_dim_to_split():
    sharding = Sharding.make(MESH, 0, partial={"x": "sum"})
    assert sharding.tile_shape(()) == sharding.tile_offset((), 4) == sharding.valid_extent((), 4) == ()


@pytest.mark.parametrize(
    "text",
    ['{"x": 0, "y": 1}', "{'y': 1, 'x': 0}", "S[0], S[1]", " S[0],S[ 1 ] ", "S[-2], S[-1]"],
)
def test_texts_of_both_kinds(text):
    assert Sharding.parse(MESH, 2, text) == Sharding.make(MESH, 2, {"x": 0, "y": 1})


def test_any_form_makes_one():
    assert Sharding.make({"x": 2, "y": 2}, 2, "S[1], P[sum]") == Sharding.make(
        {"x": 2, "y": 2}, 2, {"x": 1}, partial={"y": "sum"}
    )
    with pytest.raises(MeshTensorError, match="can't read the sharding 5: it is no text") as error:
        Sharding.parse({"x": 2}, 2, 5)
    assert 'fix: write one placement per mesh axis, as in "S[0]"' in str(error.value)


@pytest.mark.parametrize(
    "windows", ["halo", "W[0]", "W[0](4", "W[0](4, 1)", "W[3](4, 1, 0, 3)", "W[0](4, 1, 0, 3); W["]
)
def test_texts_with_other_than_windows_are_refused(windows):
    with pytest.raises(MeshTensorError, match="are no windows"):
        Sharding.make({"x": 2}, 1, f"S[0]; {windows}")


def test_tiles_of_whole_blocks():
    """30 elements over 4 devices, in blocks of 3: 9, 9, 9 and the last 3."""
    mesh = Mesh({"x": 2, "y": 2})
    rows = Sharding.make(mesh, 2, {"x": 0, "y": 0}).with_blocks([(0, 3), (1, 5)])
    assert str(rows) == "S[0], S[0]; B[0]3", "dim 1 is whole"
    assert rows is Sharding.parse(mesh, 2, str(rows))
    assert rows is not rows.plain
    assert rows.tile_shape((30, 5)) == (9, 5)
    assert [rows.tile_offset((30, 5), rank)[0] for rank in range(4)] == [0, 9, 18, 27]
    assert [rows.valid_extent((30, 5), rank)[0] for rank in range(4)] == [9, 9, 9, 3]
    assert pickle.loads(pickle.dumps(rows)) is rows


@pytest.mark.parametrize("blocks", ["B[0]", "B[0]x", "B[3]4"])
def test_texts_with_other_than_blocks_are_refused(blocks):
    with pytest.raises(MeshTensorError, match="are no windows or blocks"):
        Sharding.make({"x": 2}, 1, f"S[0]; {blocks}")


def test_texts_that_replicate_or_are_partial():
    assert Sharding.parse(MESH, 2, '{"x": 0, "y": null}') == Sharding.parse(MESH, 2, "S[0], R")
    assert Sharding.parse(MESH, 2, "{'x': 0, 'y': None}") == Sharding.parse(MESH, 2, '{"x": 0}')
    assert Sharding.parse(MESH, 2, "S[0], P[sum]") == Sharding.make(MESH, 2, {"x": 0}, partial={"y": "sum"})
    assert Sharding.parse(MESH, 2, "{}") == Sharding.make(MESH, 2)


def test_how_it_prints():
    sharding = Sharding.make(MESH, 2, {"x": 0}, partial={"y": "sum"})
    assert str(sharding) == sharding.text() == "S[0], P[sum]"
    assert repr(sharding) == 'Sharding(Mesh({"x": 2, "y": 3}), 2, "S[0], P[sum]")'


@given(shardings())
def test_texts_round_trip(drawn):
    sharding, _ = drawn
    assert Sharding.parse(sharding.mesh, sharding.ndim, sharding.text()) == sharding
    if not sharding.partial:
        assert Sharding.parse(sharding.mesh, sharding.ndim, str(sharding.as_dict())) == sharding


@given(shardings())
def test_equal_layouts_are_equal_values(drawn):
    sharding, _ = drawn
    twin = Sharding.of(sharding.mesh, sharding.ndim, dict(reversed(sharding.placements().items())))
    assert twin == sharding
    assert hash(twin) == hash(sharding)
    assert copy.deepcopy(sharding) is pickle.loads(pickle.dumps(sharding)) is sharding


def test_a_layout_that_threads_make_at_once_is_one_object():
    """Of each of these that nobody has yet."""
    for size in range(100, 150):
        start = threading.Barrier(8)

        def make(size: int = size, start: threading.Barrier = start) -> Sharding:
            start.wait()
            return Sharding.make(Mesh({"x": size, "y": 2}), 2, {"x": 0})

        with ThreadPoolExecutor(8) as pool:
            made = [each.result() for each in [pool.submit(make) for _ in range(8)]]
        assert len({id(each) for each in made}) == 1


@given(shardings(), st.data())
def test_with_changes_one_axis_only(drawn, data):
    sharding, _ = drawn
    axis = data.draw(st.sampled_from(sharding.mesh.axis_names))
    dim = data.draw(st.integers(0, sharding.ndim - 1))
    before = sharding.placements()
    assert sharding.with_shard(axis, dim).placements() == {**before, axis: Shard(dim)}
    assert sharding.with_replicate(axis).placements() == {**before, axis: Replicate()}
    op = next((op for _, op in sharding.partial), "min")
    assert sharding.with_partial(axis, op).placements() == {**before, axis: Partial(op)}
    assert sharding.placements() == before


def test_tiles_by_hand():
    sharding = Sharding.make(Mesh({"x": 2, "y": 2}), 2, {"x": 0, "y": 1})
    assert sharding.tile_shape((5, 8)) == (3, 4)
    assert [sharding.tile_offset((5, 8), rank) for rank in range(4)] == [(0, 0), (0, 4), (3, 0), (3, 4)]
    assert [sharding.valid_extent((5, 8), rank) for rank in range(4)] == [(3, 4), (3, 4), (2, 4), (2, 4)]


def test_nested_tiles_by_hand():
    sharding = Sharding.make(MESH, 1, {"x": 0, "y": 0})
    assert sharding.tile_steps(0, 7) == (("x", 4), ("y", 2))
    assert sharding.tile_shape((7,)) == (2,)
    assert [sharding.tile_offset((7,), rank) for rank in range(6)] == [(0,), (2,), (4,), (4,), (6,), (8,)]
    assert [sharding.valid_extent((7,), rank) for rank in range(6)] == [(2,), (2,), (0,), (2,), (1,), (0,)]


@given(shardings())
def test_every_tile_has_the_shape_of_the_plain_ceildiv(drawn):
    sharding, shape = drawn
    for dim, size in enumerate(sharding.tile_shape(shape)):
        assert size == math.ceil(shape[dim] / sharding.num_shards(dim))
        steps = sharding.tile_steps(dim, shape[dim])
        assert size == (steps[-1][1] if steps else shape[dim])


@given(shardings())
def test_tiles_partition_the_tensor(drawn):
    sharding, shape = drawn
    copies = math.prod(sharding.mesh.size(a) for a, p in sharding.placements().items() if not isinstance(p, Shard))
    count = np.zeros(shape, int)
    for rank in range(sharding.mesh.num_devices):
        offset, valid = sharding.tile_offset(shape, rank), sharding.valid_extent(shape, rank)
        assert all(0 <= extent <= size for extent, size in zip(valid, sharding.tile_shape(shape), strict=True))
        assert all(o + extent <= size for o, extent, size in zip(offset, valid, shape, strict=True) if extent)
        count[tuple(slice(o, o + extent) for o, extent in zip(offset, valid, strict=True))] += 1
    assert (count == copies).all()


@given(shardings(max_dim=6))
def test_every_element_is_where_its_digits_say(drawn):
    """Element by element: an index is split into one digit per axis, major first, as mixed-radix numbers are."""
    sharding, shape = drawn
    for index in itertools.product(*map(range, shape)):
        owner = {}
        for dim, rest in enumerate(index):
            capacity = shape[dim]
            for axis in sharding.axes_of(dim):
                capacity = -(-capacity // sharding.mesh.size(axis))
                owner[axis], rest = divmod(rest, capacity)
        place = {axis: owner.get(axis, 0) for axis in sharding.mesh}
        rank = sharding.mesh.rank(place)
        offset, valid = sharding.tile_offset(shape, rank), sharding.valid_extent(shape, rank)
        assert all(o <= i < o + extent for i, o, extent in zip(index, offset, valid, strict=True))


@given(shardings())
def test_a_collective_over_one_axis_stays_in_its_parent_tile(drawn):
    """The devices of a minor axis's group hold one piece of the dim: the tile that the major axes leave."""
    sharding, shape = drawn
    for dim, size in enumerate(shape):
        axes = sharding.axes_of(dim)
        if len(axes) < 2:
            continue
        parent = Sharding.make(sharding.mesh, 1, dict.fromkeys(axes[:-1], 0))
        tiles = Sharding.make(sharding.mesh, 1, dict.fromkeys(axes, 0))
        for group in sharding.mesh.groups(axes[-1]):
            (start,), (extent,) = parent.tile_offset((size,), group[0]), parent.valid_extent((size,), group[0])
            held = sum(tiles.valid_extent((size,), rank)[0] for rank in group)
            assert held == extent
            assert tiles.tile_offset((size,), group[0]) == (start,)


class _Symbol:
    """Stands for a symbolic dim: records what is done to it."""

    def __init__(self, text):
        self.text = text

    def __add__(self, other):
        return _Symbol(f"({self.text} + {other})")

    def __sub__(self, other):
        return _Symbol(f"({self.text} - {other})")

    def __floordiv__(self, other):
        return _Symbol(f"{self.text} // {other}")


def test_symbolic_dims_stay_symbolic():
    sharding = Sharding.make(MESH, 2, {"x": 0, "y": 0})
    symbol = _Symbol("m")
    rows, columns = sharding.tile_shape((symbol, symbol))
    assert rows.text == "((m + 6) - 1) // 6"
    assert columns is symbol
    assert ceildiv(7, 2) == 4
