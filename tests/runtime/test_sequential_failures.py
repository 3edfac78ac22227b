"""What run_sequential refuses, and how it says so."""
# ruff: noqa: RET504, F841 (messages name bindings, so TVMScript keeps them)

import re

import pytest
import torch
from tvm import relax, runtime
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R

import mesh_tensor as mt


@I.ir_module
class Sum:
    @R.function
    def main(x: R.Tensor(("n", 4), "float32"), y: R.Tensor(("n", 4), "float32")):
        z = R.add(x, y)
        return z


def _module(build, *infos):
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{k}", info) for k, info in enumerate(infos)]
    with builder.function("main", params):
        builder.emit_func_output(builder.emit(build(*params), "found"))
    return builder.get()


def _refused(mod, inputs, *contents, function="main"):
    with pytest.raises(mt.MeshTensorError) as caught:
        mt.run_sequential(mod, inputs, function)
    for content in contents:
        assert re.search(content, str(caught.value)), f"{content!r} is not in: {caught.value}"


def test_function():
    _refused(Sum, [], "no Relax function 'foo'", "'main'", function="foo")


def test_too_few():
    _refused(Sum, [torch.ones(2, 4)], "1 tensors for 2 parameters", "'x', 'y'")


def test_names():
    _refused(Sum, {"x": torch.ones(2, 4), "w": torch.ones(2, 4)}, "no parameter 'w'", "'y'")


def test_shapes_and_dtypes_are_all_named():
    _refused(
        Sum, [torch.ones(2, 5), torch.ones(2, 4, dtype=torch.int32)], "2 problems", "'x'.*5", "'y'.*int32.*float32"
    )


def test_sizes_that_disagree():
    _refused(Sum, [torch.ones(2, 4), torch.ones(3, 4)], "'y'", "3, 4")


def test_no_tensor():
    _refused(Sum, [torch.ones(2, 4), "text"], "'y'", "str")


def test_operator_without_function():
    turn = relax.TensorStructInfo((1, 2, 3), "float32")
    mod = _module(lambda x: relax.op.image.affine_grid(x, (8, 8)), turn)
    _refused(mod, [torch.ones(1, 2, 3)], "R.image.affine_grid has no torch function", "main.found", "call_tir")


def test_dropout():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorStructInfo((4,), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.nn.dropout(x), "dropped"))
    _refused(builder.get(), [torch.ones(4)], "R.nn.dropout", "random", "main.dropped", "eval")


def test_index_out_of_range():
    infos = relax.TensorStructInfo((5, 4), "float32"), relax.TensorStructInfo((2,), "int64")
    mod = _module(lambda x, n: relax.op.take(x, n, 0), *infos)
    _refused(mod, [torch.ones(5, 4), torch.tensor([1, 5])], "R.take: indices from 1 to 5 into a dim of 5", "main.found")


def test_packed_functions():
    info = relax.TensorStructInfo((4,), "float32")
    mod = _module(lambda x: relax.op.call_dps_packed("mine", (x,), info), info)
    _refused(mod, [torch.ones(4)], "R.call_dps_packed", "packed", "main.found")
    pure = _module(lambda x: relax.op.call_pure_packed("mine", x, sinfo_args=info), info)
    _refused(pure, [torch.ones(4)], "R.mine has no torch function", "main.found")


@I.ir_module
class Casting:
    @R.function
    def main(x: R.Tensor(("n",), "float32")) -> R.Tensor((3,), "float32"):
        three = R.match_cast(x, R.Tensor((3,), "float32"))
        return three


def test_match_cast():
    assert torch.equal(mt.run_sequential(Casting, [torch.ones(3)]), torch.ones(3))
    _refused(Casting, [torch.ones(4)], r"R.match_cast to .*3", r"\(4,\)", "main.three")


@I.ir_module
class Local:
    @R.function
    def main(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        @R.function
        def inner(y: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            z = R.add(y, y)
            return z

        found = inner(x)
        return found


def test_closures():
    _refused(Local, [torch.ones(4)], "Function can't be run", "main.inner", "closures")


@I.ir_module(check_well_formed=False)
class Asserting:
    @R.function(pure=False)
    def main(x: R.Tensor((), "bool")) -> R.Tensor((), "bool"):
        _ = R.print(x, format="x is {}")
        checked = R.assert_op(x, format="x must hold")
        return x


def test_assertions():
    assert mt.run_sequential(Asserting, [torch.tensor(True)])
    _refused(Asserting, [torch.tensor(False)], "assert_op failed", "x must hold", "main.checked")


def test_a_constant_that_torch_has_no_dtype_for():
    constant = relax.Constant(runtime.empty((2, 4), "float6_e2m3fn"))
    mod = _module(lambda x: relax.op.reshape(constant, (4, 2)), relax.TensorStructInfo((2, 4), "float32"))
    _refused(mod, [torch.ones(2, 4)], "torch has no tensors of a constant's dtype", "Unsupported code 15")
