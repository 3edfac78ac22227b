"""Plans of layout changes: they arrive, every step is legal, and none sends more than gathering everything would."""

import itertools
import math

import pytest

from mesh_tensor import Mesh, Sharding
from mesh_tensor.lowering.reshard import Move, plan_moves
from mesh_tensor.lowering.verify import illegal_move
from mesh_tensor.sharding import Partial, Replicate, Shard

MESHES = [Mesh({"x": 2}), Mesh({"x": 2, "y": 2}), Mesh({"x": 2, "y": 2, "z": 2})]


def layouts(mesh, ndim, *, partial=()):
    """Every layout of a tensor on a mesh."""
    choices = [Replicate(), *(Shard(dim) for dim in range(ndim)), *(Partial(op) for op in partial)]
    for placements in itertools.product(choices, repeat=len(mesh)):
        yield Sharding.of(mesh, ndim, dict(zip(mesh.axis_names, placements, strict=True)))


def sent(src, move):
    """Bytes that one device sends, in units of the whole tensor."""
    tile = 1 / math.prod(src.num_shards(dim) for dim in range(src.ndim))
    group = math.prod(src.mesh.size(axis) for axis in move.axes)
    share = {"all_reduce": 2 * (group - 1) / group, "all_gather": group - 1, "slice": 0, "to_partial": 0}
    return tile * share.get(move.kind, (group - 1) / group)


def check(src, dst):
    """The plan from `src` to `dst`; returns what it sends."""
    now, total = src, 0.0
    for move in plan_moves(src, dst):
        assert illegal_move(now, move) == []
        total += sent(now, move)
        now = move.after
    assert now == dst
    return total


def gather_everything(src):
    """What completing and gathering all of `src` sends; slicing the result costs nothing."""
    complete, total = src, 0.0
    for op in dict.fromkeys(op for _, op in src.partial):
        axes = tuple(axis for axis, other in src.partial if other == op)
        total += sent(complete, Move("all_reduce", axes, complete, op=op))
        for axis in axes:
            complete = complete.with_replicate(axis)
    whole = math.prod(complete.num_shards(dim) for dim in range(src.ndim))
    return total + (whole - 1) / whole


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_every_pair_of_layouts(mesh, ndim):
    every = list(layouts(mesh, ndim))
    for src, dst in itertools.product(every, every):
        assert check(src, dst) <= gather_everything(src) + 1e-9, f"{src} -> {dst}"


@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
@pytest.mark.parametrize("ndim", [1, 2])
def test_every_pair_of_layouts_with_partial_values(mesh, ndim):
    every = list(layouts(mesh, ndim, partial=("sum", "max")))
    for src, dst in itertools.product(every, every):
        assert check(src, dst) <= gather_everything(src) + 1e-9, f"{src} -> {dst}"


def test_nothing_to_do():
    for layout in layouts(MESHES[1], 2, partial=("sum",)):
        assert plan_moves(layout, layout) == []


def plan(src, dst, mesh=MESHES[1], ndim=2):
    """The plan in words."""
    moves = plan_moves(Sharding.parse(mesh, ndim, src), Sharding.parse(mesh, ndim, dst))
    return [(move.kind, move.axes) for move in moves]


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ("R, R", "S[0], S[1]", [("slice", ("x",)), ("slice", ("y",))]),
        ("S[0], S[0]", "R, R", [("all_gather", ("x", "y"))]),
        ("S[0], S[1]", "R, R", [("all_gather", ("x",)), ("all_gather", ("y",))]),
        ("P[sum], P[sum]", "R, R", [("all_reduce", ("x", "y"))]),
        ("P[sum], P[max]", "R, R", [("all_reduce", ("x",)), ("all_reduce", ("y",))]),
        ("P[sum], R", "S[0], R", [("reduce_scatter", ("x",))]),
        ("S[0], R", "S[1], R", [("all_to_all", ("x",))]),
        ("R, R", "R, P[sum]", [("to_partial", ("y",))]),
        # y splits dim 0 inside x's tiles: x can leave only together with it.
        ("S[0], S[0]", "R, S[0]", [("all_gather", ("x", "y")), ("slice", ("y",))]),
        # x has to come first in dim 0, so y makes room for it.
        ("R, S[0]", "S[0], S[0]", [("all_gather", ("y",)), ("slice", ("x",)), ("slice", ("y",))]),
        ("S[0], S[0]", "S[0], S[1]", [("all_to_all", ("y",))]),
    ],
    ids=str,
)
def test_plans(src, dst, expected):
    assert plan(src, dst) == expected
