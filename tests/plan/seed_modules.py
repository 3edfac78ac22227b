"""The modules of TVM's DistIR documents, as written there."""

from __future__ import annotations

from tvm import ir
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R


@I.ir_module
class Mlp:
    """One function; the result of gelu is annotated. The second mesh is not used."""

    I.module_attrs({"device_num": 10})
    I.module_global_infos(
        {
            "mesh": [
                R.device_mesh((2,), I.Range(0, 2)),  # mesh[0]
                R.device_mesh((1,), I.Range(4, 5)),  # mesh[1]
            ]
        }
    )

    @R.function
    def foo(
        x: R.Tensor((128, 128), "float32"),
        weight1: R.Tensor((128, 128), "float32"),
        weight2: R.Tensor((128, 128), "float32"),
    ) -> R.Tensor((128, 128), "float32"):
        lv0 = R.matmul(x, weight1)
        lv1 = R.nn.gelu(lv0)
        lv2 = R.dist.annotate_sharding(lv1, device_mesh="mesh[0]", placement="S[1]")
        lv3 = R.matmul(lv2, weight2)
        return lv3


@I.ir_module
class Nested:
    """main calls a private function twice; nothing is annotated."""

    I.module_attrs({"device_num": 2})
    I.module_global_infos({"mesh": [R.device_mesh((1,), I.Range(0, 1)), R.device_mesh((1,), I.Range(1, 2))]})

    @R.function(private=True)
    def mlp(
        x: R.Tensor((128, 128), "float32"),
        A: R.Tensor((128, 128), "float32"),
        B: R.Tensor((128, 128), "float32"),
    ) -> R.Tensor((128, 128), "float32"):
        with R.dataflow():
            lv0 = R.matmul(x, A)
            Y = R.nn.relu(lv0)
            Z = R.matmul(Y, B)
            R.output(Z)
        return Z

    @R.function
    def main(
        x: R.Tensor((128, 128), "float32"),
        A: R.Tensor((128, 128), "float32"),
        B: R.Tensor((128, 128), "float32"),
        C: R.Tensor((128, 128), "float32"),
        D: R.Tensor((128, 128), "float32"),
    ) -> R.Tensor((128, 128), "float32"):
        R.func_attr({"num_input": 1})
        cls = Nested
        with R.dataflow():
            lv0 = cls.mlp(x, A, B)
            lv1 = cls.mlp(lv0, C, D)
            R.output(lv1)
        return lv1


MLP: ir.IRModule = Mlp
NESTED: ir.IRModule = Nested
