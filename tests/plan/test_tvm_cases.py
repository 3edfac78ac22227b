"""The cases of TVM's own tests of distributed Relax: the layouts and collectives that TVM finds there, and numbers.

Sizes are smaller than TVM's. Not here: several meshes at once, and caches that are opaque objects.
"""

import pytest
import torch
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R
from tvm.script.parser import tirx as T

import mesh_tensor as mt

from .modules import kinds


def layouts(run):
    """Name of a value -> layout over its own dims (heads are dims of their own here), as text."""
    return {value.name: str(layout) for value, layout in run.plan.layouts.of.items()}


def check(run, mod, *inputs, **tolerance):
    tolerance = tolerance or {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(run(*inputs), mt.run_sequential(mod, list(inputs), "foo"), **tolerance)


@I.ir_module
class Const:
    I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2)), R.device_mesh((1,), I.Range(4, 5))]})

    @R.function
    def foo(
        x: R.Tensor((8, 12), "float32"), weight1: R.Tensor((12, 16), "float32"), weight2: R.Tensor((16, 12), "float32")
    ):
        lv0 = R.matmul(x, weight1)
        lv1 = R.nn.gelu(lv0)
        lv2 = R.add(lv1, R.const(2, "float32"))
        lv3 = R.dist.annotate_sharding(lv2, device_mesh="mesh[0]", placement="S[1]")
        lv4 = R.matmul(lv3, weight2)
        return lv4


def test_a_constant_in_between():
    run = mt.distribute_module(Const, function="foo")
    found = layouts(run)
    assert [found[name] for name in ("x", "weight1", "weight2", "lv0", "lv2")] == ["R", "S[1]", "S[0]", "S[1]", "S[1]"]
    assert found["const"] == "R"
    assert kinds(run.plan) == ["all_reduce"]
    check(run, Const, torch.randn(8, 12), torch.randn(12, 16), torch.randn(16, 12))


@I.ir_module
class Tuples:
    I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2)), R.device_mesh((1,), I.Range(4, 5))]})

    @T.prim_func(private=True)
    def halves(
        A: T.Buffer((8, 16), "float32"), above: T.Buffer((4, 16), "float32"), below: T.Buffer((4, 16), "float32")
    ):
        for i, j in T.grid(4, 16):
            with T.sblock("above"):
                vi, vj = T.axis.remap("SS", [i, j])
                above[vi, vj] = A[vi, vj]
        for i, j in T.grid(4, 16):
            with T.sblock("below"):
                vi, vj = T.axis.remap("SS", [i, j])
                below[vi, vj] = A[vi + 4, vj]

    @R.function
    def foo(
        x: R.Tensor((8, 12), "float32"),
        weights: R.Tuple(R.Tensor((12, 16), "float32"), R.Tensor((16, 12), "float32")),
    ):
        cls = Tuples
        weight1 = weights[0]
        lv0 = R.matmul(x, weight1)
        lv1 = R.nn.gelu(lv0)
        both = R.call_tir(cls.halves, (lv1,), out_sinfo=[R.Tensor((4, 16), "float32"), R.Tensor((4, 16), "float32")])
        lv2 = both[0]
        lv3 = R.dist.annotate_sharding(lv2, device_mesh="mesh[0]", placement="S[1]")
        weight2 = weights[1]
        lv4 = R.matmul(lv3, weight2)
        return lv4


def test_tuples_and_a_function_with_two_results():
    """A layout goes from the annotated half through the TIR function, into a field of the tuple of weights."""
    run = mt.distribute_module(Tuples, function="foo")
    found = layouts(run)
    assert [found[name] for name in ("x", "weights_0", "weights_1", "lv0", "lv1")] == [
        "R",
        "S[1]",
        "S[0]",
        "S[1]",
        "S[1]",
    ]
    assert kinds(run.plan) == ["all_reduce"]
    x, a, b = torch.randn(8, 12), torch.randn(12, 16), torch.randn(16, 12)
    expected = mt.run_sequential(Tuples, [x, (a, b)], "foo")
    torch.testing.assert_close(run(x, (a, b)), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(run(x, a, b), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(expected, torch.nn.functional.gelu(x @ a)[:4] @ b, rtol=1e-4, atol=1e-4)


@I.ir_module
class Dynamic:
    I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2)), R.device_mesh((1,), I.Range(4, 5))]})

    @R.function
    def foo(
        x: R.Tensor(("m", "k0"), "float32"),
        weight1: R.Tensor(("k0", "k1"), "float32"),
        weight2: R.Tensor(("k1", "n"), "float32"),
    ):
        lv0 = R.matmul(x, weight1)
        lv1 = R.nn.gelu(lv0)
        lv2 = R.dist.annotate_sharding(lv1, device_mesh="mesh[0]", placement="S[1]")
        lv3 = R.matmul(lv2, weight2)
        return lv3


