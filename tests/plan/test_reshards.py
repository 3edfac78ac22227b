"""Explicit layout changes: pending sums are carried, changes are shared, collectives start early."""

import torch
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.program.steps import CollectiveStep, OpStep, WaitStep

from .modules import function, kinds, planned


def test_two_pending_sums_are_reduced_as_one():
    def build(emit, x, v, w):
        return emit(relax.op.add(emit(relax.op.matmul(x, v)), emit(relax.op.matmul(x, w))))

    mod = function(build, x=(8, 16), v=(16, 8), w=(16, 8))
    run = mt.distribute_module(mod, {"x": 2}, {"x": {"x": 1}, "v": {"x": 0}, "w": {"x": 0}})
    x, v, w = torch.randn(8, 16), torch.randn(16, 8), torch.randn(16, 8)
    torch.testing.assert_close(run(x, v, w), x @ v + x @ w, rtol=1e-4, atol=1e-5)
    assert kinds(run.plan) == ["all_reduce"]


def test_what_is_not_linear_gets_the_whole_sum():
    def build(emit, x, w, b):
        return emit(relax.op.add(emit(relax.op.matmul(x, w)), b))

    mod = function(build, x=(8, 16), w=(16, 8), b=(8,))
    run = mt.distribute_module(mod, {"x": 2}, {"x": {"x": 1}, "w": {"x": 0}})
    x, w, b = torch.randn(8, 16), torch.randn(16, 8), torch.randn(8)
    torch.testing.assert_close(run(x, w, b), x @ w + b, rtol=1e-4, atol=1e-5)


def test_a_sum_is_reduced_into_the_split_that_is_wanted():
    def build(emit, x, w):
        return emit(relax.op.nn.relu(emit(relax.op.matmul(x, w), "y")))

    mod = function(build, x=(8, 16), w=(16, 8))
    assert kinds(planned(mod, {"x": 2}, {"x": {"x": 1}, "w": {"x": 0}, "y": {"x": 0}})) == ["reduce_scatter"]


def test_a_change_is_made_once_for_all_who_need_it():
    def build(emit, x):
        whole = [emit(op(x, axis=0)) for op in (relax.op.nn.softmax, relax.op.nn.log_softmax)]
        return emit(relax.op.add(*whole))

    assert kinds(planned(function(build, x=(8, 8)), {"x": 2}, {"x": {"x": 0}})).count("all_gather") <= 1


def test_padding_is_neutral_where_it_is_summed():
    def build(emit, x, w):
        return emit(relax.op.matmul(emit(relax.op.exp(x)), emit(relax.op.divide(w, w))))

    mod = function(build, x=(4, 7), w=(7, 4))
    run = mt.distribute_module(mod, {"x": 3}, {"x": {"x": 1}, "w": {"x": 0}})
    x, w = torch.randn(4, 7), torch.randn(7, 4)
    torch.testing.assert_close(run(x, w), x.exp() @ torch.ones(7, 4), rtol=1e-5, atol=1e-5)


def test_float16_sums_are_combined_in_float32():
    def build(emit, x, w):
        half = [emit(relax.op.astype(value, "float16")) for value in (x, w)]
        return emit(relax.op.matmul(*half))

    mod = function(build, x=(4, 64), w=(64, 4))
    run = mt.distribute_module(mod, {"x": 4}, {"x": {"x": 1}, "w": {"x": 0}})
    steps = [step for step in run.program.steps if isinstance(step, CollectiveStep)]
    assert [run.program.values[step.src].dtype for step in steps] == ["float32"]
    x, w = torch.randn(4, 64), torch.randn(64, 4)
    assert torch.equal(run(x, w), (x.half().float() @ w.half().float()).half())


def test_collectives_start_before_products_that_do_not_need_them():
    def build(emit, x, v, w):
        h = emit(relax.op.matmul(emit(relax.op.matmul(x, v)), v))
        return emit(relax.op.matmul(h, w), "last")

    mod = function(build, x=(512, 16), v=(16, 16), w=(16, 16))
    plan = planned(mod, {"x": 2}, {"x": {"x": 0}, "w": {"x": 0}}, priority={"w": 1})
    steps = [s for s in plan.made.program.steps if isinstance(s, (OpStep, CollectiveStep, WaitStep))]
    kinds_ = [type(step).__name__ for step in steps]
    assert kinds_ == ["CollectiveStep", "OpStep", "OpStep", "WaitStep", "OpStep"]
    assert not steps[0].wait
