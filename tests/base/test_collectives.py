"""The table of collectives: what the parts of the compiler read of it, and that they read it."""

import ast
import inspect
from pathlib import Path

import pytest

import mesh_tensor
from mesh_tensor import Mesh, Partial, Replicate, Shard, Sharding
from mesh_tensor.base.collectives import BETWEEN, COLLECTIVES
from mesh_tensor.redistribution import search
from mesh_tensor.redistribution.plan import elements_received, illegal_move, plan_moves

MESH = Mesh({"x": 3, "y": 2})
PLACES = {Partial: Partial("sum"), Replicate: Replicate(), Shard: Shard(0)}
NAMED = [kind for kind in COLLECTIVES.values() if not kind.is_direct]


def layouts(kind):
    """Of a matrix, before and after: x does what the kind says, y splits dim 1."""
    before, after = kind.placements("sum", 0, 0 if kind.before is not Shard else 1)
    return [Sharding.of(MESH, 2, {"x": place, "y": Replicate()}) for place in (before, after)]


@pytest.mark.parametrize("kind", NAMED, ids=lambda kind: kind.name)
def test_the_search_finds_it(kind):
    before, after = layouts(kind)
    (move,) = plan_moves(before, after, (12, 12))
    assert (move.kind, move.axes) == (kind.name, ("x",))
    assert illegal_move(before, move) == []
    assert illegal_move(after, move) != []


@pytest.mark.parametrize("kind", NAMED, ids=lambda kind: kind.name)
def test_what_is_received(kind):
    """144 elements over 3 devices, at even sizes."""
    before, after = layouts(kind)
    expected = {"all_reduce": 192, "reduce_scatter": 96, "all_gather": 96, "all_to_all": 32}.get(kind.name, 0)
    assert elements_received(kind.name, (12, 12), before, after, ("x",)) == expected
    assert kind.sends == (expected > 0) == (kind.messages(3) > 0)


def test_what_reduces():
    assert {kind.name for kind in COLLECTIVES.values() if kind.reduces} == {"all_reduce", "reduce_scatter"}
    assert {kind.name for kind in COLLECTIVES.values() if kind.works_in_place} == {"all_reduce"}
    assert {kind.name for kind in COLLECTIVES.values() if kind.is_direct} == {"permute", "exchange", "halo"}


def test_every_change_of_one_kind_of_placement_has_a_name():
    """But for those that take two: nothing leads from parts to parts, nor from a dim to parts."""
    pairs = {(a, b) for a in PLACES for b in PLACES if (a, b) != (Replicate, Replicate)}
    assert pairs - set(BETWEEN) == {(Partial, Partial), (Shard, Partial)}


def test_only_the_table_and_the_search_name_them():
    """So a collective is added in two places, and in none that runs, checks, prices or prints it. What users may say in
    manual computations is a list of its own."""
    package = Path(mesh_tensor.__file__).parent
    table, edges = package / "base" / "collectives.py", Path(inspect.getfile(search))
    said = package / "annotations" / "comm.py"
    words = set(COLLECTIVES) - {"slice", "permute"}  # words of other languages too
    texts = {path: path.read_text() for path in package.rglob("*.py")}
    named = {
        path
        for path, text in texts.items()
        if any(word in text for word in words)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value in words
    }
    assert named == {table, edges, said}
