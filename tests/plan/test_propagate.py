"""Propagation: who is heard first, and what becomes a conflict."""

from tvm import relax

from .modules import function, kinds, layouts, planned


def two_products():
    def build(emit, x, w1, w2):
        h = emit(relax.op.nn.gelu(emit(relax.op.matmul(x, w1), "a")), "h")
        return emit(relax.op.matmul(h, w2), "b")

    return function(build, x=(8, 16), w1=(16, 32), w2=(32, 16))


def test_weights_split_what_lies_between_them():
    plan = planned(two_products(), {"x": 2}, {"w1": {"x": 1}})
    found = layouts(plan)
    assert (found["h"], found["w2"], found["x"]) == ("S[1]", "S[0]", "R")
    assert kinds(plan) == ["all_reduce"]


def test_it_spreads_back():
    assert layouts(planned(two_products(), {"x": 2}, {"w2": {"x": 0}}))["w1"] == "S[1]"


def test_lower_priorities_are_heard_first():
    both = {"x": {"x": 0}, "w1": {"x": 0}, "w2": {"x": 0}}
    first = planned(two_products(), {"x": 2}, both, priority={"w1": 1, "w2": 1})
    assert layouts(first)["h"] == "S[0]"
    last = planned(two_products(), {"x": 2}, both, priority={"x": 1})
    assert layouts(last)["h"] == "S[1]"


def test_conflicts_are_reported():
    plan = planned(two_products(), {"x": 2}, {"x": {"x": 0}, "w1": {"x": 1}})
    (found, *_) = plan.layouts.conflicts
    assert str(found) == "main.a (matmul): axis x splits n, not m"


def test_closed_values_keep_what_was_stated_and_open_ones_take_more():
    mesh, stated = {"x": 2, "y": 2}, {"w1": {"x": 1}, "x": {"y": 0}, "h": {"x": 1}}
    assert layouts(planned(two_products(), mesh, stated))["h_sharded"] == "S[1], R"
    assert layouts(planned(two_products(), mesh, stated, open="h"))["h_sharded"] == "S[1], S[0]"


def test_it_is_deterministic():
    stated = {"x": {"x": 0, "y": 1}, "w2": {"y": 0}}
    plans = [planned(two_products(), {"x": 2, "y": 2}, stated) for _ in range(3)]
    assert len({str(layouts(plan)) for plan in plans}) == 1
    assert len({str(kinds(plan)) for plan in plans}) == 1


def test_an_axis_may_be_heard_later_than_another():
    """The features of w1 first, where it is stored last: over each axis by itself."""
    stated = {"x": {"d": 0}, "w1": {"d": 0, "m": 1}, "w2": {"d": 1, "m": 0}}
    mesh = {"d": 2, "m": 2}
    by_hand = planned(two_products(), mesh, stated, priority={"w1": {"d": 1}, "w2": {"d": 1}})
    assert layouts(by_hand)["h"] == "S[0], S[1]"
    weights_first = planned(two_products(), mesh, stated, priority={"x": {"d": 1}, "w1": {"m": 1}, "w2": {"m": 1}})
    assert layouts(weights_first)["h"] == "R, S[1]"


def test_some_dims_may_be_open():
    mesh, stated = {"x": 2, "y": 2}, {"w1": {"x": 1}, "x": {"y": 0}, "h": {}}
    found = [
        layouts(planned(two_products(), mesh, stated, open={"h": dims}))["h_sharded"]
        for dims in ((), (0,), (1,), (0, -1))
    ]
    assert found == ["R, R", "R, S[0]", "S[1], R", "S[1], S[0]"]


def test_what_is_stated_to_be_partial_is_not_reduced_before():
    stated = {"w1": {"x": 1}, "b": {"sharding": {}, "partial": {"x": "sum"}}}
    assert kinds(planned(two_products(), {"x": 2}, stated)) == []
