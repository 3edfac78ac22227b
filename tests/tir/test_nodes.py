"""Which nodes are in a statement."""

import pytest
from tvm import tirx

from kernels.matmul import matmul
from mesh_tensor.tir.nodes import nodes, same_expression

BODY = matmul(64, 64, 64, 16, 16, 16).body


@pytest.mark.parametrize(
    "kinds", [(tirx.For,), (tirx.BufferLoad, tirx.Var), (tirx.Stmt,), (tirx.PrimExpr,), (tirx.While,)], ids=len
)
def test_nodes_come_as_a_walk_meets_them(kinds):
    expected = []
    tirx.stmt_functor.post_order_visit(BODY, lambda node: expected.append(node) if isinstance(node, kinds) else None)
    found = nodes(BODY, *kinds)
    assert len(found) == len(expected)
    assert all(a.same_as(b) for a, b in zip(found, expected, strict=True))


def test_what_was_found_can_be_changed():
    found = nodes(BODY, tirx.For)
    found.clear()
    assert len(nodes(BODY, tirx.For)) == 3


def test_the_innermost_comes_first():
    inner, *_, outer = nodes(BODY, tirx.For)
    assert inner.loop_var.name == "ko"
    assert outer.thread_binding is not None


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
