"""The modules that the project began with: what their documents draw, and the right numbers."""

import pytest
import torch

import mesh_tensor as mt

from .modules import kinds
from .seed_modules import MLP, NESTED


def matrices(count):
    return [torch.randn(128, 128) / 8 for _ in range(count)]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def parameters(run):
    """Name -> layout, as text."""
    return {form.value.name: str(form.sharding) for form in run.plan.explicit.params}


def functions(module):
    """Name -> shapes of the parameters."""
    return {
        var.name_hint: [tuple(map(int, p.struct_info.shape)) for p in func.params]
        for var, func in module.functions_items()
    }


def test_mlp_as_drawn():
    """lv2 is split by columns: so is weight1, weight2 by rows, and the last product is summed once."""
    run = mt.distribute_module(MLP, function="foo")
    assert str(run.mesh) == 'Mesh({"axis0": 2})'
    assert parameters(run) == {"x": "R", "weight1": "S[1]", "weight2": "S[0]"}
    assert kinds(run.plan) == ["all_reduce"]
    assert functions(run.local_module) == {"foo": [(128, 128), (128, 64), (64, 128)]}
    x, a, b = matrices(3)
    found = run(x, a, b)
    close(found, torch.nn.functional.gelu(x @ a) @ b)
    close(found, mt.run_sequential(MLP, [x, a, b], "foo"))


def test_mlp_in_local_view():
    """The operators of the document's local view, in its order."""
    text = mt.distribute_module(MLP, function="foo").local_module.script()
    first, gelu, second, reduce = (text.rindex(op) for op in ("R.matmul(x", "R.nn.gelu", ", weight2", "all_reduce"))
    assert first < gelu < second < reduce
    assert text.count('R.call_pure_packed("mesh.') == 1


def test_mlp_with_names_of_axes_and_weights():
    mesh = mt.Mesh({"model": 2})
    x, a, b = matrices(3)
    run = mt.distribute_module(MLP, mesh, function="foo", weights={"weight1": a, "weight2": b})
    assert run.mesh == mesh
    close(run(x), mt.run_sequential(MLP, [x, a, b], "foo"))


ROWS_AND_COLUMNS = {"A": {"x": 1}, "B": {"x": 0}, "C": {"x": 1}, "D": {"x": 0}}


def test_nested_calls_laid_out_alike_are_one_function():
    run = mt.distribute_module(NESTED, {"x": 2}, ROWS_AND_COLUMNS)
    assert kinds(run.plan) == ["all_reduce", "all_reduce"]
    local = functions(run.local_module)
    assert set(local) == {"main", "mlp"}
    assert sorted(local["mlp"]) == sorted([(128, 128), (128, 64), (64, 128)])
    assert run.local_module.script().count("cls.mlp(") == 2
    tensors = matrices(5)
    close(run(*tensors), mt.run_sequential(NESTED, tensors))


@pytest.mark.parametrize(
    ("shardings", "local", "sent"),
    [
        ({"A": {"x": 1}, "B": {"x": 0}}, {"main", "mlp", "mlp_1"}, ["all_reduce"]),
        ({"x": {"x": 0}}, {"main", "mlp"}, []),
        ({"mlp.Y": {"x": 1}}, {"main", "mlp"}, ["all_reduce", "all_reduce"]),
        ({}, {"main", "mlp"}, []),
    ],
)
def test_nested_calls_are_specialised_per_layout(shardings, local, sent):
    run = mt.distribute_module(NESTED, {"x": 2}, shardings)
    assert set(functions(run.local_module)) == local
    assert kinds(run.plan) == sent
    tensors = matrices(5)
    close(run(*tensors), mt.run_sequential(NESTED, tensors))


def test_nested_annotated_as_asked_for():
    """What the question wrote a mutator for: the argument of every call is annotated, here as replicated."""
    annotated = mt.annotate_module(NESTED, {"x": 2}, {"mlp.x": {}, **ROWS_AND_COLUMNS})
    run = mt.distribute_module(annotated)
    tensors = matrices(5)
    close(run(*tensors), mt.run_sequential(NESTED, tensors))
    assert parameters(run) == {"x": "R", "A": "S[1]", "B": "S[0]", "C": "S[1]", "D": "S[0]"}


def test_nested_on_four_devices_in_two_axes():
    """Data and tensor parallel at once: sums are over the second axis only."""
    run = mt.distribute_module(NESTED, {"data": 2, "model": 2}, {"x": {"data": 0}, "mlp.Y": {"data": 0, "model": 1}})
    assert kinds(run.plan) == ["all_reduce", "all_reduce"]
    tensors = matrices(5)
    close(run(*tensors), mt.run_sequential(NESTED, tensors))


def test_the_only_public_function_is_meant_where_there_is_no_main():
    x, a, b = matrices(3)
    expected = torch.nn.functional.gelu(x @ a) @ b
    run = mt.distribute_module(MLP)
    assert run.function == "foo"
    close(run(x, a, b), expected)
    close(mt.run_sequential(MLP, [x, a, b]), expected)
    assert mt.read_module_annotations(MLP).annotations.keys() == {("foo", "lv2")}
    again = mt.annotate_module(MLP, {"axis0": 2}, {"x": {"axis0": 0}})
    assert mt.read_module_annotations(again).annotations.keys() == {("foo", "lv2"), ("foo", "x_sharded")}


def test_which_of_several_functions_is_meant_has_to_be_said():
    two = MLP.clone()
    two["bar"] = MLP["foo"].with_attr("global_symbol", "bar")
    with pytest.raises(mt.MeshTensorError) as error:
        mt.distribute_module(two)
    assert str(error.value) == (
        "the module has no Relax function 'main'\n  fix: name one that it has: function='bar', 'foo'"
    )
