"""Bad modules, layouts and inputs: refused with what, where, why and the way out; never with an error of TVM's."""

from functools import partial

import pytest
import torch
import tvm
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R
from tvm.script.parser import tirx as T

import mesh_tensor as mt
from tests.plan.seed_modules import NESTED
from tests.refusals import refusal
from tests.runtime.ranks import module_bodies
from tests.runtime.ranks.launcher import run as launch

refused = partial(refusal, mt.distribute_module)


def parsed(params, *lines, decorator="@R.function"):
    """A module whose main has these lines."""
    body = "\n".join(f"        {line}" for line in lines)
    return tvm.script.from_source(f"@I.ir_module\nclass Module:\n    {decorator}\n    def main({params}):\n{body}\n")


def matrices(count=5):
    return [torch.randn(128, 128) for _ in range(count)]


@pytest.mark.parametrize(
    ("sharding", "words"),
    [
        ({"A": {"y": 0}}, "value 'A': unknown mesh axis 'y' (the mesh has 'x')"),
        ({"A": {"x": 2}}, "value 'A': axis 'x' splits dim 2, but there are 2 dims"),
        ({"A": mt.Sharding.parse(mt.Mesh({"x": 2}), 3, "S[2]")}, "value 'A': the sharding 'S[2]' is for 3 dims"),
        ({"A": "S[0], R"}, "value 'A': can't read the sharding 'S[0], R'"),
        ({"W": {"x": 0}}, "there is no value 'W' in 'main', which has 'x', 'A', 'B', 'C', 'D', 'lv0', 'lv1'"),
        ({"mlp.W": {"x": 0}}, "there is no value 'W' in 'mlp', which has 'x', 'A', 'B', 'lv0', 'Y', 'Z'"),
    ],
)
def test_layouts(sharding, words):
    text = refused(NESTED, {"x": 2}, sharding)
    assert words in text
    assert "where: module function 'main' on Mesh({\"x\": 2})" in text
    assert "fix: give {name of a parameter or value: {axis: dim}" in text


def test_meshes():
    assert "shardings without a mesh\n  fix: pass the mesh" in refused(NESTED, None, {"A": {"x": 0}})
    assert "the module has 2 meshes, and no value is annotated" in refused(NESTED)
    assert "a mesh is a dict from axis names to sizes, not 5" in refused(NESTED, 5)
    assert "axis 'x' has size 0, but a size is at least 1" in refused(NESTED, {"x": 0})
    annotated = mt.annotate_module(NESTED, {"x": 2}, {"A": {"x": 1}})
    text = refused(annotated, {"x": 4})
    assert 'the module is annotated for Mesh({"x": 2}), not for Mesh({"x": 4})' in text
    assert "where: main.A_sharded" in text


def test_unknown_mesh_in_the_module():
    """The text names a mesh by its place; a module made by hand may have another one."""
    two = tvm.relax.distributed.DeviceMesh((2,), tvm.ir.Range(0, 2))
    other = tvm.relax.distributed.DeviceMesh((3,), tvm.ir.Range(0, 3))
    x = tvm.relax.Var("x", tvm.relax.TensorStructInfo((6,), "float32"))
    builder = tvm.relax.BlockBuilder()
    with builder.function("main", [x]):
        placement = tvm.relax.distributed.Placement.from_text("S[0]")
        a = builder.emit(tvm.relax.op.distributed.annotate_sharding(x, two, placement), "a")
        b = builder.emit(tvm.relax.op.distributed.annotate_sharding(a, other, placement), "b")
        builder.emit_func_output(b)
    text = refused(builder.get())
    assert 'main.a is annotated for Mesh({"axis0": 2})' in text
    assert 'main.b is annotated for Mesh({"axis0": 3})' in text
    assert "mt.pipeline runs a module on several meshes" in text


def test_what_is_no_module():
    assert "distribute_module takes an IRModule, not Function" in refused(NESTED["main"], {"x": 2})
    assert "distribute_module takes an IRModule, not str" in refused("main", {"x": 2}, {"A": {"x": 0}})


@pytest.mark.parametrize("sharding", [None, {"A": {"x": 0}}])
def test_function_that_is_not_there(sharding):
    text = refused(NESTED, {"x": 2}, sharding, function="foo")
    assert "the module has no Relax function 'foo'" in text
    assert "'main'" in text
    assert "'mlp'" in text


def test_contradictions_in_strict_mode():
    layouts = {"A": {"x": 0}, "x": {"x": 0}}
    text = refused(NESTED, {"x": 2}, layouts, strict=True)
    assert "mlp.lv0 (matmul): axis x splits m, not k" in text
    assert "where: module function 'main', strict" in text
    assert "why: the annotations ask for different layouts there" in text
    run = mt.distribute_module(NESTED, {"x": 2}, layouts)
    assert "axis x splits m, not k" in run.explain()
    tensors = matrices()
    torch.testing.assert_close(run(*tensors), mt.run_sequential(NESTED, tensors), rtol=1e-4, atol=1)


