"""Factors: what they say of themselves."""

from tvm import tirx

from mesh_tensor.rules.kernel.factors import Factor


def test_a_block_is_whole_steps_of_every_loop():
    loops = {tirx.Var(name, "int32"): step for name, step in (("bx", 4), ("ko", 6), ("i", 1))}
    assert Factor("m", tirx.IntImm("int32", 24), [("A", 0)], loops).block == 12
