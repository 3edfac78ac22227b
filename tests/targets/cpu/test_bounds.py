"""Divisions of indices that are the same all along a block leave it, and conditions what always holds; nothing else is
touched."""

import tilelang.language as T
import torch
from tvm import tirx

import mesh_tensor as mt
from mesh_tensor.targets.cpu.exprs import Bounds
from mesh_tensor.targets.cpu.kernel import compile_for_cpu
from mesh_tensor.targets.interpreter import interpret
from mesh_tensor.tir.nodes import nodes


def _bounds():
    bounds, outer, inner = Bounds(), tirx.Var("o", "int32"), tirx.Var("i", "int32")
    bounds.loop(outer, tirx.IntImm("int32", 0), tirx.IntImm("int32", 100))
    bounds.loop(inner, tirx.IntImm("int32", 0), tirx.IntImm("int32", 32))
    return bounds, outer, inner


def test_a_division_leaves_the_block():
    bounds, outer, inner = _bounds()
    index = tirx.FloorDiv(outer * 32 + inner, tirx.IntImm("int32", 64))
    assert inner not in nodes(tirx.Evaluate(bounds.divided(index)), tirx.Var)
    rest = bounds.divided(tirx.FloorMod(outer * 32 + inner, tirx.IntImm("int32", 64)))
    for o in range(5):
        for i in range(32):
            values = {outer: tirx.IntImm("int32", o), inner: tirx.IntImm("int32", i)}
            assert int(bounds.simplify(tirx.stmt_functor.substitute(rest, values))) == (o * 32 + i) % 64


def test_what_compares_floats_stays():
    """`!(x < y)` is no `y <= x`: one of them may be NaN."""
    bounds, outer, inner = _bounds()
    x = tirx.Var("x", "float32")
    divided = tirx.EQ(tirx.FloorDiv(outer * 32 + inner, tirx.IntImm("int32", 64)), tirx.IntImm("int32", 0))
    for condition in (tirx.And(divided, tirx.Not(x < 1.0)), tirx.Not(x < 1.0), outer * 32 + inner < 64):
        assert bounds.divided(condition).same_as(condition)


def test_conditions_lose_what_always_holds():
    bounds, outer, inner = _bounds()
    x, some = tirx.Var("x", "float32"), outer * 32 + inner < 100
    always = outer * 32 + inner < 3200
    assert bounds.open_part(always) is None
    assert bounds.open_part(tirx.And(always, inner >= 0)) is None
    for condition in (some, tirx.And(always, some), tirx.And(some, always)):
        assert bounds.open_part(condition).same_as(some)
    for condition in (x <= x, tirx.Or(some, always)):  # NaN is not at most itself
        left = bounds.open_part(condition)
        assert left is None if isinstance(condition, tirx.Or) else left.same_as(condition)


def test_nan_beside_a_division():
    @T.prim_func
    def kernel(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(2, threads=32) as bx:
            for i in T.Parallel(32):
                if (bx * 32 + i) // 64 == 0 and not (X[bx * 32 + i] < 0.0):
                    Y[bx * 32 + i] = 1.0
                else:
                    Y[bx * 32 + i] = 2.0

    x, y = torch.randn(64), torch.empty(64)
    x[5] = torch.nan
    compile_for_cpu(kernel)(x, y)
    torch.testing.assert_close(y, torch.where(x < 0, 2.0, 1.0))


def test_a_condition_whose_numbers_begin_anew():
    """Of 8 bits, what 40 is added to may be less than 40."""

    @T.prim_func
    def kernel(A: T.Tensor((250,), "float32"), out: T.Tensor((250,), "float32")):
        with T.Kernel(1, threads=32):
            for j in T.Parallel(250):
                out[j] = T.if_then_else(T.cast(j, "uint8") + T.uint8(40) >= T.uint8(40), A[j], 0.0)

    a = torch.rand(250) + 1
    result = mt.compile(mt.annotate(kernel, {"x": 2}, {"A": {"x": 0}, "out": {"x": 0}}), target="c")(a)
    torch.testing.assert_close(result, torch.where(torch.arange(250) < 216, a, 0.0))


def test_conditions_on_numbers_without_a_sign():
    """They are no bounds tests that always hold; the bits that a shift takes out of int32 are gone on any target."""

    @T.prim_func
    def kernel(A: T.Tensor((300,), "float32"), out: T.Tensor((300,), "float32")):
        with T.Kernel(300, threads=1) as bx:
            small = T.if_then_else(T.cast(bx % 5, "uint8") * T.uint8(40) <= T.uint8(40), A[bx], 0.0)
            out[bx] = T.if_then_else(T.shift_left(bx, 24) >= 0, small, -1.0)

    a, places = torch.rand(300) + 1, torch.arange(300)
    expected = torch.where(places % 256 < 128, torch.where(places % 5 < 2, a, 0.0), -1.0)
    out, interpreted = torch.empty(300), torch.empty(300)
    compile_for_cpu(kernel)(a, out)
    torch.testing.assert_close(out, expected)
    interpret(kernel, [a.numpy(), interpreted.numpy()])
    torch.testing.assert_close(interpreted, expected)


def test_conditions_on_remainders_below_0():
    """What is rounded to 0 leaves remainders below it, which TVM's solver proves that there are none of."""
    N = 45

    @T.prim_func
    def kernel(A: T.Tensor((N,), "float32"), B: T.Tensor((3, N), "float32")):
        with T.Kernel(T.ceildiv(N, 16), threads=16) as bx:
            for j in T.Parallel(16):
                if bx * 16 + j < N:
                    for row in T.serial(3):
                        B[row, bx * 16 + j] = 1.0
                    if T.truncmod(bx * 16 + j - 30, 7) >= 0:
                        B[0, bx * 16 + j] = A[bx * 16 + j]
                    if T.truncdiv(bx * 16 + j - 30, 7) * 7 <= bx * 16 + j - 30:
                        B[1, bx * 16 + j] = A[bx * 16 + j]
                    if T.truncmod(bx * 16 + j - 30, 7) < 0:
                        if bx * 16 + j < 20:
                            B[2, bx * 16 + j] = A[bx * 16 + j]
                        else:
                            B[2, bx * 16 + j] = 3.0

    a, place = torch.randn(N), torch.arange(N) - 30
    remainder = torch.fmod(place, 7)
    below = torch.where(place < -10, a, 3.0)
    expected = torch.stack([torch.where(remainder >= 0, a, 1.0)] * 2 + [torch.where(remainder < 0, below, 1.0)])
    for devices in (1, 2, 3):
        annotated = mt.annotate(kernel, mt.Mesh({"x": devices}), {"A": {"x": 0}, "B": {"x": 1}})
        assert torch.equal(mt.compile(annotated, target="c")(a), expected)
