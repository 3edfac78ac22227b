"""What can't be annotated is refused, with every offender and the names that there are."""

from functools import partial

import pytest
from tvm import relax
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R

import mesh_tensor as mt
from tests.plan.seed_modules import MLP, NESTED
from tests.refusals import refusal

refused = partial(refusal, mt.annotate_module)


def test_all_offenders_are_named():
    wrong = {"Q": {}, "x": {"z": 0}, "mlp.Y": {"x": 3}, "nope.Y": {}, "A": "S[0], R", "mlp.W": {}, 3: {}}
    text = refused(NESTED, {"x": 2}, wrong, open=["u"], priority={"x": -1, "v": 0})
    assert "10 problems" in text
    assert "`open` has 'u', which is not annotated" in text
    assert "`priority` has 'v', which is not annotated" in text
    assert "the priority of 'x' is -1" in text
    assert "no value 'Q' in 'main', which has 'x', 'A', 'B', 'C', 'D', 'lv0', 'lv1'" in text
    assert "value 'x': unknown mesh axis 'z' (the mesh has 'x')" in text
    assert "value 'mlp.Y': axis 'x' splits dim 3, but there are 2 dims" in text
    assert "no value 'nope.Y' in 'main'" in text
    assert "other functions: 'mlp'" in text
    assert "value 'A': can't read the sharding 'S[0], R'" in text
    assert "no value 'W' in 'mlp', which has 'x', 'A', 'B', 'lv0', 'Y', 'Z'" in text
    assert "3 is no name" in text


def test_dims_and_axes_of_hints():
    wrong = {"open": {"x": [2], "A": ["q"]}, "priority": {"x": {"z": 1}, "A": {"x": -1}, "B": 1.5}}
    text = refused(NESTED, {"x": 2}, {"x": {"x": 0}, "A": {}, "B": {}}, **wrong)
    assert "5 problems" in text
    assert "value 'x': `open` has 2, which is none of its dims" in text
    assert "value 'A': `open` has 'q', which is none of its dims" in text
    assert "the priority of 'x' has 'z', which is no axis of" in text
    assert "the priority of 'A' along 'x' is -1, no int >= 0" in text
    assert "the priority of 'B' is 1.5, which is no int >= 0" in text


def test_many_names_are_cut_to_the_likely_ones():
    builder = relax.BlockBuilder()
    params = [relax.Var(f"weight{i}", relax.TensorStructInfo((2,), "float32")) for i in range(100)]
    with builder.function("main", params):
        builder.emit_func_output(params[0])
    text = refused(builder.get(), {"x": 2}, {"wieght42": {}})
    assert "'weight42'" in text
    assert "95 more" in text


def test_rank_of_a_sharding():
    text = refused(NESTED, {"x": 2}, {"x": mt.Sharding.make({"x": 2}, 3, {"x": 2})})
    assert "value 'x': the sharding 'S[2]' is for 3 dims, but the buffer has 2" in text


def test_function_that_is_not_there():
    text = refused(MLP, {"x": 2}, {"x": {}}, "bar")
    assert "no Relax function 'bar'" in text
    assert "function='foo'" in text


def test_no_dict():
    assert "which is no dict" in refused(NESTED, {"x": 2}, ["x"])


def test_tuples_have_no_layout():
    @I.ir_module
    class Split:
        @R.function
        def main(x: R.Tensor((8, 8), "float32")):
            parts = R.split(x, 2)
            y = parts[0]
            return y

    assert "value 'parts': it is R.Tuple" in refused(Split, {"x": 2}, {"parts": {}})


def test_ambiguous_name():
    @I.ir_module
    class Shadowed:
        @R.function
        def main(x: R.Tensor((8, 8), "float32")):
            lv = R.nn.gelu(x)
            lv = R.nn.relu(lv)
            return lv

    assert "'lv' names 2 values" in refused(Shadowed, {"x": 2}, {"lv": {}})


def test_two_layouts_under_two_names():
    text = refused(NESTED, {"x": 2}, {"x": {"x": 0}, "main.x": {"x": 1}})
    assert "value 'x' of 'main' is given two layouts, one of them under 'main.x'" in text


def test_another_mesh():
    mod = mt.annotate_module(NESTED, {"x": 2, "y": 2}, {"x": {"x": 0}})
    text = refused(mod, {"x": 2}, {"A": {}})
    assert 'annotated for Mesh({"x": 2, "y": 2}) already, not for Mesh({"x": 2})' in text
    assert "main.x_sharded" in text
    with pytest.raises(mt.MeshTensorError, match="that runs on one mesh has annotations for that one") as error:
        mt.annotate_module(MLP, {"x": 3}, {"weight1": {}}, "foo")
    assert "foo.lv2" in str(error.value)


def test_reading_for_another_mesh():
    message = refusal(mt.read_module_annotations, MLP, "foo", {"x": 4})
    assert 'annotated for Mesh({"axis0": 2}), not for Mesh({"x": 4})' in message
    assert "foo.lv2" in message


def test_no_mesh():
    with pytest.raises(mt.MeshTensorError, match="the module has 2 meshes, and no value is annotated"):
        mt.read_module_annotations(NESTED)


def test_several_meshes_at_once():
    @I.ir_module
    class Stages:
        I.module_global_infos({"mesh": [R.device_mesh((1,), I.Range(0, 1)), R.device_mesh((1,), I.Range(1, 2))]})

        @R.function
        def main(x: R.Tensor((8, 8), "float32")):
            a = R.dist.annotate_sharding(x, device_mesh="mesh[0]", placement="R")
            b = R.dist.annotate_sharding(a, device_mesh="mesh[1]", placement="R")
            return b

    with pytest.raises(mt.MeshTensorError, match="that runs on one mesh has annotations for that one") as error:
        mt.read_module_annotations(Stages)
    assert "main.a" in str(error.value)
    assert "main.b" in str(error.value)


def test_annotations_that_do_not_fit():
    @I.ir_module
    class Wrong:
        I.module_global_infos({"mesh": [R.device_mesh((2, 2), I.Range(0, 4))]})

        @R.function
        def main(x: R.Tensor((8, 8), "float32")):
            a = R.dist.annotate_sharding(x, device_mesh="mesh[0]", placement="S[0]")
            b = R.dist.annotate_sharding(x, device_mesh="mesh[0]", placement="R, S[2]")
            return b

    message = refusal(mt.read_module_annotations, Wrong)
    assert 'main.a: the placement "S[0]" has 1 parts, but the mesh 2 axes' in message
    assert "main.b: axis 'axis1' splits dim 2, but there are 2 dims" in message


def test_strict():
    mod = mt.annotate_module(NESTED, {"x": 2}, {"x": {"x": 0}})
    mod = mt.annotate_module(mod, {"x": 2}, {"x_sharded": {"x": 1}})
    with pytest.raises(mt.MeshTensorError, match=r"main\.x is 'S\[0\]' by 'x_sharded', but"):
        mt.read_module_annotations(mod, strict=True)


def test_hint_without_annotation():
    mod = NESTED.clone()
    mod.update_func(mod.get_global_var("main"), mod["main"].with_attr("mesh_tensor_hints", {"lv0": {"open": True}}))
    with pytest.raises(mt.MeshTensorError, match="has 'lv0', which no annotation binds"):
        mt.read_module_annotations(mod, mesh={"x": 2})