def test_symbolic_sizes():
    """TVM's layouts at every size, where TVM's pass asks for even ones."""
    run = mt.distribute_module(Dynamic, function="foo")
    for m, k0, k1, n in ((8, 12, 16, 4), (3, 5, 7, 1)):
        check(run, Dynamic, torch.randn(m, k0), torch.randn(k0, k1), torch.randn(k1, n))
        found = layouts(run)
        assert [found[name] for name in ("x", "weight1", "weight2")] == ["R", "S[1]", "S[0]"]
        assert kinds(run.plan) == ["all_reduce"]


@I.ir_module
class Redistribute:
    I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2))]})

    @R.function
    def foo(
        x1: R.DTensor((8, 12), "float32", "mesh[0]", "R"),
        x2: R.DTensor((8, 12), "float32", "mesh[0]", "S[0]"),
        x3: R.DTensor((8, 12), "float32", "mesh[0]", "S[0]"),
        x4: R.DTensor((8, 12), "float32", "mesh[0]", "S[0]"),
    ):
        lv0 = R.dist.redistribute(x1, "mesh[0]", "S[1]")
        lv1 = R.dist.redistribute(x2, "mesh[0]", "S[0]")
        lv2 = R.dist.redistribute(x3, "mesh[0]", "R")
        lv3 = R.dist.redistribute(x4, "mesh[0]", "S[1]")
        return (lv0, lv1, lv2, lv3)


@I.ir_module
class ShapeOf:
    @R.function
    def main(x: R.Tensor(("n", 8), "float32")):
        shape = R.shape_of(x)
        return R.add(x, R.ones(shape, "float32")), R.shape_to_tensor(shape)


def test_shapes_as_values():
    x = torch.randn(5, 8)
    for found in (mt.distribute_module(ShapeOf, {"x": 2}, {"x": {"x": 0}})(x), mt.run_sequential(ShapeOf, [x])):
        assert found[0].equal(x + 1)
        assert found[1].tolist() == [5, 8]


def test_redistribute():
    """The first two are TVM's: a slice, and nothing. TVM refuses the others."""
    run = mt.distribute_module(Redistribute, function="foo")
    assert kinds(run.plan) == ["slice", "all_gather", "all_to_all"]
    found = layouts(run)
    assert [found[f"lv{n}"] for n in range(4)] == ["S[1]", "S[0]", "R", "S[1]"]
    check(run, Redistribute, *(torch.randn(8, 12) for _ in range(4)))


@I.ir_module
class Decoder:
    """A LLaMA decoder's attention: the norm is a TIR function; of the weights, only those of q, k and v are
    annotated, after they were transposed."""

    I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2)), R.device_mesh((1,), I.Range(4, 5))]})

    @T.prim_func
    def rms_norm(
        A: T.Buffer((1, 6, 16), "float32"), B: T.Buffer((16,), "float32"), out: T.Buffer((1, 6, 16), "float32")
    ):
        total = T.sblock_alloc_buffer((1, 6))
        for b, i, k in T.grid(1, 6, 16):
            with T.sblock("total"):
                vb, vi, vk = T.axis.remap("SSR", [b, i, k])
                with T.init():
                    total[vb, vi] = T.float32(0)
                total[vb, vi] = total[vb, vi] + A[vb, vi, vk] * A[vb, vi, vk]
        for b, i, k in T.grid(1, 6, 16):
            with T.sblock("norm"):
                vb, vi, vk = T.axis.remap("SSS", [b, i, k])
                out[vb, vi, vk] = B[vk] * (A[vb, vi, vk] / T.sqrt(total[vb, vi] * T.float32(0.0625) + T.float32(1e-6)))

    @T.prim_func
    def rotary(
        A: T.Buffer((1, 6, 4, 4), "float32"),
        B: T.Buffer((10, 4), "float32"),
        C: T.Buffer((10, 4), "float32"),
        out: T.Buffer((1, 6, 4, 4), "float32"),
    ):
        for i0, i1, i2, i3 in T.grid(1, 6, 4, 4):
            with T.sblock("rotary"):
                v0, v1, v2, v3 = T.axis.remap("SSSS", [i0, i1, i2, i3])
                out[v0, v1, v2, v3] = B[v1, v3] * A[v0, v1, v2, v3] + C[v1, v3] * T.Select(
                    v3 >= 2, A[v0, v1, v2, v3 - 2], A[v0, v1, v2, v3 + 2] * T.float32(-1)
                )

    @R.function
    def foo(
        tokens: R.Tensor((1, 6, 16), "float32"),
        mask: R.Tensor((1, 1, 6, 6), "float32"),
        div_const: R.Tensor((1, 4, 6, 6), "float32"),
        maximum_const: R.Tensor((1, 4, 6, 6), "float32"),
        wq: R.Tensor((16, 16), "float32"),
        wk: R.Tensor((16, 16), "float32"),
        wv: R.Tensor((16, 16), "float32"),
        wo: R.Tensor((16, 16), "float32"),
        norm_weight: R.Tensor((16,), "float32"),
        cos: R.Tensor((10, 4), "float32"),
        sin: R.Tensor((10, 4), "float32"),
    ):
        cls = Decoder
        normed = R.call_tir(cls.rms_norm, (tokens, norm_weight), out_sinfo=R.Tensor((1, 6, 16), "float32"))
        q_t = R.dist.annotate_sharding(R.permute_dims(wq), "mesh[0]", "S[1]")
        q = R.reshape(R.matmul(normed, q_t), R.shape([1, 6, 4, 4]))
        k_t = R.dist.annotate_sharding(R.permute_dims(wk), "mesh[0]", "S[1]")
        k = R.reshape(R.matmul(normed, k_t), R.shape([1, 6, 4, 4]))
        v_t = R.dist.annotate_sharding(R.permute_dims(wv), "mesh[0]", "S[1]")
        v = R.reshape(R.matmul(normed, v_t), R.shape([1, 6, 4, 4]))
        q_r = R.call_tir(cls.rotary, (q, cos, sin), out_sinfo=R.Tensor((1, 6, 4, 4), "float32"))
        k_r = R.call_tir(cls.rotary, (k, cos, sin), out_sinfo=R.Tensor((1, 6, 4, 4), "float32"))
        k_flat = R.reshape(k_r, R.shape([6, 4, 4]))
        v_flat = R.reshape(v, R.shape([6, 4, 4]))
        k_back = R.reshape(k_flat, R.shape([1, 6, 4, 4]))
        v_back = R.reshape(v_flat, R.shape([1, 6, 4, 4]))
        q_h = R.permute_dims(q_r, axes=[0, 2, 1, 3])
        k_h = R.permute_dims(k_back, axes=[0, 2, 1, 3])
        v_h = R.permute_dims(v_back, axes=[0, 2, 1, 3])
        scores = R.divide(R.matmul(q_h, R.permute_dims(k_h, axes=[0, 1, 3, 2])), div_const)
        masked = R.minimum(R.maximum(scores, maximum_const), mask)
        weights = R.nn.softmax(masked, axis=-1)
        heads = R.permute_dims(R.matmul(weights, v_h), axes=[0, 2, 1, 3])
        merged = R.reshape(heads, R.shape([1, 6, 16]))
        o_t = R.permute_dims(wo)
        out = R.matmul(merged, o_t)
        result = R.add(tokens, out)
        return result


