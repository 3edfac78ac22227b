"""Loops of which one iteration does something, and how they go away again."""

import tilelang.language as T
from tvm import ir, tirx

from mesh_tensor.tir.loops import ONE_ITERATION, is_one_iteration, one_iteration, shorten
from mesh_tensor.tir.nodes import nodes


def _store(at):
    buffer = tirx.decl_buffer((64,), "int32", "A")
    return tirx.BufferStore(buffer, tirx.IntImm("int32", 1), [at])


def _outer(var, body, extent=4):
    return tirx.For(var, 0, extent, tirx.ForKind.SERIAL, body)


def test_all_iterations_are_there():
    k, v = tirx.Var("k", "int32"), tirx.Var("v", "int32")
    loop = one_iteration(v, 4, 3 - k, _store(v * 8))
    assert is_one_iteration(loop)
    (store,) = nodes(shorten(_outer(k, loop)), tirx.BufferStore)
    assert not nodes(shorten(_outer(k, loop)), tirx.IfThenElse)
    assert ir.structural_equal(store.indices[0], (3 - k) * 8, map_free_vars=False)


def test_some_iterations_are_left():
    k, v, x = (tirx.Var(name, "int32") for name in "kvx")
    only = one_iteration(v, 4, k, _store(v * 8)).body
    shifted = tirx.IfThenElse(tirx.EQ(v + x * 2, k), only.then_case, None)
    loop = tirx.For(v, 0, 2, tirx.ForKind.SERIAL, shifted, None, {ONE_ITERATION: 1})
    (condition,) = nodes(shorten(_outer(k, loop)), tirx.IfThenElse)
    assert ir.structural_equal(condition.condition, tirx.And(k - x * 2 >= 0, k - x * 2 < 2))


def test_what_was_changed_otherwise_stays():
    k, v = tirx.Var("k", "int32"), tirx.Var("v", "int32")
    for condition in (tirx.EQ(v * 2, k), tirx.EQ(v, k + v), tirx.LT(v, k)):
        loop = tirx.For(
            v, 0, 4, tirx.ForKind.SERIAL, tirx.IfThenElse(condition, _store(v), None), None, {ONE_ITERATION: 1}
        )
        assert ir.structural_equal(shorten(_outer(k, loop)), _outer(k, loop))


def test_kernels_without_such_loops_stay_the_same():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32")):
        with T.Kernel(2, threads=32) as bx:
            for i in T.Parallel(4):
                A[bx * 4 + i] = 0.0

    assert shorten(kernel.body).same_as(kernel.body)
