"""Whether two expressions are the same."""

from tvm import tirx

from mesh_tensor.tir.same import same_expression


def test_loads_of_buffers_that_look_alike_differ():
    a, b = (tirx.decl_buffer([5], "int32", "A") for _ in range(2))
    i, j = (tirx.Var("i", "int32") for _ in range(2))
    here = tirx.BufferLoad(a, [i])
    assert same_expression(here, tirx.BufferLoad(a, [i]))
    assert not same_expression(here, tirx.BufferLoad(b, [i]))
    assert not same_expression(here, tirx.BufferLoad(a, [j]))


def test_loads_at_any_depth():
    a, b = (tirx.decl_buffer([5], "int32", "A") for _ in range(2))
    i = tirx.Var("i", "int32")
    x, y = tirx.BufferLoad(a, [i]), tirx.BufferLoad(b, [i])
    assert same_expression(x + x + y, tirx.BufferLoad(a, [i]) + x + tirx.BufferLoad(b, [i]))
    assert not same_expression(x + x + y, x + y + y)
    assert not same_expression(tirx.BufferLoad(a, [x]), tirx.BufferLoad(a, [y]))
    assert not same_expression(4 - x, 4 - y)
