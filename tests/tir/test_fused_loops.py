"""Grid loops over two dims at once are split for analysis and put together again."""

import pytest
import tilelang.language as T
import torch
from tvm import tirx

import mesh_tensor as mt
from mesh_tensor.tir.double_loops import fuse, unfuse
from mesh_tensor.tir.nodes import nodes


def scale(batch, heads, width, *, extra=False):
    @T.prim_func
    def kernel(
        x: T.Tensor((batch, heads, width), "float32"),
        factor: T.Tensor((heads,), "float32"),
        out: T.Tensor((batch, heads, width), "float32"),
    ):
        with T.Kernel(batch * heads, threads=32) as bz:
            row = T.alloc_fragment((width,), "float32")
            T.copy(x[bz // heads, bz % heads, 0], row)
            for i in T.Parallel(width):
                row[i] = row[i] * factor[bz % heads] + (T.Cast("float32", bz) if extra else T.float32(0))
            T.copy(row, out[bz // heads, bz % heads, 0])

    return kernel


def test_each_dim_has_a_loop_of_its_own():
    assert str(mt.sharding_rule(scale(4, 6, 8))) == "x[b, m, n], factor[m] -> out[b, m, n]; b, m, n parallel"


def test_fusing_again_gives_one_bound_loop():
    func = scale(4, 6, 8)
    script = func.with_body(fuse(unfuse(func).body)).script()
    assert 'T.thread_binding(24, thread="blockIdx.x")' in script
    assert "// 6" in script
    assert "% 6" in script


def digits(batch, chunks, heads, *, by=None):
    """One dim of the grid counts through three dims of x; `by`: what the middle one is divided by, if not by heads."""
    by = by or heads

    @T.prim_func
    def kernel(
        x: T.Tensor((batch, chunks, heads, 8), "float32"),
        factor: T.Tensor((batch, chunks), "float32"),
        out: T.Tensor((batch, chunks, heads, 8), "float32"),
    ):
        with T.Kernel(batch * chunks * heads, threads=32) as at:
            row = T.alloc_fragment((8,), "float32")
            T.copy(x[at // (chunks * heads), at // heads % chunks, at % heads, 0], row)
            for i in T.Parallel(8):
                row[i] = row[i] * factor[at // (chunks * heads), at % (chunks * heads) // by]
            T.copy(row, out[at // (chunks * heads), at // heads % chunks, at % heads, 0])

    return kernel


def test_a_loop_over_three_dims_becomes_three_and_one_again():
    func = digits(4, 5, 6)
    split = unfuse(func).body
    assert [int(loop.extent) for loop in nodes(split, tirx.For)[-3:]] == [6, 5, 4]
    script = func.with_body(fuse(split)).script()
    assert 'T.thread_binding(120, thread="blockIdx.x")' in script
    assert "fused" not in script


def test_a_loop_that_is_divided_by_what_divides_nothing_stays():
    split = unfuse(digits(4, 5, 6, by=7)).body
    assert [int(loop.extent) for loop in nodes(split, tirx.For)[-2:]] == [30, 4]


@pytest.mark.parametrize("dims", [{"x": 0, "y": 1}, {"x": 1, "y": 2}, {"x": 2, "y": 0}, {"x": 2, "y": 2}])
def test_each_of_three_dims_can_be_split(dims):
    func = digits(4, 5, 6)
    assert str(mt.sharding_rule(func)) == "x[b, h, m, n], factor[b, h] -> out[b, h, m, n]; b, h, m, n parallel"
    kernel = mt.compile(mt.annotate(func, {"x": 2, "y": 3}, {"x": dims, "out": dims}), target="interpret", poison=True)
    assert not any(step.bytes for step in kernel.program.steps)
    x, factor = torch.randn(4, 5, 6, 8), torch.randn(4, 5)
    torch.testing.assert_close(kernel(x, factor), x * factor[:, :, None, None])


def test_a_loop_whose_variable_is_used_otherwise_stays():
    func = scale(4, 6, 8, extra=True)
    assert unfuse(func).body.same_as(func.body)


@pytest.mark.parametrize("shardings", [{"x": 0, "y": 1}, {"x": 1, "y": 0}, {"x": 1, "y": 1}, {"y": 2}])
@pytest.mark.parametrize("extra", [False, True])
def test_both_dims_can_be_split(shardings, extra):
    func = mt.annotate(scale(4, 5, 6, extra=extra), {"x": 2, "y": 3}, {"x": shardings, "out": shardings})
    x, factor = torch.randn(4, 5, 6), torch.randn(5)
    expected = x * factor[:, None] + (torch.arange(20.0).reshape(4, 5, 1) if extra else 0)
    torch.testing.assert_close(mt.compile(func, target="interpret", poison=True)(x, factor), expected)


def test_loops_within_the_grid_are_split_if_asked_for():
    @T.prim_func
    def doubled(X: T.Tensor((4, 6), "float32"), Y: T.Tensor((4, 12), "float32")):
        with T.Kernel(4, threads=32) as b:
            for j in T.Parallel(12):
                Y[b, j] = T.if_then_else(j % 2 == 0, X[b, j // 2], -X[b, j // 2])

    assert unfuse(doubled, alone=True).same_as(doubled)
    script = unfuse(doubled, alone=True, within=True).script()
    assert "for j_div, j_mod in T.grid(6, 2)" in script or "for j_div in T.parallel(6)" in script
    assert "//" not in script


def test_a_pipelined_loop_over_several_dims():
    """Of `ko // 6`, `ko % 6 // 2` and `ko % 2`, the last is what the inner loop walks; it stays pipelined."""

    @T.prim_func
    def rows(X: T.Tensor((3, 3, 64), "float32"), Y: T.Tensor((18, 32), "float32")):
        with T.Kernel(1, threads=32) as _:
            for ko in T.Pipelined(18, num_stages=2):
                for j in T.Parallel(32):
                    Y[ko, j] = X[ko // 6, ko % 6 // 2, ko % 2 * 32 + j]

    assert unfuse(rows, alone=True).same_as(rows)
    script = unfuse(rows, alone=True, within=True).script()
    assert "X[ko_div // 3, ko_div % 3, ko_mod * 32 + j]" in script
    assert 'for ko_mod in T.serial(2, annotations={"num_stages": 2})' in script
