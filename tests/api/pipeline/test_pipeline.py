"""Pipelines of forwards: whatever the cut, the meshes and the layouts, what the whole model gives."""

import itertools as it
import threading

import pytest
import torch
from torch import nn
from tvm import ir, relax
from tvm.relax.distributed import Placement

import mesh_tensor as mt
from tests.api.pipeline.models import Net, batch, imported
from tests.plan.seed_modules import NESTED

TOPOLOGY = {"m0": {"d": 2, "m": 2}, "m1": {"d": 3}}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def module(model):
    return imported(model, 4)


def close(got, wanted):
    torch.testing.assert_close(got, wanted.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("stages", "meshes"),
    [
        ({"m0": ["embed", "blocks.0"], "m1": ["blocks.1", "blocks.2"]}, ["m0", "m1"]),
        ({"m1": ["embed"], "m0": ["blocks.*"]}, ["m1", "m0"]),
        ({"m0": ["embed", "blocks.0"], "m1": ["blocks.*"]}, ["m0", "m1"]),
        ({"m0": ["blocks.1.fc"], "m1": ["*"]}, ["m0", "m1"]),
        (["blocks.1.fc"], ["m0", "m1"]),
        (["embed", "blocks.0", "blocks.1"], ["m0", "m1", "m0", "m1"]),
        ({"embed": "m0", "blocks.2": "m1"}, ["m0", "m1"]),
        ({"embed": ("m0", 0), "blocks.0": ("m1", 1), "blocks.1": ("m0", 2)}, ["m0", "m1", "m0"]),
    ],
)
def test_every_way_to_state_stages(model, module, stages, meshes):
    run = mt.pipeline(module, TOPOLOGY, stages, {"tokens": {"d": 0}, "*.fc.weight": {"m": 0}}, microbatches=3)
    assert [stage.mesh for stage in run.stages] == meshes
    tokens, labels = batch(12)
    close(run(tokens, labels), model(tokens, labels))
    close(run(labels=labels, tokens=tokens), model(tokens, labels))


def test_results_of_microbatches_are_put_together(model):
    logits = Net(loss=False)
    run = mt.pipeline(imported(logits, 2), TOPOLOGY, ["blocks.1"], microbatches=4)
    tokens, labels = batch(8)
    close(run(tokens, labels), logits(tokens, labels))


def test_the_last_microbatch_may_be_smaller_where_the_batch_size_is_open(model):
    run = mt.pipeline(imported(model, 4, open_size=True), TOPOLOGY, ["blocks.0"], {"tokens": {"d": 0}}, microbatches=3)
    for rows in (7, 9, 8):
        tokens, labels = batch(rows)
        close(run(tokens, labels), model(tokens, labels))


def test_layouts_per_mesh(model, module):
    layouts = {"m0": {"tokens": {"d": 0}, "blocks.0.fc.weight": {"m": 0}}, "m1": {"blocks.0": {"d": 0}, "labels": {}}}
    run = mt.pipeline(module, TOPOLOGY, ["blocks.0"], layouts, microbatches=2)
    tokens, labels = batch(8)
    close(run(tokens, labels), model(tokens, labels))
    with pytest.raises(mt.MeshTensorError, match=r"no stage on mesh 'm1' has the value 'blocks.0.fc'"):
        mt.pipeline(module, TOPOLOGY, ["blocks.0"], {"m1": {"blocks.0.fc": {"d": 0}}})


def test_meshes_run_at_the_same_time(model, module, monkeypatch):
    """The first stage of a microbatch starts while a later stage of the one before is not done."""
    together = threading.Barrier(2, timeout=30)
    from mesh_tensor.api.pipeline import rows as pipeline_rows

    forward = pipeline_rows.Row.forward

    def both(row, here, action):
        if str(action) in ("0F1", "1F0"):
            together.wait()
        forward(row, here, action)

    monkeypatch.setitem(pipeline_rows._ACTIONS, "F", both)
    run = mt.pipeline(module, TOPOLOGY, ["blocks.0"], microbatches=2)
    tokens, labels = batch(8)
    close(run(tokens, labels), model(tokens, labels))


