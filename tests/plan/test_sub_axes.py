"""Sub-axes: an axis splits two factors, because users state so or because that takes less."""

import re

import pytest
import torch
from torch.nn import functional as F
from tvm import relax

import mesh_tensor as mt
from kernels.models import llama
from tests.other_machines import WORK_COUNTS, planned_for

from .modules import function, kinds, layouts, planned

op = relax.op


def product():
    """Rows of x by w, merged and taken apart again."""

    def build(emit, x, w):
        merged = emit(op.reshape(emit(op.matmul(x, w)), (24, 16)))
        return emit(op.nn.softmax(emit(op.reshape(merged, (4, 6, 16))), -1))

    return function(build, x=(4, 6, 8), w=(8, 16))


def check(mod, mesh, stated, shapes, **options):
    run = mt.distribute_module(mod, mesh, stated, poison=True, **options)
    inputs = [torch.randn(shape) for shape in shapes]
    want = mt.run_sequential(mod, inputs)
    torch.testing.assert_close(run(*inputs), want, rtol=1e-4, atol=1e-4)
    as_mesh_tensors = [mt.distribute(inputs[0], mesh, {}), *inputs[1:]]
    given = run(*as_mesh_tensors)
    assert given.sharding.mesh == mt.Mesh(mesh)
    torch.testing.assert_close(given.full(), want, rtol=1e-4, atol=1e-4)
    return run


SHAPES = [(4, 6, 8), (8, 16)]


def test_parts_of_an_axis_split_two_dims():
    run = check(product(), {"x": 8}, {"x": {"x:(1)4": 0, "x:(4)2": 1}}, SHAPES)
    assert kinds(run.plan) == []
    assert layouts(run.plan)["x"] == "S[0], S[1]"
    assert run.plan.graph.mesh == mt.Mesh({"x:(1)4": 4, "x:(4)2": 2})
    assert run.mesh == mt.Mesh({"x": 8})
    assert 'Mesh({"x:(1)4": 4, "x:(4)2": 2})' in run.explain()


@pytest.mark.parametrize(
    "stated",
    [
        {"x": {"x:(1)2": 0, "x:(2)2": 1, "x:(4)2": 2}},
        {"x": {"x:(4)2": 0, "x:(1)4": 1}},  # six over four: uneven tiles
        {"x": {"x:(2)4": 1}, "w": {"x:(1)2": 1}},
        {"x": {"x": 1}, "w": {"x:(1)4": 0}},
        {"x": {"sharding": {"x:(1)2": 0}, "replicate": ("x:(2)4",)}},
        {"x": '{"x:(1)2": 0}', "w": [1]},
        {"w": {"x:(1)4": 0, "x:(4)2": 1, "y": 1}},
    ],
)
def test_any_parts(stated):
    check(product(), {"x": 8, "y": 3} if "y" in str(stated) else {"x": 8}, stated, SHAPES)


def test_parts_with_pending_sums_priorities_and_open_values():
    def build(emit, x, w):
        h = emit(op.matmul(x, w))
        return emit(op.add(h, h))

    mod = function(build, x=(4, 8), w=(8, 6))
    h = mod["main"].body.blocks[0].bindings[0].var.name_hint
    stated = {"x": {"x:(1)2": 1, "x:(2)2": 0}, "w": {"x:(1)2": 0}, h: {"sharding": {}, "partial": {"x:(1)2": "sum"}}}
    made = mt.annotate_module(mod, {"x": 4}, stated, open=[h], priority={"x": {"x:(2)2": 1}, "w": 2})
    run = mt.distribute_module(made, {"x": 4}, poison=True)
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    torch.testing.assert_close(run(x, w), 2 * (x @ w), rtol=1e-4, atol=1e-4)