def test_weights():
    weights = {"A": torch.randn(3, 128), "Z": torch.randn(1), "B": torch.randn(128, 128).double(), "C": 5}
    text = refused(NESTED, {"x": 2}, weights=weights)
    assert "4 problems" in text
    assert "there is no parameter 'Z', but 'x', 'A', 'B', 'C', 'D'" in text
    assert "parameter 'A': (3, 128), but expected (128, 128) float32" in text
    assert "parameter 'B': (128, 128) float64, but expected (128, 128) float32" in text
    assert "parameter 'C': a int, but expected a tensor" in text


def test_what_people_have_in_hand():
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    program = torch.export.export(model, (x,))
    for given, fix in (
        (model, "mt.from_torch(torch.export.export(model, inputs))"),
        (program, "mt.from_torch(program)"),
        (mt.from_torch(program), "pass its `mod`, and its `params` as weights"),
        (7, "make one with @I.ir_module"),
    ):
        kind = type(given).__name__
        if not isinstance(given, mt.ImportedModule):  # which distribute_module takes
            assert f"distribute_module takes an IRModule, not {kind}\n  fix: " in refused(given, {"x": 2})
            assert fix in refused(given, {"x": 2})
        with pytest.raises(mt.MeshTensorError, match=f"run_sequential takes an IRModule, not {kind}") as error:
            mt.run_sequential(given, [x])
        assert fix in str(error.value)
        with pytest.raises(mt.MeshTensorError, match=f"annotate_module takes an IRModule, not {kind}"):
            mt.annotate_module(given, {"x": 2}, {})


def test_kernels_that_are_none():
    assert "the kernels are {'nn.relu': 3}" in refused(NESTED, {"x": 2}, kernels={"nn.relu": 3})
    assert "the kernels are [1]" in refused(NESTED, {"x": 2}, kernels=[1])


def test_tensors_without_memory_of_their_own():
    x, *rest = matrices()
    run = mt.distribute_module(NESTED, {"x": 2})
    text = refusal(run, x.to_sparse(), *rest)
    assert "parameter 'x': layout torch.sparse_coo, but expected torch.strided\n" in text
    assert text.endswith("fix: pass a dense copy: .to_dense()")
    text = refusal(run, x.to_sparse(), rest[0][:1], *rest[1:])
    assert text.endswith("fix: pass a dense copy: .to_dense(); pass tensors of the module's shapes and dtypes")


def test_mesh_tensors_of_another_mesh():
    x, *rest = matrices()
    run = mt.distribute_module(NESTED, {"x": 2})
    text = refusal(run, mt.distribute(x, {"x": 4}, {"x": 0}), *rest)
    assert '\'x\' is a MeshTensor on Mesh({"x": 4}), but the module runs on Mesh({"x": 2})' in text


def test_weights_under_two_names():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    module = mt.from_torch(torch.export.export(model, (torch.randn(2, 4),)))
    weight = torch.randn(4, 4)
    twice = {"0.weight": weight, "p_0_weight": weight + 1}
    text = refused(module.mod, {"x": 2}, weights=twice)
    assert "a weight is given under two names, '0.weight', 'p_0_weight', with two values\n  where: weights of" in text
    assert "the weights are a list" in refused(module.mod, {"x": 2}, weights=[weight])


def test_a_weight_is_given_once():
    x, a, *rest = matrices()
    run = mt.distribute_module(NESTED, {"x": 2}, weights={"A": a})
    text = refusal(run, x, *rest, A=a)
    assert "parameter 'A' is a weight, which was given already" in text
    assert "which takes 'x', 'B', 'C', 'D'" in text


def test_inputs():
    run = mt.distribute_module(NESTED, {"x": 2}, {"A": {"x": 1}})
    tensors = matrices()
    *most, last = tensors
    assert "1 tensors for 5 parameters" in refusal(run, last)
    assert "6 tensors for 5 parameters" in refusal(run, *tensors, last)
    assert "5 tensors for 4 parameters" in refusal(run, *tensors, D=last)
    assert "there is no parameter 'Q'" in refusal(run, *most, Q=last)
    assert "parameter 'D': (3, 3), but expected (128, 128) float32" in refusal(run, *most, torch.randn(3, 3))
    assert "parameter 'D': (3,) float32, but expected (128, 128) float32" in refusal(run, *most, torch.randn(3))
    assert "(128, 128) int32, but expected (128, 128) float32" in refusal(run, *most, last.int())
    assert "parameter 'D': a ndarray, but expected a tensor" in refusal(run, *most, last.numpy())
    assert "parameter 'D': a NoneType, but expected a tensor" in refusal(run, *most, None)
    assert "on device meta, but the module runs on" in refusal(run, *most, last.to("meta"))
    other = mt.distribute(last, mt.Mesh({"y": 2}), {"y": 0})
    text = refusal(run, *most, other)
    assert 'Mesh({"x": 2})' in text
    assert 'Mesh({"y": 2})' in text


