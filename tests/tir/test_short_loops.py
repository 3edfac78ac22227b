"""Loops that begin or end where their block says so: made long, and short again, they do the same iterations."""

import pytest
from tvm import arith, tirx

from mesh_tensor.tir.loops import SHORT, lengthen, shorten

LENGTH = 6
K, BLOCK = tirx.Var("k", "int32"), tirx.Var("block", "int32")
OUT = tirx.decl_buffer((LENGTH,), "int32", "out")
STORE = tirx.BufferStore(OUT, tirx.IntImm("int32", 1), [K])


def iterations(stmt, block):
    """The values of k for which a loop stores, where the block has that number."""
    analyzer = arith.Analyzer()

    def value(expr, k=0):
        names = {BLOCK: tirx.IntImm("int32", block), K: tirx.IntImm("int32", k)}
        return int(analyzer.simplify(tirx.stmt_functor.substitute(expr, names)))

    start = value(stmt.min)
    inside = range(start, start + max(0, value(stmt.extent)))
    if isinstance(stmt.body, tirx.IfThenElse):
        return [k for k in inside if value(stmt.body.condition, k=k)]
    return list(inside)


CONDITIONS = {
    "ends": (K < BLOCK + 1, lambda k, b: k < b + 1),
    "ends, the other way round": (BLOCK + 1 > K, lambda k, b: k < b + 1),
    "ends at": (K <= BLOCK, lambda k, b: k <= b),
    "starts": (K >= BLOCK, lambda k, b: k >= b),
    "starts, the other way round": (BLOCK <= K, lambda k, b: k >= b),
    "starts after": (K > BLOCK, lambda k, b: k > b),
    "shifted": (K + 2 < BLOCK * 2, lambda k, b: k + 2 < b * 2),
    "both": (tirx.And(K >= BLOCK, K < BLOCK + 2), lambda k, b: b <= k < b + 2),
    "three": (tirx.And(tirx.And(K < BLOCK + 3, K >= 1), K < 5), lambda k, b: 1 <= k < min(b + 3, 5)),
    "no bounds": (tirx.EQ(K % 2, BLOCK % 2), lambda k, b: k % 2 == b % 2),
    "half of it": (tirx.And(K * 2 < BLOCK + 3, K >= 0), lambda k, b: k * 2 < b + 3),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_short_again(name):
    condition, holds = CONDITIONS[name]
    body = tirx.IfThenElse(condition, STORE, None)
    made = shorten(tirx.For(K, 0, LENGTH, tirx.ForKind.SERIAL, body, None, {SHORT: True}))
    assert SHORT not in made.annotations
    assert isinstance(made.body, tirx.IfThenElse) == (name in ("no bounds", "half of it"))
    for block in range(5):
        assert iterations(made, block) == [k for k in range(LENGTH) if holds(k, block)]


def test_long_and_short():
    loop = tirx.For(K, BLOCK, 4 - BLOCK, tirx.ForKind.SERIAL, STORE)
    grid = tirx.For(BLOCK, 0, 4, tirx.ForKind.SERIAL, loop)
    long = lengthen(tirx.PrimFunc([], grid, None, {})).body
    assert (int(long.body.min), int(long.body.extent)) == (0, 4)
    for block in range(4):
        assert iterations(long.body, block) == iterations(shorten(long).body, block) == list(range(block, 4))


def test_loops_with_a_step_stay_as_they_are():
    loop = tirx.For(K, BLOCK, 4 - BLOCK, tirx.ForKind.SERIAL, STORE, step=tirx.IntImm("int32", 2))
    func = tirx.PrimFunc([], tirx.For(BLOCK, 0, 4, tirx.ForKind.SERIAL, loop), None, {})
    assert lengthen(func).same_as(func)
