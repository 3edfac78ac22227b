"""Plans of redistributions: they arrive, every step is legal, and none moves more than gathering everything would."""

import itertools
import math

import pytest

from mesh_tensor import Mesh, Sharding
from mesh_tensor.redistribution.plan import RedistributionPlan, elements_received, illegal_move, plan_moves
from tests.refusals import refusal
from tests.runtime.reference import layouts

MESHES = [Mesh({"x": 2}), Mesh({"x": 4}), Mesh({"x": 2, "y": 2}), Mesh({"x": 2, "y": 3})]
EIGHT = Mesh({"x": 2, "y": 2, "z": 2})
SHAPES = [(12,), (7,), (12, 8), (5, 3), (4, 6, 8), (3, 1, 5)]


def gather_everything(shape, src):
    """What every device receives that completes and gathers all of `src`; slicing the result costs nothing."""
    reduced = math.prod(src.mesh.size(axis) for axis, _ in src.partial)
    complete = Sharding(src.mesh, src.ndim, src.dims)
    total = math.ceil(2 * (reduced - 1) * math.prod(src.tile_shape(shape)) / reduced)
    whole = math.prod(shape)
    return total + max(whole - math.prod(complete.valid_extent(shape, rank)) for rank in range(src.mesh.num_devices))


def check(shape, src, dst):
    """The plan arrives by legal steps, and moves no more than gathering everything."""
    now, total = src, 0
    for move in plan_moves(src, dst, shape):
        assert illegal_move(now, move) == [], f"{src} -> {dst}"
        total += elements_received(move.kind, shape, now, move.after, move.axes)
        now = move.after
    assert now == dst
    assert total <= gather_everything(shape, src), f"{shape}, {src} -> {dst}"


def _orders(layout):
    """The layout with the axes of every dim in every order."""
    for dims in itertools.product(*(itertools.permutations(axes) for axes in layout.dims)):
        yield Sharding(layout.mesh, layout.ndim, dims, layout.partial)


@pytest.mark.parametrize(("mesh", "every"), [(MESHES[2], 1), (MESHES[3], 1), (EIGHT, 997)], ids=str)
@pytest.mark.parametrize("shape", [(12, 8), (7, 3)], ids=str)
def test_orders_of_axes(mesh, every, shape):
    found = [one for layout in layouts(mesh, len(shape)) for one in _orders(layout)]
    assert len(set(found)) == len(found)
    pairs = [(src, dst) for src in found for dst in found if not (src.is_in_mesh_order and dst.is_in_mesh_order)]
    for src, dst in pairs[::every]:
        check(shape, src, dst)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_of_layouts(mesh, shape):
    every = layouts(mesh, len(shape))
    for src, dst in itertools.product(every, every):
        check(shape, src, dst)


@pytest.mark.parametrize("shape", SHAPES[-2:], ids=str)
def test_pairs_on_three_axes(shape):
    pairs = list(itertools.product(layouts(EIGHT, len(shape)), repeat=2))
    for src, dst in pairs[::23]:
        check(shape, src, dst)


def test_nothing_to_do():
    for layout in layouts(MESHES[2], 2):
        assert plan_moves(layout, layout, (4, 4)) == ()


def plan(src, dst, mesh=MESHES[2], shape=(8, 8)):
    """The plan in words."""
    moves = plan_moves(Sharding.parse(mesh, len(shape), src), Sharding.parse(mesh, len(shape), dst), shape)
    return [(move.kind, move.axes) for move in moves]


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ("R, R", "S[0], S[1]", [("slice", ("x",)), ("slice", ("y",))]),
        ("R, R", "S[0], S[0]", [("slice", ("x", "y"))]),
        ("S[0], S[0]", "R, R", [("all_gather", ("x", "y"))]),
        ("S[0], S[1]", "R, R", [("all_gather", ("x",)), ("all_gather", ("y",))]),
        ("P[sum], P[sum]", "R, R", [("all_reduce", ("x", "y"))]),
        ("P[sum], R", "S[0], R", [("reduce_scatter", ("x",))]),
        ("P[sum], P[sum]", "S[0], R", [("reduce_scatter", ("x",)), ("all_reduce", ("y",))]),
        ("S[0], R", "S[1], R", [("all_to_all", ("x",))]),
        ("R, R", "R, P[sum]", [("to_partial", ("y",))]),
        ("P[sum], R", "P[max], R", [("all_reduce", ("x",)), ("to_partial", ("x",))]),
        # y splits dim 0 inside x's tiles: x can leave only if boxes go elsewhere in y's direction, too.
        ("S[0], S[0]", "R, S[0]", [("exchange", ("x", "y"))]),
        # x has to come first in dim 0.
        ("R, S[0]", "S[0], S[0]", [("exchange", ("x", "y"))]),
        ("S[0], S[0]", "S[0], S[1]", [("all_to_all", ("y",))]),
        # Axes that swap their places: every device gets another's whole tile.
        ("S[0], R", "R, S[0]", [("permute", ("x", "y"))]),
        ("S[0], S[1]", "S[1], S[0]", [("permute", ("x", "y"))]),
        # First what makes tiles smaller.
        ("P[sum], R", "R, S[0]", [("slice", ("y",)), ("all_reduce", ("x",))]),
        ("P[sum], S[0]", "R, S[1]", [("all_to_all", ("y",)), ("all_reduce", ("x",))]),
    ],
    ids=str,
)
def test_plans(src, dst, expected):
    assert plan(src, dst) == expected


