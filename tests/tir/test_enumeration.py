"""What is proved by trying all values."""

import pytest
from tvm import tirx

from mesh_tensor.tir.linear import holds_always

ROW, COLUMN, N = (tirx.Var(name, "int32") for name in "ijn")
LOOPS = [(ROW, tirx.IntImm("int32", 0), tirx.IntImm("int32", 6)), (COLUMN, ROW, 7 - ROW)]
A = tirx.decl_buffer((8,), "int32", "A")


@pytest.mark.parametrize(
    ("fact", "given", "holds"),
    [
        (COLUMN >= ROW, [], True),
        (COLUMN < 7, [], True),
        (COLUMN < 6, [], False),
        (COLUMN < 6, [tirx.EQ(ROW % 2, 1), tirx.EQ(COLUMN % 2, 1)], True),
        (tirx.floordiv(ROW * 7 + COLUMN, 7) <= 6, [], True),
        (tirx.min(ROW, 3) * 2 + tirx.max(COLUMN, 1) >= 1, [], True),
        (tirx.if_then_else(ROW < 3, ROW, 5 - ROW) < 3, [], True),
        (tirx.Or(ROW < 3, tirx.Not(ROW < 3)), [], True),
        (tirx.Select(ROW < 3, ROW, COLUMN) <= COLUMN, [], True),
        (tirx.truncdiv(ROW - 3, 2) >= -1, [], True),
        (tirx.floordiv(ROW - 3, 2) >= -1, [], False),
        (tirx.truncmod(ROW - 3, 2) >= 0, [], False),
        (COLUMN < N, [], False),
        (COLUMN < 7, [A[ROW] > 0], True),
        (A[ROW] >= 0, [], False),
        (tirx.floordiv(COLUMN, ROW) >= 0, [], False),
    ],
)
def test_facts(fact, given, holds):
    assert holds_always(fact, LOOPS, given) == holds


def test_loops_that_never_run():
    assert holds_always(ROW < 0, [(ROW, tirx.IntImm("int32", 0), tirx.IntImm("int32", 0))], [])


def test_too_many_values_prove_nothing():
    large = tirx.IntImm("int32", 1 << 12)
    assert not holds_always(
        ROW >= 0, [(ROW, tirx.IntImm("int32", 0), large), (COLUMN, tirx.IntImm("int32", 0), large)], []
    )