def test_prints_parses_and_is_read_for_either_mesh():
    made = mt.annotate_module(product(), {"x": 8}, {"x": {"x:(1)4": 0, "x:(4)2": 1}})
    from tvm.script import from_source

    again = from_source(made.script())
    for mesh in (None, {"x": 8}, {"x:(1)4": 4, "x:(4)2": 2}):
        stated = mt.read_module_annotations(again, mesh=mesh)
        assert stated.mesh == mt.Mesh({"x:(1)4": 4, "x:(4)2": 2})
        assert [str(found.sharding) for found in stated.annotations.values()] == ["S[0], S[1]"]


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"x:(8)2": 0}, r"'x:\(8\)2' is no sub-axis of 'x': \(8\) times 2 does not divide 12 devices"),
        ({"x:(1)5": 0}, r"'x:\(1\)5' is no sub-axis of 'x': \(1\) times 5 does not divide 12 devices"),
        ({"x:(1)0": 0}, r"'x:\(1\)0' is no sub-axis of 'x'"),
        ({"x:(1)2": 0, "x:(1)3": 1}, r"the sub-axes 'x:\(1\)2', 'x:\(1\)3' overlap"),
        ({"x:(1)4": 0, "x:(2)2": 1}, r"'x:\(2\)2' overlaps with what is stated already of 'x:\(2\)2'"),
        ({"x": 0, "x:(2)2": 1}, r"overlaps with what is stated already"),
        ({"z:(1)2": 0}, r"unknown mesh axis 'z:\(1\)2'"),
    ],
)
def test_what_is_no_part_is_refused(stated, said):
    with pytest.raises(mt.MeshTensorError, match=said):
        mt.annotate_module(product(), {"x": 12}, {"x": stated})


def test_a_module_annotated_for_the_whole_axis_is_not_annotated_for_parts():
    made = mt.annotate_module(product(), {"x": 8}, {"x": {"x": 0}})
    with pytest.raises(mt.MeshTensorError, match=re.escape('annotated for Mesh({"x": 8}) already')):
        mt.annotate_module(made, {"x": 8}, {"w": {"x:(1)4": 0}})


@pytest.mark.parametrize("mesh", [{"m": 8}, {"d": 2, "m": 8}])
def test_more_devices_than_key_heads(mesh):
    """Four key heads on eight devices: pairs of devices split the queries of one."""
    config = llama.Config(vocabulary=32, width=64, hidden=128, heads=16, key_heads=4, layers=1, batch=2, positions=8)
    model, inputs = llama.build(config).eval(), llama.example_inputs(config)
    made = mt.from_torch(torch.export.export(model, inputs), check=False)
    with planned_for(WORK_COUNTS):
        run = mt.distribute_module(made.mod, mesh, llama.tensor_parallel(config, "m"), weights=made.params, poison=True)
    assert {"m:(1)4", "m:(4)2"} <= set(run.plan.graph.mesh)
    with torch.no_grad():
        torch.testing.assert_close(run(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in run.state_dict().items())
    run.load_state_dict({name: 2 * tensor for name, tensor in run.state_dict().items()})
    model.load_state_dict({name: 2 * tensor for name, tensor in state.items()})
    with torch.no_grad():
        torch.testing.assert_close(run(*inputs), model(*inputs), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("mesh", "accumulate"), [({"m": 8}, 1), ({"d": 2, "m": 4}, 2)])
def test_training_with_more_devices_than_key_heads(mesh, accumulate):
    """Gradients of what pairs share are summed by pairs: nothing else is sent than by hand."""
    heads = mesh["m"] // 2
    config = llama.Config(
        vocabulary=16, width=128, hidden=128, heads=4 * heads, key_heads=heads, layers=1, batch=4, positions=16
    )
    torch.manual_seed(1)
    model, ids, wanted = llama.build(config), *torch.randint(16, (2, 4, 16))

    def loss(y, wanted):
        return F.cross_entropy(y.flatten(0, 1), wanted.flatten())

    step = mt.training_step(model, loss, (ids, wanted), lr=0.05, accumulate=accumulate, check=False)
    layouts = llama.tensor_parallel(config, "m") | {name: {"d": 0} for name in ("tokens", "target") if "d" in mesh}
    run = mt.distribute_module(step, mesh, layouts, poison=True, machine=WORK_COUNTS)
    assert len([axis for axis in run.plan.graph.mesh if axis.startswith("m:")]) == 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(2):
        expected = loss(model(ids), wanted)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(run(ids, wanted), expected.detach(), rtol=1e-4, atol=1e-4)
    sent = [step for step in run.program.steps if hasattr(step, "kind") and "d" not in step.axes]
    whole, pairs = ([step for step in sent if len(step.axes) == count] for count in (2, 1))
    assert [step.kind for step in whole] == ["all_reduce"] * 4 * accumulate
    assert sum(step.bytes for step in pairs) < 0.1 * sum(step.bytes for step in whole)


def test_explicit_plans_keep_the_mesh():
    assert planned(product(), {"x": 8}, {"x": {"x": 1}}).graph.mesh == mt.Mesh({"x": 8})
