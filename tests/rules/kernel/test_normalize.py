"""Kernels as rewriting leaves them: with a statement, or a variable, in two places."""

from __future__ import annotations

import pytest
import tilelang.language as T
import torch
from tvm import tirx

import mesh_tensor as mt


@T.prim_func
def scaled_rows(A: T.Tensor((6, 8), "float32"), B: T.Tensor((6, 8), "float32")):
    with T.Kernel(3, threads=128) as bx:
        total = T.alloc_fragment((2,), "float32")
        T.clear(total)
        for i in T.serial(2):
            for j in T.serial(8):
                total[i] = total[i] * 0.5 + A[bx * 2 + i, j]
        for i in T.serial(2):
            for j in T.serial(8):
                B[bx * 2 + i, j] = A[bx * 2 + i, j] + total[i]


def rewritten(func, change):
    return func.with_body(tirx.stmt_functor.ir_transform(func.body, None, change, ["tirx.For", "tirx.Var"]))


def twice(func):
    """Its sum is computed twice, by one object."""
    return rewritten(
        func,
        lambda node: (
            tirx.SeqStmt([node, node])
            if isinstance(node, tirx.For)
            and isinstance(node.body, tirx.BufferStore)
            and node.body.buffer.name == "total"
            else None
        ),
    )


def with_shared_variables(func):
    """All loops of a name have one variable."""
    first: dict[str, tirx.Var] = {}

    def change(node):
        var = node.loop_var if isinstance(node, tirx.For) else node
        shared = first.setdefault(var.name, var) if var.name in "ij" else var
        if not isinstance(node, tirx.For):
            return shared
        return tirx.For(shared, node.min, node.extent, node.kind, node.body, node.thread_binding, node.annotations)

    return rewritten(func, change)


@pytest.mark.parametrize("target", ["c", "interpret"])
@pytest.mark.parametrize("layout", [{"A": {"x": 0}, "B": {"x": 0}}, {"A": {"x": 1}, "B": {"x": 1}}])
@pytest.mark.parametrize(("change", "sums"), [(twice, 2), (with_shared_variables, 1)])
def test_what_stands_in_two_places(change, sums, layout, target):
    a = torch.randn(6, 8)
    total = torch.zeros(6)
    for column in [*range(8)] * sums:
        total = total * 0.5 + a[:, column]
    func = mt.annotate(change(scaled_rows), {"x": 2}, layout)
    torch.testing.assert_close(mt.compile(func, target=target)(a), a + total[:, None])
