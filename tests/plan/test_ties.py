"""What else is stated of layouts, as in Shardy: replicated axes, groups, barriers; and what may be stated together."""

import itertools

import pytest
import torch
from tvm import relax
from tvm.script import from_source

import mesh_tensor as mt

from .modules import function, layouts, planned

op = relax.op
X, W = (6, 8), (8, 4)


def two_paths(emit, x, y, w):
    """h = x w and k = y w; relu(h) + k."""
    return emit(op.add(emit(op.nn.relu(emit(op.matmul(x, w)))), emit(op.matmul(y, w))))


def module():
    return function(two_paths, x=X, y=X, w=W)


def names(mod):
    """h, relu(h), k and the sum, by name."""
    return [binding.var.name_hint for binding in mod["main"].body.blocks[0].bindings[:4]]


def check(mod, mesh, stated, **ties):
    """The plan, after a run that is right on a poisoned mesh, also once it was printed and parsed."""
    made = mt.annotate_module(mod, mesh, stated, **ties)
    again = from_source(made.script())
    x, y, w = torch.randn(X), torch.randn(X), torch.randn(W)
    want = torch.relu(x @ w) + y @ w
    for each in (made, again):
        run = mt.distribute_module(each, mesh, poison=True)
        torch.testing.assert_close(run(x, y, w), want, rtol=1e-4, atol=1e-4)
    return run.plan


def test_axis_that_is_replicated_is_not_taken_by_propagation():
    mod = module()
    h, *_ = names(mod)
    stated = {"x": {"a": 0, "b": 0}, h: {}}
    mesh = {"a": 2, "b": 3}
    assert layouts(check(mod, mesh, stated, open=[h]))[f"{h}_sharded"] == "S[0], S[0]"
    for said in ({"b": None}, {"sharding": {}, "replicate": ("b",)}, '{"b": null}'):
        assert layouts(check(mod, mesh, {**stated, h: said}, open=[h]))[f"{h}_sharded"] == "S[0], R"


def test_part_of_an_axis_is_replicated():
    mod = module()
    h, *_ = names(mod)
    plan = check(mod, {"a": 4}, {"x": {"a": 0}, h: {"a:(2)2": None}}, open=[h])
    assert plan.graph.mesh == mt.Mesh({"a:(1)2": 2, "a:(2)2": 2})
    assert layouts(plan)[f"{h}_sharded"] == "S[0], R"


def test_group_lies_as_the_one_of_which_something_is_stated():
    mod = module()
    h, _, k, _ = names(mod)
    free = layouts(check(mod, {"a": 2}, {h: {"a": 0}}))
    plan = check(mod, {"a": 2}, {"x": {"a": 1}}, groups={"inputs": ["x", "y"]})
    assert layouts(plan)["x"] == layouts(plan)["y"] == "S[1]"
    assert free["w"] == "R"
    plan = check(mod, {"a": 2}, {h: {"a": 1}}, groups={"g": [h, k]})
    assert layouts(plan)[f"{h}_sharded"] == layouts(plan)[f"{k}_sharded"] == "S[1]"


def test_group_hears_what_spreads_to_one_of_it():
    mod = module()
    plan = check(mod, {"a": 2}, {"w": {"a": 1}}, groups={"g": names(mod)[:1] + names(mod)[2:3]})
    found = {layout for name, layout in layouts(plan).items() if name.endswith("_sharded") and not name.startswith("w")}
    assert found == {"S[1]"}


@pytest.mark.parametrize(
    ("direction", "before", "after"),
    [("none", "R", "R"), ("forward", "S[0]", "S[0]"), ("backward", "R", "R"), (None, "S[0]", "S[0]")],
)
def test_barrier_before_what_is_known_of_the_operands(direction, before, after):
    """x is split; that spreads to h; behind the barrier it does as far as it may."""
    mod = module()
    h, relu, *_ = names(mod)
    plan = check(mod, {"a": 2}, {"x": {"a": 0}}, barriers={h: direction} if direction else None)
    found = layouts(plan)
    assert found[h] == "S[0]"
    assert found[relu] == after
    assert found.get(f"{h}_sharded", before) == before


@pytest.mark.parametrize(("direction", "found"), [("none", "R"), ("forward", "R"), ("backward", "S[0]")])
def test_barrier_behind_what_is_known_of_the_users(direction, found):
    mod = module()
    h, relu, *_ = names(mod)
    plan = check(mod, {"a": 2}, {relu: {"a": 0}}, barriers={h: direction})
    assert layouts(plan)[f"{h}_sharded"] == "S[0]"
    assert layouts(plan)[h] == layouts(plan)["x"] == found


LAYOUT = [{}, {"a": 0}, {"a:(1)2": 0, "a:(2)2": 1}, {"a": 0, "b": 0}, {"sharding": {"a": 0}, "partial": {"b": "sum"}}]


