"""Which nodes are in a statement."""

import pytest
from tvm import tirx

from kernels.matmul import matmul
from mesh_tensor.tir.nodes import nodes

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
