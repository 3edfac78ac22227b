"""Alike steps share their calls on tiles, unlike ones don't; the local module is well-formed."""

import torch
from tvm import relax
from tvm.script import from_source

import mesh_tensor as mt
from mesh_tensor.program.steps import OpStep
from tests.plan.modules import function, planned


def chain(layers):
    """gelu(... gelu(x @ w0) ...), its weights split over columns and rows in turn."""

    def build(emit, x, *weights):
        for weight in weights:
            x = emit(relax.op.nn.gelu(emit(relax.op.matmul(x, weight))))
        return x

    names = [f"w{i}" for i in range(layers)]
    mod = function(build, x=(8, 8), **dict.fromkeys(names, (8, 8)))
    return planned(mod, {"x": 2}, {name: {"x": 1 - i % 2} for i, name in enumerate(names)})


def calls(plan):
    return [step.call for step in plan.made.program.steps if isinstance(step, OpStep)]


def test_more_layers_are_no_more_calls():
    few, many = chain(4), chain(12)
    assert len(calls(many)) == 3 * len(calls(few))
    assert len(set(calls(many))) == len(set(calls(few)))


def test_a_local_module_is_well_formed_and_can_be_read_again():
    mod = chain(4).local_module
    assert relax.analysis.well_formed(mod)
    again = from_source(mod.script(show_meta=True))
    assert again.script() == mod.script()


def test_calls_that_differ_in_an_attribute_or_a_number_are_kept_apart():
    def build(emit, x):
        sums = [emit(relax.op.cumsum(x, axis=axis)) for axis in (0, 1)]
        clips = [emit(relax.op.clip(x, low, 1)) for low in (0, relax.PrimValue(0.5))]
        turned = [emit(relax.op.reshape(emit(relax.op.reshape(x, shape)), (8, 8))) for shape in ((4, 16), (16, 4))]
        total = x
        for value in (*sums, *clips, *turned):
            total = emit(relax.op.add(total, value))
        return total

    run = mt.distribute_module(function(build, x=(8, 8)), {"x": 2}, {"x": {"x": 0}})
    x = torch.randn(8, 8)
    expected = 3 * x + x.cumsum(0) + x.cumsum(1) + x.clip(0, 1) + x.clip(0.5, 1)
    torch.testing.assert_close(run(x), expected, rtol=1e-5, atol=1e-5)
    clips = [call.literals for call in calls(run.plan) if call.name == "clip"]
    assert clips == [(0, 1), (0.5, 1)]


def test_operands_that_are_one_value_and_two_values_may_share_a_call():
    def build(emit, x, y):
        return emit(relax.op.subtract(emit(relax.op.multiply(x, x)), emit(relax.op.multiply(x, y))))

    run = mt.distribute_module(function(build, x=(8, 8), y=(8, 8)), {"x": 2}, {"x": {"x": 0}, "y": {"x": 0}})
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    torch.testing.assert_close(run(x, y), x * x - x * y, rtol=1e-5, atol=1e-5)
    assert len({call for call in calls(run.plan) if call.name == "multiply"}) == 1
