"""Results that a plan completes at its end, left as their parts."""

import torch
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.plan.explicit import completed_last

from .modules import function, kinds

op = relax.op
SHAPES = {"x": (7, 6), "dy": (7, 5)}
ROWS = {"x": {"x": 0}, "dy": {"x": 0}}


def gradients(taken):
    """The gradient of a weight over rows, beside what keeps them; `taken`: something else takes it whole."""

    def build(emit, x, dy):
        gradient = emit(op.matmul(emit(op.permute_dims(x)), dy))
        beside = emit(op.multiply(dy, dy))
        return relax.Tuple([beside, gradient, emit(op.exp(gradient))] if taken else [beside, gradient])

    return function(build, **SHAPES)


def tensors():
    return [torch.randn(shape) for shape in SHAPES.values()]


def test_the_parts_of_a_sum_are_its_summands():
    run = mt.distribute_module(gradients(taken=False), {"x": 3}, ROWS)
    assert kinds(run.plan) == ["all_reduce"]
    assert completed_last(run.plan.explicit).keys() == {run.plan.made.result[1]}
    parts, (x, dy) = run.with_parts([1]), tensors()
    assert kinds(parts.plan) == []
    assert parts.plan.cost < run.plan.cost
    given = [mt.distribute(each, mt.Mesh({"x": 3}), {"x": 0}) for each in (x, dy)]
    beside, gradient = parts.call_alike(*given)
    assert (str(beside.sharding), str(gradient.sharding)) == ("S[0]", "P[sum]")
    torch.testing.assert_close(sum(gradient.tiles()), x.T @ dy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(beside.full(), dy * dy)
    torch.testing.assert_close(run(x, dy)[1], x.T @ dy, rtol=1e-5, atol=1e-5)


def test_what_is_taken_whole_is_completed():
    run = mt.distribute_module(gradients(taken=True), {"x": 3}, ROWS)
    assert not completed_last(run.plan.explicit)


def test_a_sum_that_is_scattered_has_no_parts_left():
    mod = gradients(taken=False)
    _, gradient = mt.distribute_module(mod, {"x": 3}, ROWS).plan.graph.result
    scattered = mt.distribute_module(mod, {"x": 3}, {**ROWS, gradient.name: {"x": 0}})
    assert kinds(scattered.plan) == ["reduce_scatter"]
    assert not completed_last(scattered.plan.explicit)