@pytest.mark.parametrize("layout", LAYOUT, ids=str)
@pytest.mark.parametrize("grouped", [False, True])
def test_words_together(layout, grouped):
    """Every layout with open dims, priorities, a group and a barrier on uneven dims: right, or refused by name."""
    mod = module()
    h, relu, k, _ = names(mod)
    groups = {"g": [h, k]} if grouped else None
    for opened, priority, barrier in itertools.product((False, [h], {h: [0]}), (0, {"b": 1}), (None, "none")):
        ties = {"open": opened or (), "priority": {h: priority}, "barriers": {relu: barrier} if barrier else None}
        stated = {"x": {"b": 0}, "w": {"a": 1}, h: layout}
        if grouped and "partial" in layout:
            with pytest.raises(mt.MeshTensorError, match="is partial: pending sums are no layout of a group"):
                mt.annotate_module(mod, {"a": 4, "b": 3}, stated, groups=groups, **ties)
            return
        plan = planned(mod, {"a": 4, "b": 3}, stated, groups=groups, **ties)
        if grouped:
            assert layouts(plan)[f"{h}_sharded"] == layouts(plan)[f"{k}_sharded"]
        if barrier and opened:
            check(mod, {"a": 4, "b": 3}, stated, groups=groups, **ties)


@pytest.mark.parametrize(
    ("stated", "ties", "said"),
    [
        ({}, {"groups": {"g": ["x", "w"]}}, r"group 'g' has values of several shapes: x \(6 x 8\), w \(8 x 4\)"),
        ({}, {"groups": {"g": ["x", "z"]}}, r"'z'"),
        ({"x": {"a": 0}, "y": {"a": 1}}, {"groups": {"g": ["x", "y"]}}, r"lie differently: x 'S\[0\]', y 'S\[1\]'"),
        ({}, {"groups": {"g": ["x", "y"], "k": ["x"]}}, r"'x' is in two groups, 'g' and 'k': make them one"),
        ({}, {"barriers": {"x": "up"}}, r"the barrier of 'x' is 'up', none of 'none', 'forward', 'backward'"),
        ({}, {"barriers": {"q": "none"}}, r"'q'"),
    ],
)
def test_what_can_t_be_tied_is_refused(stated, ties, said):
    with pytest.raises(mt.MeshTensorError, match=said):
        mt.annotate_module(module(), {"a": 2}, stated, **ties)


def test_groups_that_are_written_by_hand_are_checked():
    made = mt.annotate_module(module(), {"a": 2}, {"x": {"a": 0}, "w": {"a": 1}}, groups={"g": ["x", "y"]})
    text = made.script().replace('"w_sharded": {', '"w_sharded": {"group": "g", ')
    if text == made.script():
        text = text.replace('"mesh_tensor_hints": {', '"mesh_tensor_hints": {"w_sharded": {"group": "g"}, ')
    with pytest.raises(mt.MeshTensorError, match="group 'g' has values of several shapes"):
        mt.distribute_module(from_source(text), {"a": 2})


def test_what_was_saved_is_stated_again_for_another_mesh(tmp_path):
    mod = module()
    h, relu, k, _ = names(mod)
    stated, groups = {"x": {"a": 0}, h: {"sharding": {}, "replicate": ("b",)}}, {"g": ["x", "y"]}
    made = mt.annotate_module(mod, {"a": 2, "b": 2}, stated, open=[h], groups=groups, barriers={k: "none"})
    run = mt.distribute_module(made, {"a": 2, "b": 2})
    mt.save(run, tmp_path)
    again = mt.load(tmp_path, {"a": 3, "b": 2})
    assert layouts(again.plan) == layouts(run.plan)
    inputs = torch.randn(X), torch.randn(X), torch.randn(W)
    torch.testing.assert_close(again(*inputs), run(*inputs), rtol=1e-4, atol=1e-4)


def test_parts_that_were_saved_are_loaded_for_the_whole_axis(tmp_path):
    run = mt.distribute_module(module(), {"a": 4}, {"x": {"a:(1)2": 0, "a:(2)2": 1}})
    mt.save(run, tmp_path)
    for mesh in ({"a": 4}, {"a:(1)2": 2, "a:(2)2": 2}, None):
        assert layouts(mt.load(tmp_path, mesh).plan) == layouts(run.plan)
    with pytest.raises(mt.MeshTensorError, match=r"it was saved for Mesh\(.* which has no axis of"):
        mt.load(tmp_path, {"a": 3})


def test_groups_of_sizes_that_are_known_at_the_call():
    """`x[:4]` is of min(n, 4) rows: what lies alike fits where it has four."""
    text = """
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor(("n", 8), "float32"), y: R.Tensor((4, 8), "float32")) -> R.Tensor((4, 8), "float32"):
        n = T.int64()
        rows: R.Tensor((T.min(n, 4), 8), "float32") = R.strided_slice(x, [0], [0], [4])
        whole: R.Tensor((4, 8), "float32") = R.match_cast(rows, R.Tensor((4, 8), "float32"))
        return R.add(whole, y)
"""
    mod = from_source(text)
    made = mt.annotate_module(mod, {"a": 2}, {"y": {"a": 0}}, groups={"g": ["rows", "y"]})
    run = mt.distribute_module(made, {"a": 2}, poison=True)
    x, y = torch.randn(6, 8), torch.randn(4, 8)
    torch.testing.assert_close(run(x, y), x[:4] + y)
    with pytest.raises(mt.MeshTensorError, match=r"'whole' is \[3, 8\] float32, but the module says"):
        run(x[:3], y)
