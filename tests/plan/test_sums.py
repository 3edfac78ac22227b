"""Sums of several parts that wait: one collective completes them, whatever else is added in between."""

import copy
import math

import pytest
import torch
from torch import nn
from tvm import relax

import mesh_tensor as mt
from benchmarks.plan_layers import Einsums
from mesh_tensor.program.steps import CollectiveStep

from .modules import function, kinds

op = relax.op
SHAPES = {"x": (6, 8), "w1": (8, 12), "w2": (12, 8), "w3": (8, 12), "w4": (12, 8), "bias": (8,)}
STATED = {"w1": {"x": 1}, "w2": {"x": 0}, "w3": {"x": 1}, "w4": {"x": 0}}


def side_by_side(order, dtype="float32", moved=False, gated=False):
    """Two products over a split dim, the residual and a bias, added in that order; `gated`: each times a number per
    row, as experts' results are."""

    def cast(emit, value):
        return value if dtype == "float32" else emit(op.astype(value, dtype))

    def build(emit, x, w1, w2, w3, w4, bias):
        terms = {"x": cast(emit, x), "b": cast(emit, bias)}
        for name, first, second in (("p", w1, w2), ("q", w3, w4)):
            h = emit(op.nn.relu(emit(op.matmul(cast(emit, x), cast(emit, first)))))
            terms[name] = emit(op.matmul(h, cast(emit, second)))
            if gated:
                terms[name] = emit(op.multiply(emit(op.mean(x, 1, True)), terms[name]))
            if moved:
                terms[name] = emit(op.reshape(emit(op.reshape(terms[name], (3, 2, 8))), (6, 8)))
        total = terms[order[0]]
        for name in order[1:]:
            total = emit(op.add(total, terms[name]))
        return total

    return function(build, **SHAPES)