def test_axes_of_different_size_exchange_boxes():
    assert plan("S[0], R", "R, S[0]", Mesh({"x": 2, "y": 3})) == [("exchange", ("x", "y"))]


def test_partial_axes_that_stay():
    src, dst = (Sharding.parse(EIGHT, 2, text) for text in ("P[sum], S[0], P[sum]", "P[sum], S[1], R"))
    moves = plan_moves(src, dst, (8, 8))
    assert {axis for move in moves for axis in move.axes} == {"y", "z"}


def test_how_it_prints():
    src, dst = (Sharding.parse(MESHES[2], 2, text) for text in ("P[sum], S[0]", "S[1], S[1]"))
    made = RedistributionPlan.make((8, 8), "float32", 4, src, dst)
    assert str(made).splitlines()[0] == (
        f"(8, 8) float32, 'P[sum], S[0]' -> 'S[1], S[1]' on {MESHES[2]}: {made.bytes} bytes per device"
    )
    assert len(str(made).splitlines()) == 2 + len(made.moves)
    assert sum(made.bytes_per_move) == made.bytes
    assert str(RedistributionPlan.make((8, 8), "float32", 4, dst, dst)).endswith("nothing to do")


def test_stages_hold_one_reduction_each():
    src, dst = (Sharding.parse(MESHES[2], 2, text) for text in ("P[sum], P[sum]", "S[0], R"))
    stages = RedistributionPlan.make((8, 8), "float32", 4, src, dst).stages
    assert [str(stage) for stage in stages] == ["P[sum], P[sum]", "S[0], P[sum]", "S[0], R"]


def test_layouts_of_different_tensors():
    message = refusal(lambda: plan_moves(Sharding.make(MESHES[0], 1), Sharding.make(MESHES[1], 1), (4,)))
    assert "not layouts of one tensor on one mesh" in message
    message = refusal(lambda: plan_moves(Sharding.make(MESHES[0], 1), Sharding.make(MESHES[0], 1, {"x": 0}), (4, 4)))
    assert "shape (4, 4) has 2 dims" in message


@pytest.mark.parametrize("mesh", MESHES[:3], ids=lambda mesh: "x".join(map(str, mesh.shape.values())))
def test_tiles_of_whole_blocks(mesh):
    """To blocks, between them, and back: what a device receives is what it lacks of its part, counted element by
    element, and is there along the axes that are said; what is partial is completed where it lies."""
    shape = (11, 6)
    every = list(layouts(mesh, 2))
    for src, dst in itertools.product(every[::2], every):
        for before, after in ((src.with_blocks([(0, 4)]), dst), (src.with_blocks([(0, 4)]), dst.with_blocks([(0, 3)]))):
            now = before
            for move in plan_moves(before, after, shape):
                assert illegal_move(now, move) == [], f"{before} -> {after}"
                if not now.partial and not move.after.partial:
                    for rank in range(mesh.num_devices):
                        group = mesh.group_of(rank, move.axes)
                        there = set().union(*(held(now, shape, other) for other in group))
                        assert held(move.after, shape, rank) <= there, f"{now} -> {move.after} over {move.axes}"
                    lacks = [
                        len(held(move.after, shape, rank) - held(now, shape, rank)) for rank in range(mesh.num_devices)
                    ]
                    received = elements_received(move.kind, shape, now, move.after, move.axes)
                    assert received == max(lacks), f"{now} -> {move.after}"
                now = move.after
            assert now == after


def held(layout, shape, rank):
    """The elements that a device holds."""
    return set(itertools.product(*(range(part.start, part.stop) for part in layout.box(shape, rank))))
