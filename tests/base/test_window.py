"""Windows: which elements devices hold, by hand."""

import pytest

from mesh_tensor import Mesh, Sharding
from mesh_tensor.base.window import Reach, Reaches, Window


def test_a_margin_on_both_sides():
    window = Window(size=8, stride=1, first=-1, length=6)
    starts = [window.start([("x", 2)], {"x": at}) for at in range(2)]
    assert starts == [-1, 3]
    assert [window.parts(8, start) for start in starts] == [[(1, 0, 5)], [(0, 3, 8)]]


def test_what_wraps_comes_in_from_the_other_end():
    window = Window(size=4, stride=1, first=3, length=2, wraps=True)
    assert window.parts(4, window.start([("x", 2)], {"x": 0})) == [(0, 3, 4), (1, 0, 1)]
    assert Window(4, 1, -5, 6, wraps=True).parts(4, -5) == [(0, 3, 4), (1, 0, 4), (5, 0, 1)]


def test_tiles_of_tiles():
    """10 over x:2 and y:2: tiles of 5, then of 3."""
    window = Window(size=10, stride=2, first=0, length=6)
    axes = [("x", 2), ("y", 2)]
    assert [window.start(axes, {"x": x, "y": y}) for x in range(2) for y in range(2)] == [0, 6, 10, 16]


@pytest.mark.parametrize("start", [-9, 20])
def test_a_window_outside_of_the_tensor_has_nothing(start):
    assert Window(8, 1, 0, 4).parts(8, start) == []


def test_reaches():
    """Single positions and blocks of 4, of tiles of 6: the last block starts at 4."""
    reaches = Reaches("m", 100, 2, 1, (Reach(-1, 1), Reach(0, 7, 4)))
    assert reaches.window(12, [2]) == Window(12, 2, -1, 2 * 4 + 7 + 1 + 1)
    assert Reaches("m", 12, 2, 1, (Reach(-1, 1),)).window(12, [2]) is None  # as long as the dim


def test_layouts_with_windows():
    mesh = Mesh({"x": 2, "y": 2})
    layout = Sharding.make(mesh, 2, {"x": 0, "y": 1}).with_windows([(1, Window(9, 1, -1, 7, True))])
    assert str(layout) == "S[0], S[1]; W[1](9, 1, -1, 7, True)"
    assert Sharding.parse(mesh, 2, str(layout)) == layout != layout.plain
    assert layout.tile_shape((4, 9)) == (2, 7)
    assert layout.tile_offset((4, 9), 3) == (2, 4)
    assert layout.valid_extent((4, 9), 3) == (2, 7)
    assert layout.plain.window(1) is None
