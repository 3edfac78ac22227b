"""TIR functions as TVM prints them after simplifying: dims of size 1 are indexed by the constant 0."""

import pytest
import torch
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R
from tvm.script.parser import tirx as T

import mesh_tensor as mt
from mesh_tensor.program.steps import CollectiveStep


@I.ir_module
class UnitBatch:
    @T.prim_func(private=True)
    def mm(A: T.Buffer((1, 8, 16), "float32"), W: T.Buffer((24, 16), "float32"), C: T.Buffer((1, 8, 24), "float32")):
        for i0, i1, i2, k in T.grid(1, 8, 24, 16):
            with T.sblock("NT_matmul"):
                v0, v1, v2, vk = T.axis.remap("SSSR", [i0, i1, i2, k])
                with T.init():
                    C[v0, v1, v2] = T.float32(0)
                C[v0, v1, v2] = C[v0, v1, v2] + A[v0, v1, vk] * W[v2, vk]

    @T.prim_func(private=True)
    def mm0(A: T.Buffer((1, 8, 16), "float32"), W: T.Buffer((24, 16), "float32"), C: T.Buffer((1, 8, 24), "float32")):
        for i1, i2, k in T.grid(8, 24, 16):
            with T.sblock("NT_matmul"):
                v1, v2, vk = T.axis.remap("SSR", [i1, i2, k])
                with T.init():
                    C[0, v1, v2] = T.float32(0)
                C[0, v1, v2] = C[0, v1, v2] + A[0, v1, vk] * W[v2, vk]

    @T.prim_func(private=True)
    def resh(A: T.Buffer((1, 8, 24), "float32"), C: T.Buffer((1, 8, 6, 4), "float32")):
        for a0, a1, a2, a3 in T.grid(1, 8, 6, 4):
            with T.sblock("T_reshape"):
                v0, v1, v2, v3 = T.axis.remap("SSSS", [a0, a1, a2, a3])
                C[v0, v1, v2, v3] = A[0, ((v2 * 4 + v3) // 24 + v1) % 8, (v2 * 4 + v3) % 24]

    @T.prim_func(private=True)
    def rot(A: T.Buffer((1, 8, 6, 4), "float32"), B: T.Buffer((8, 4), "float32"), C: T.Buffer((1, 8, 6, 4), "float32")):
        for a0, a1, a2, a3 in T.grid(1, 8, 6, 4):
            with T.sblock("rot"):
                v0, v1, v2, v3 = T.axis.remap("SSSS", [a0, a1, a2, a3])
                C[v0, v1, v2, v3] = B[v1 + 8 - 8, v3] * A[v0, v1, v2, v3] + B[v1 + 8 - 8, v3] * T.Select(
                    v3 >= 2, A[v0, v1, v2, v3 - 2], A[v0, v1, v2, v3 + 2] * T.float32(-1)
                )

    @T.prim_func(private=True)
    def tr(A: T.Buffer((1, 8, 6, 4), "float32"), C: T.Buffer((8, 6, 4), "float32")):
        for a0, a1, a2 in T.grid(8, 6, 4):
            with T.sblock("T_squeeze"):
                v0, v1, v2 = T.axis.remap("SSS", [a0, a1, a2])
                C[v0, v1, v2] = A[0, v0, v1, v2]

    @T.prim_func(private=True)
    def sc(A: T.Buffer((1, 8, 24), "float32"), C: T.Buffer((1, 8, 24), "float32")):
        for a0, a1, a2 in T.grid(1, 8, 24):
            with T.sblock("T_squeeze"):
                v0, v1, v2 = T.axis.remap("SSS", [a0, a1, a2])
                C[v0, v1, v2] = A[0, v1, v2] * T.float32(2)

    @R.function
    def main(x: R.Tensor((1, 8, 16), "float32"), w: R.Tensor((24, 16), "float32"), B: R.Tensor((8, 4), "float32")):
        cls = UnitBatch
        with R.dataflow():
            a = R.call_tir(cls.mm, (x, w), out_sinfo=R.Tensor((1, 8, 24), "float32"))
            b = R.call_tir(cls.resh, (a,), out_sinfo=R.Tensor((1, 8, 6, 4), "float32"))
            c = R.call_tir(cls.rot, (b, B), out_sinfo=R.Tensor((1, 8, 6, 4), "float32"))
            d = R.call_tir(cls.tr, (c,), out_sinfo=R.Tensor((8, 6, 4), "float32"))
            e = R.call_tir(cls.mm0, (x, w), out_sinfo=R.Tensor((1, 8, 24), "float32"))
            f = R.call_tir(cls.sc, (e,), out_sinfo=R.Tensor((1, 8, 24), "float32"))
            R.output(d, f)
        return (d, f)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(
    ("stated", "moved"),
    [({"w": {"x": 0}}, []), ({"x": {"x": 1}}, []), ({"w": {"x": 1}}, ["all_reduce", "all_reduce"])],
)
def test_they_are_no_reason_to_gather(stated, moved, parts):
    run = mt.distribute_module(UnitBatch, {"x": parts}, stated, target="interpret", poison=True)
    steps = [step for step in run.program.steps if isinstance(step, CollectiveStep)]
    assert [step.kind for step in steps if step.bytes] == moved
    inputs = [torch.randn(1, 8, 16), torch.randn(24, 16), torch.randn(8, 4)]
    for found, expected in zip(run(*inputs), mt.run_sequential(UnitBatch, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