class Skips(nn.Module):
    """Values go over several stages, several go at once, and a mask is used by all."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        mask = (x > 0).float()
        one = self.a(x)
        two = self.b(one * mask)
        three = self.c(two) + one * mask - one
        return three, {"both": (one + two, mask)}


@pytest.mark.parametrize("schedule", ["forward", mt.Schedule.of(["0F0 0F1", "1F0 1F1", "2F0 2F1"])])
def test_values_that_go_over_stages_and_results_of_several(schedule):
    model, x = Skips(), torch.randn(6, 6)
    module = mt.from_torch(torch.export.export(model, (torch.randn(3, 6),)))
    topology = {"m0": {"x": 2}, "m1": {"x": 1}, "m2": {"y": 2}}
    stages = {"m0": ["a"], "m1": ["b"], "m2": ["c"]}
    run = mt.pipeline(module, topology, stages, {"x": {"x": 0}}, microbatches=2, schedule=schedule)
    assert set(run.stages[2].takes.values()) == {0, 1}
    three, both = run(x)[0], run(x)[1:]
    wanted = model(x)
    close(three, wanted[0])
    for got, value in zip(torch.utils._pytree.tree_leaves(both), wanted[1]["both"], strict=True):
        close(got, value)


def test_what_needs_weights_alone_is_computed_where_it_is_used(module):
    """Transposed weights and constants don't cross: each stage has its own."""
    run = mt.pipeline(module, TOPOLOGY, ["embed"])
    assert list(run.stages[1].takes) == ["lv"]


def test_tied_weights_are_on_both_meshes():
    model = Net(tied=True)
    module = imported(model, 4)
    run = mt.pipeline(module, TOPOLOGY, ["blocks.1"], {"embed.weight": {"m": 0}}, microbatches=2)
    tied = [name for name in run.stages[0].params if name in run.stages[1].params]
    assert tied == [module.names["embed.weight"]]
    tokens, labels = batch(8)
    close(run(tokens, labels), model(tokens, labels))


@relax.expr_functor.mutator
class PP(relax.PyExprMutator):
    """Annotates the first operand of every call of mlp for the next mesh."""

    def __init__(self, mod: ir.IRModule):
        super().__init__()
        self.mod = mod
        self.dev_iter = it.cycle(mod.global_infos["mesh"])

    def visit_call_(self, call):
        call = self.visit_expr_post_order(call)
        if isinstance(call.op, ir.GlobalVar) and call.op.name_hint == "mlp":
            sharded = relax.op.distributed.annotate_sharding(
                call.args[0], device_mesh=next(self.dev_iter), placement=Placement.from_text("R")
            )
            return relax.Call(call.op, [sharded, *call.args[1:]], call.attrs, call.sinfo_args, call.span)
        return call


def test_a_module_annotated_for_two_meshes_runs_on_both():
    mod = NESTED.clone()
    mod["main"] = PP(mod).visit_expr(mod["main"])
    x, *weights = (torch.randn(128, 128) / 8 for _ in range(5))
    run = mt.pipeline(mod, weights=dict(zip("ABCD", weights, strict=True)))
    assert run.topology == mt.Topology({"mesh0": {"axis0": 1}, "mesh1": {"axis0": 1}})
    assert [(stage.mesh, stage.params) for stage in run.stages] == [("mesh0", ("x", "A", "B")), ("mesh1", ("C", "D"))]
    assert all("mlp" in [var.name_hint for var in stage.module.get_global_vars()] for stage in run.stages)
    a, b, c, d = weights
    close(run(x), torch.relu(torch.relu(x @ a) @ b @ c) @ d)


@pytest.mark.parametrize("count", [2, 4])
def test_a_number_of_stages_is_cut_where_they_cost_alike(model, module, count):
    run = mt.pipeline(module, TOPOLOGY, count, {"tokens": {"d": 0}}, microbatches=2, machine="h100x16")
    assert [stage.mesh for stage in run.stages] == ["m0", "m1"] * (count // 2)
    tokens, labels = batch(8)
    close(run(tokens, labels), model(tokens, labels))
