"""Weights that an axis only stores, and those whose layouts activations follow."""

import pytest
from tvm import relax

from .modules import function, kinds, layouts, planned

op = relax.op


def two_products(rows=64):
    def build(emit, x, w1, b1, w2):
        h = emit(op.nn.gelu(emit(op.add(emit(op.matmul(x, w1)), b1))), "h")
        return emit(op.matmul(h, w2), "y")

    return function(build, x=(rows, 16), w1=(16, 32), b1=(32,), w2=(32, 16))


@pytest.mark.parametrize("dims", [(0, 0), (1, 1), (0, 1)])
def test_weights_that_disagree_are_stored(dims):
    stated = {"x": {"d": 0}, "w1": {"d": dims[0]}, "b1": {"d": 0}, "w2": {"d": dims[1]}}
    plan = planned(two_products(), {"d": 2}, stated)
    assert [layouts(plan)[name] for name in ("h", "y")] == ["S[0]", "S[0]"]
    assert kinds(plan) == ["all_gather"] * 3


def test_weights_that_agree_lead():
    plan = planned(two_products(rows=8), {"d": 2}, {"x": {"d": 0}, "w1": {"d": 1}, "b1": {"d": 0}, "w2": {"d": 0}})
    assert layouts(plan)["h"] == "S[1]"


def test_weights_by_themselves_lead():
    """Nothing is stated of activations: they follow the weights, though these disagree."""
    plan = planned(two_products(), {"d": 2}, {"w1": {"d": 1}, "w2": {"d": 1}})
    assert layouts(plan)["h"] == "S[1]"


def test_every_axis_by_itself():
    """The batch and storage over d, features over m."""
    stated = {"x": {"d": 0}, "w1": {"d": 0, "m": 1}, "b1": {"m": 0}, "w2": {"m": 0, "d": 1}}
    plan = planned(two_products(), {"d": 2, "m": 2}, stated)
    assert layouts(plan)["h"] == "S[0], S[1]"
    assert kinds(plan) == ["all_gather", "all_gather", "all_reduce"]


def test_weights_that_agree_with_each_other_and_not_with_what_is_stated_between_layers_are_stored():
    """They could all split the features of what is between layers, as which rows were exchanged in every layer; an
    input that has no features, such as tokens, doesn't say that."""

    def build(emit, x, table, w1, w2):
        before = emit(op.add(x, table), "before")
        h = emit(op.nn.gelu(emit(op.matmul(before, w1))), "h")
        return emit(op.add(before, emit(op.matmul(h, w2))), "after")

    mod = function(build, x=(64, 1), table=(16,), w1=(16, 32), w2=(32, 16))
    weights = {"table": {"d": 0}, "w1": {"d": 0, "m": 1}, "w2": {"m": 0, "d": 1}}
    plan = planned(mod, {"d": 2, "m": 2}, {"x": {"d": 0}, **weights, "after": {"d": 0}})
    assert [layouts(plan)[name] for name in ("before", "h", "after")] == ["S[0], R", "S[0], S[1]", "S[0], R"]
    assert kinds(plan) == ["all_gather", "all_gather", "all_gather", "all_reduce"]


def test_through_casts_and_turns():
    def build(emit, x, w1, w2):
        h = emit(op.nn.relu(emit(op.matmul(x, emit(op.permute_dims(emit(op.astype(w1, "float32"))))))), "h")
        return emit(op.matmul(h, emit(op.permute_dims(w2))), "y")

    mod = function(build, x=(8, 4, 16), w1=(32, 16), w2=(16, 32))
    plan = planned(mod, {"d": 2}, {"x": {"d": 0}, "w1": {"d": 0}, "w2": {"d": 0}})
    assert [layouts(plan)[name] for name in ("h", "y")] == ["S[0]", "S[0]"]


def test_what_is_heard_later_is_reserved():
    """Nothing takes the dims of a value whose own layout is heard later, nor goes through it."""
    plan = planned(two_products(), {"d": 2}, {"x": {"d": 0}, "w2": {"d": 1}, "h": {"d": 1}}, priority={"h": 2, "w2": 1})
    assert layouts(plan)["h_sharded"] == "S[1]"
    assert layouts(plan)["y"] == "S[1]"
