"""Loops from the last position to the first: made to go over positions, and back again, they do the same iterations in
the same order."""

import pytest
from tvm import arith, tirx

from mesh_tensor.tir.loops import BACKWARD, backward, forward, is_backward

STEP, ROW = tirx.Var("step", "int32"), tirx.Var("row", "int32")
A = tirx.decl_buffer((16,), "float32", "A")
CHIP = tirx.decl_buffer((16,), "float32", "chip", scope="shared")
HANDLE = tirx.Var("A_handle", "handle")


def function(body):
    return tirx.PrimFunc([HANDLE], body, buffer_map={HANDLE: A})


def loop(*stores, start=0, extent=8, kind=tirx.ForKind.SERIAL, **rest):
    body = tirx.SeqStmt(list(stores)) if len(stores) > 1 else stores[0]
    return tirx.For(STEP, start, extent, kind, body, **rest)


def store(index, buffer=A):
    return tirx.BufferStore(buffer, tirx.FloatImm("float32", 1.0), [index])


def visited(made):
    """The positions at which a loop stores, in order."""
    analyzer, start, extent = arith.Analyzer(), int(made.min), int(made.extent)
    places = [tirx.stmt_functor.substitute(made.body.indices[0], {made.loop_var: start + n}) for n in range(extent)]
    return [int(analyzer.simplify(place)) for place in places]


@pytest.mark.parametrize(("start", "index"), [(0, 7 - STEP), (0, 9 - STEP), (2, 10 - STEP), (0, (7 - STEP) * 2)])
def test_there_and_back(start, index):
    before = loop(store(index), start=start)
    made = forward(function(before)).body
    assert is_backward(made)
    assert visited(made) == visited(before)[::-1]
    again = backward(made)
    assert not is_backward(again)
    assert visited(again) == visited(before)


def test_a_part_of_the_range_is_walked_back():
    made = forward(function(loop(store(7 - STEP)))).body
    part = tirx.For(made.loop_var, 2, 3, made.kind, made.body, None, made.annotations)
    assert visited(backward(part)) == [4, 3, 2]


@pytest.mark.parametrize(
    "stays",
    [
        loop(store(STEP)),
        loop(store(7 - STEP), store(STEP)),
        loop(store(7 - STEP, CHIP)),
        loop(store(tirx.max(7 - STEP, 0))),
        loop(store(7 - STEP), kind=tirx.ForKind.PARALLEL),
        loop(store(7 - STEP), step=tirx.IntImm("int32", 2)),
        loop(store(7 - STEP), annotations={"mesh_tensor.interval": "inner"}),
    ],
)
def test_what_does_not_walk_back_stays(stays):
    made = forward(function(stays)).body
    assert BACKWARD not in made.annotations


def test_a_loop_as_long_as_its_row_says():
    row = tirx.For(ROW, 0, 4, tirx.ForKind.SERIAL, loop(store(ROW - STEP), extent=ROW + 1))
    made = forward(function(row)).body.body
    assert is_backward(made)
    assert made.body.indices[0].same_as(made.loop_var)