@pytest.mark.parametrize(
    ("params", "lines", "words"),
    [
        ("t: R.Object", ["return t"], ["parameter 't' of 'main' is R.Object", "tensors of known rank"]),
        ('t: R.Tensor(dtype="float32", ndim=2)', ["return t"], ["parameter 't' of 'main'", "tensors of known rank"]),
        (
            't: R.Tensor((4, 4), "float32")',
            ["u = R.unique(t)", "return u"],
            ["R.unique is depends on the data", "R.sort"],
        ),
        ('t: R.Tensor((4, 4), "float32")', ["return R.prim_value(3)"], ["PrimValue can't be distributed"]),
        (
            't: R.Tensor((4, 4), "float32")',
            ['y = R.call_pure_packed("foo", t, sinfo_args=R.Tensor((4, 4), "float32"))', "return y"],
            ["operator R.call_pure_packed has no sharding rule", "where: main.y = ", "replicate_unknown=True"],
        ),
        (
            't: R.Tensor((4, 4), "float32")',
            ['y = R.call_dps_packed("foo", t, out_sinfo=R.Tensor((4, 4), "float32"))', "return y"],
            ["operator R.call_dps_packed has no sharding rule", "where: main.y = "],
        ),
    ],
)
def test_what_modules_hold(params, lines, words):
    text = refused(parsed(params, *lines), {"x": 2})
    for word in words:
        assert word in text


def test_effects():
    mod = parsed(
        't: R.Tensor((4, 4), "float32")',
        'y = R.call_packed("foo", t, sinfo_args=R.Tensor((4, 4), "float32"))',
        "return y",
        decorator="@R.function(pure=False)",
    )
    text = refused(mod, {"x": 2})
    assert 'a call of R.ExternFunc("foo") can\'t be distributed' in text
    assert "where: main.y" in text


def test_recursion():
    @I.ir_module
    class Recursive:
        @R.function(private=True)
        def f(x: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
            cls = Recursive
            z = cls.f(R.nn.relu(x))
            return z

        @R.function
        def main(x: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
            cls = Recursive
            z = cls.f(x)
            return z

    text = refused(Recursive, {"x": 2})
    assert "function 'f' calls itself" in text
    assert "why: its calls can't be laid out ahead" in text


@I.ir_module
class Symbolic:
    @R.function
    def main(x: R.Tensor(("n", 4), "float32"), y: R.Tensor(("2 * n", 4), "float32")):
        n = T.int64()
        z = R.concat((x, y), axis=0)
        return z


def test_sizes_that_divide_by_zero():
    mod = parsed(
        'x: R.Tensor(("n",), "float32"), y: R.Tensor(("8 // (n - 1)",), "float32")', "z = R.nn.relu(y)", "return z"
    )
    run = mt.distribute_module(mod, {"x": 2})
    y = torch.randn(4)
    assert torch.equal(run(torch.ones(3), y), y.relu())
    text = refusal(run, torch.ones(1), y)
    assert "the size T.int64(8) // (n - T.int64(1)) divides by 0 where n = 1" in text
    assert "fix: pass tensors of other sizes" in text


def test_symbolic_sizes():
    run = mt.distribute_module(Symbolic, {"x": 2}, {"x": {"x": 0}})
    for look in (run.explain, lambda: run.plan, lambda: run.program, lambda: run.local_module):
        text = refusal(look)
        assert "module function 'main' has no plan yet: it has symbolic sizes" in text
        assert "fix: call it first" in text
    x, y = torch.randn(3, 4), torch.randn(6, 4)
    assert torch.equal(run(x, y), torch.cat((x, y)))
    text = refusal(run, x, torch.randn(5, 4))
    assert "parameter 'y': (5, 4), but expected" in text
    assert "n = 3" in text
    text = refusal(run, x, torch.randn(6, 5))
    assert "parameter 'y': (6, 5), but expected" in text


def test_mesh_larger_than_the_world():
    for of_the_mesh, of_dtensors in launch(module_bodies.mesh_larger_than_the_world, 2):
        assert 'the module is annotated for Mesh({"x": 4}), not for Mesh({"x": 2})' in of_the_mesh
        assert "the DeviceMesh has sizes (2,)" in of_dtensors
        assert 'where: Mesh({"x": 4})' in of_dtensors


def test_mesh_tensors_for_ranks():
    for text in launch(module_bodies.mesh_tensors, 2):
        assert "parameter 'x': a MeshTensor, which lies on a virtual mesh, but the module runs on ranks" in text
        assert "pass a DTensor, or a global tensor: tensor.full()" in text
