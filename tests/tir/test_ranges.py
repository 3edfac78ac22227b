"""What is known of loop variables."""

from tvm import tirx

from mesh_tensor.tir.linear import loop_ranges


def loop(var, extent):
    return tirx.For(var, 0, extent, tirx.ForKind.SERIAL, tirx.Evaluate(0))


def test_a_loop_variable_is_in_its_range():
    i = tirx.Var("i", "int32")
    assert loop_ranges(loop(i, 4)).can_prove(i // 4 == 0)


def test_a_variable_of_two_loops_is_in_a_range_that_both_have():
    i = tirx.Var("i", "int32")
    same = tirx.SeqStmt([loop(i, 4), loop(i, 4)])
    other = tirx.SeqStmt([loop(i, 4), loop(i, 8)])
    assert loop_ranges(same).can_prove(i < 4)
    assert not loop_ranges(other).can_prove(i < 4)


def test_sizes_are_not_negative():
    n = tirx.Var("n", "int32")
    assert loop_ranges(tirx.Evaluate(0), [tirx.decl_buffer((n,), "float32")]).can_prove(n >= 0)