def check(mod, stated, mesh, expected):
    run = mt.distribute_module(mod, mesh, stated, poison=True)
    assert [kind for kind in kinds(run.plan) if kind != "slice"] == expected
    inputs = [torch.randn(shape) for shape in SHAPES.values()]
    torch.testing.assert_close(run(*inputs), mt.run_sequential(mod, inputs), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("order", ["xpq", "pbxq"])
def test_one_collective_for_what_is_weighed(order):
    check(side_by_side(order, gated=True), STATED, {"x": 2}, ["all_reduce"])


def test_gates_that_are_split_as_the_parts_are():
    """What devices have is multiplied with a part of what it is multiplied with: the sum is completed before."""

    def build(emit, x, w1, w2, w3, w4, bias):
        terms = [emit(op.matmul(emit(op.matmul(x, a)), b)) for a, b in ((w1, w2), (w3, w4))]
        return emit(op.add(emit(op.add(emit(op.multiply(terms[0], bias)), x)), terms[1]))

    mod = function(build, **SHAPES)
    run = mt.distribute_module(mod, {"x": 2}, {**STATED, "bias": {"x": 0}}, poison=True)
    inputs = [torch.randn(shape) for shape in SHAPES.values()]
    torch.testing.assert_close(run(*inputs), mt.run_sequential(mod, inputs), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("order", ["xpq", "pxq", "pbxq", "bpqx", "qxpb"])
def test_one_collective(order, moved):
    check(side_by_side(order, moved=moved), STATED, {"x": 2}, ["all_reduce"])


def test_scattered_where_the_sum_is_split():
    mod = side_by_side("xpq")
    name = mod["main"].body.body.name_hint
    check(mod, {**STATED, name: {"x": 0}}, {"x": 2}, ["all_gather", "reduce_scatter"])


def test_over_other_axes_they_are_by_themselves():
    check(
        side_by_side("xpq"),
        {"w1": {"x": 1}, "w2": {"x": 0}, "w3": {"y": 1}, "w4": {"y": 0}},
        {"x": 2, "y": 2},
        ["all_reduce"] * 2,
    )


def test_narrow_sums_are_completed_at_once():
    run = mt.distribute_module(side_by_side("xpq", "float16"), {"x": 2}, STATED)
    assert kinds(run.plan).count("all_reduce") == 2


def test_what_is_stated_between_is_left():
    mod = side_by_side("xpq")
    between = next(b.var.name_hint for b in mod["main"].body.blocks[0].bindings if b.value.op.name == "relax.add")
    check(mod, {**STATED, between: {}}, {"x": 2}, ["all_reduce"] * 2)


def test_every_order_gives_the_same():
    inputs = [torch.randn(shape) for shape in SHAPES.values()]
    found = [mt.distribute_module(side_by_side(order), {"x": 3}, STATED)(*inputs) for order in ("xpqb", "bqxp")]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


ACROSS = {"x": {"d": 0}, "w1": {"m": 1}, "w2": {"m": 0}}


def summed_rows(last):
    """Parts over one axis, of which `last` makes less along a dim that another axis splits; `y` has rows of its own."""

    def build(emit, x, w1, w2, y):
        return last(emit, emit(op.matmul(emit(op.nn.relu(emit(op.matmul(x, w1)))), w2)), y)

    return function(build, x=(7, 6), w1=(6, 9), w2=(9, 5), y=(7, 5))


@pytest.mark.parametrize("mesh", [{"d": 2, "m": 2}, {"m": 3, "d": 2}, {"d": 4, "m": 1}, {"d": 1, "m": 2}])
@pytest.mark.parametrize(
    ("last", "completed"),
    [
        (lambda emit, z, y: emit(op.sum(z, 0)), [5]),
        (lambda emit, z, y: emit(op.sum(emit(op.multiply(z, y)), 0)), [5]),
        (lambda emit, z, y: emit(op.matmul(emit(op.permute_dims(y)), z)), [25]),
        (lambda emit, z, y: emit(op.mean(emit(op.negative(z)), 0)), [5]),
        (lambda emit, z, y: emit(op.matmul(emit(op.permute_dims(z)), z)), [35, 25]),  # linear in each, not in both
        (lambda emit, z, y: emit(op.max(z, 0)), [35, 5]),
        (lambda emit, z, y: emit(op.sum(emit(op.multiply(z, z)), 0)), [35, 5]),
        (lambda emit, z, y: emit(op.sum(emit(op.add(z, y)), 0)), [5]),
    ],
)
def test_parts_over_one_axis_are_summed_over_another_before_they_are_completed(last, completed, mesh):
    mod = summed_rows(last)
    run = mt.distribute_module(mod, mesh, {**ACROSS, "y": {"d": 0}}, poison=True)
    inputs = [torch.randn(shape) for shape in ((7, 6), (6, 9), (9, 5), (7, 5))]
    torch.testing.assert_close(run(*inputs), mt.run_sequential(mod, inputs), rtol=1e-4, atol=1e-4)
    if min(mesh.values()) > 1:
        steps = [step for step in run.plan.made.program.steps if isinstance(step, CollectiveStep)]
        values = run.plan.made.program.values
        found = [math.prod(values[step.src].shape) for step in steps if step.kind == "all_reduce"]
        assert {step.kind for step in steps} <= {"all_reduce", "to_partial"}
        assert found == completed


def test_training_sums_what_the_first_layer_leaves_with_the_gradients():
    """Nobody asks for the gradient of x: that of its norm's weights is a sum over heads and over the batch, as one."""
    torch.manual_seed(0)
    model, x, y = Einsums(16, 4).double(), *torch.randn(2, 4, 6, 16).double()
    theirs = copy.deepcopy(model)
    step = mt.training_step(model, nn.functional.mse_loss, (x, y), optimizer="sgd", lr=0.1)
    split = {"x": {"d": 0}, "target": {"d": 0}, **{name: {"m": 1} for name in "qkv"}, "o": {"m": 0}}
    run = mt.distribute_module(step, {"d": 2, "m": 2}, split)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(theirs(x), y)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(run(x, y), loss.detach())
    steps = [step for step in run.program.steps if isinstance(step, CollectiveStep)]
    assert [step.axes for step in steps] == [("m",), ("d", "m"), ("d",)]
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(run.state_dict()[name], parameter.detach(), rtol=1e-6, atol=1e-6)
