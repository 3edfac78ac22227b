"""Calls as one function: shapes, dtypes, what ends, what is kept between two lines, and which line failed."""

import pytest
import torch

from mesh_tensor.targets.straight_line import Line, StraightLine, TileCall


def call(function, takes, makes, **changes):
    """A call whose tiles are kept as they are; float32."""
    facts = {"comes": takes, "takes": takes, "makes": makes, "gives": makes}
    facts |= {"dtypes": (torch.float32,) * len(makes), "whole": (False,) * len(makes)}
    return TileCall(function, **facts | changes)


PAIR = ((2, 3),)


@pytest.mark.parametrize("listed", [False, True])
def test_what_ends_is_gone_and_what_stays_is_there(listed):
    lines = [
        Line(call(torch.neg, PAIR, PAIR), ("a",), ("b",)),
        Line(call(torch.add, PAIR * 2, PAIR), ("a", "b"), ("c",), ends=("a", "b")),
        Line(call(torch.exp, PAIR, PAIR), ("c",), ("d",), ends=("other",)),
    ]
    a = torch.randn(2, 3)
    held = {"a": a, "other": a, "stays": a}
    held = {name: [tile] for name, tile in held.items()} if listed else held
    StraightLine(lines, listed=listed).run(held)
    assert set(held) == {"stays", "c", "d"}
    tiles = {name: tile[0] if listed else tile for name, tile in held.items()}
    assert torch.equal(tiles["c"], torch.zeros(2, 3))
    assert torch.equal(tiles["d"], torch.ones(2, 3))


def test_tiles_are_kept_in_other_shapes_than_functions_want():
    flat = call(lambda x: x.t(), ((3, 2),), ((2, 3),), comes=((6,),), gives=((2, 1, 3),), whole=(True,))
    back = call(lambda x: x + 1, ((2, 3),), ((2, 3),), comes=((2, 1, 3),), gives=((6,),))
    a = torch.arange(6.0)
    held = {"a": a}
    StraightLine([Line(flat, ("a",), ("b",)), Line(back, ("b",), ("c",))]).run(held)
    expected = a.reshape(3, 2).t()
    assert torch.equal(held["b"], expected.reshape(2, 1, 3))
    assert held["b"].is_contiguous()
    assert torch.equal(held["c"], expected.reshape(6) + 1)


def test_results_in_sequences_and_of_other_dtypes():
    two = call(lambda x: (x > 0, x.double()), PAIR, PAIR * 2)
    one = call(lambda x: [x.to(torch.float64)], PAIR, PAIR)
    a = torch.randn(2, 3)
    held = {"a": a}
    StraightLine([Line(two, ("a",), ("b", "c")), Line(one, ("c",), ("d",))]).run(held)
    assert torch.equal(held["b"], (a > 0).float())
    assert all(torch.equal(held[name], a) for name in "cd")


def test_what_a_line_keeps_comes_to_the_line_that_takes_it():
    first = call(lambda x: ((x * 2,), "kept"), PAIR, PAIR)
    second = call(lambda x, kept: x if kept == "kept" else None, PAIR, PAIR)
    a = torch.randn(2, 3)
    held = {"a": a}
    StraightLine([Line(first, ("a",), ("b",), keeps="k"), Line(second, ("b",), ("c",), kept="k")]).run(held)
    assert torch.equal(held["c"], a * 2)
    assert set(held) == {"a", "b", "c"}


def test_the_line_that_failed_is_known():
    def fail(_):
        raise RuntimeError("no")

    good, bad = call(torch.neg, PAIR, PAIR), call(fail, PAIR, PAIR)
    line = StraightLine([Line(good, ("a",), ("b",)), Line(bad, ("b",), ("c",)), Line(good, ("c",), ("d",))])
    with pytest.raises(RuntimeError, match="no") as raised:
        line.run({"a": torch.ones(2, 3)})
    assert line.failed_at(raised.value) == 1
    with pytest.raises(KeyError) as missing:
        line.run({})
    assert line.failed_at(missing.value) == 0
