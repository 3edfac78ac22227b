"""Saves a module with apache-tvm, as JSON and as TVMScript; run by the Python of an environment of its own:

python -m venv env && env/bin/pip install apache-tvm==0.25.0.post1 "apache-tvm-ffi<0.1.13"
env/bin/python tests/importers/save_with_apache_tvm.py tests/importers/data/apache_tvm_0_25
"""

import sys
from pathlib import Path

import tvm
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R
from tvm.script.parser import tirx as T


@I.ir_module
class Module:
    I.module_attrs({"device_num": 2})
    I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2))]})

    @T.prim_func(private=True, s_tir=True)
    def double(A: T.Buffer((8, 16), "float32"), B: T.Buffer((8, 16), "float32")):
        for i, j in T.grid(8, 16):
            with T.sblock("double"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj] * T.float32(2)

    @R.function(private=True)
    def hidden(x: R.Tensor((8, 4), "float32"), w: R.Tensor((4, 16), "float32")) -> R.Tensor((8, 16), "float32"):
        product = R.matmul(x, w)
        Y = R.nn.gelu(product)
        return Y

    @R.function
    def main(
        x: R.Tensor((8, 4), "float32"), w1: R.Tensor((4, 16), "float32"), w2: R.Tensor((16, 4), "float32")
    ) -> R.Tensor((8, 4), "float32"):
        cls = Module
        with R.dataflow():
            h = cls.hidden(x, w1)
            h2 = R.call_tir(cls.double, (h,), out_sinfo=R.Tensor((8, 16), "float32"))
            h3 = R.dist.annotate_sharding(h2, device_mesh="mesh[0]", placement="S[1]")
            y = R.matmul(h3, w2)
            z = R.add(y, R.const([1.0, 2.0, 3.0, 4.0], "float32"))
            R.output(z)
        return z


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.with_suffix(".json").write_text(tvm.ir.save_json(Module))
    target.with_suffix(".txt").write_text(Module.script(show_meta=True))