def decoder_inputs():
    shapes = [[int(n) for n in var.struct_info.shape] for var in Decoder["foo"].params]
    inputs = [torch.randn(shape) for shape in shapes]
    inputs[1], inputs[2], inputs[3] = inputs[1].abs() * 4, inputs[2].abs() + 1, inputs[3] - 9
    return inputs


def test_decoder():
    """TVM's layouts: q, k and v by heads, what is between them by heads, wo by what it sums over; one all-reduce."""
    run = mt.distribute_module(Decoder, function="foo")
    found = layouts(run)
    assert [found[name] for name in ("wq", "wk", "wv", "wo")] == ["S[0]", "S[0]", "S[0]", "S[1]"]
    assert {found[name] for name in ("tokens", "mask", "norm_weight", "cos", "sin", "normed", "result")} == {"R"}
    assert {found[name] for name in ("div_const", "maximum_const", "scores", "masked", "weights", "q_h")} == {"S[1]"}
    assert {found[name] for name in ("q", "q_r", "k_r", "v", "heads")} == {"S[2]"}
    assert kinds(run.plan) == ["all_reduce"]
    check(run, Decoder, *decoder_inputs())


@pytest.mark.parametrize("parts", [2, 3, 4, 5])
def test_decoder_on_more_devices(parts):
    """TVM asks for a size that divides; heads that do not are whole on the devices that have them."""
    mod = Decoder
    run = mt.distribute_module(
        mt.annotate_module(without_annotations(mod), {"x": parts}, {"q_t": {"x": 1}, "v_t": {"x": 1}}, "foo"),
        function="foo",
    )
    check(run, mod, *decoder_inputs())
    if parts in (2, 4):
        assert kinds(run.plan) == ["all_reduce"]


def without_annotations(mod):
    """The module as it was before it was annotated: an annotation gives what it takes."""
    from tvm.relax.expr_functor import PyExprMutator, mutator

    @mutator
    class Remove(PyExprMutator):
        def visit_call_(self, call):
            call = self.visit_expr_post_order(call)
            return call.args[0] if getattr(call.op, "name", "") == "relax.dist.annotate_sharding" else call

    mod = mod.clone()
    mod["foo"] = Remove(mod).visit_expr(mod["foo"])
    return mod


@I.ir_module
class Pipeline:
    I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2)), R.device_mesh((2,), I.Range(4, 6))]})

    @R.function
    def foo(x: R.Tensor((8, 8), "float32"), w: R.Tensor((8, 8), "float32")):
        lv0 = R.dist.annotate_sharding(R.matmul(x, w), device_mesh="mesh[0]", placement="S[1]")
        lv1 = R.dist.annotate_sharding(R.nn.gelu(lv0), device_mesh="mesh[1]", placement="R")
        return lv1


def test_pipelines_are_refused():
    with pytest.raises(mt.MeshTensorError) as error:
        mt.distribute_module(Pipeline, function="foo")
    assert "mt.pipeline runs a module on several meshes" in str(error.value)
    assert "foo.lv0" in str(error.value)
    assert "foo.lv1" in str(error.value)
