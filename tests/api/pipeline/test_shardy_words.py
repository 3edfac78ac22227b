"""Shardy's words for several meshes, a test for each row of the table in docs/pipelines.md, in its order."""

import re
from functools import reduce
from pathlib import Path

import pytest
import torch
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.pipelining import SCHEDULES
from tests.api.pipeline.models import Net, chain, chain_loss, imported

op = relax.op
MESHES = {"m0": {"d": 2}, "m1": {"d": 3}}
TESTED: dict[str, object] = {}


def row(words):
    """A test of the table's row that begins so."""

    def kept(test):
        TESTED[words] = test
        return test

    return kept


@pytest.fixture(scope="module")
def chained():
    torch.manual_seed(0)
    return chain()


@pytest.fixture(scope="module")
def run(chained):
    module, weights = chained
    stages = {"layer0": ("m0", 0), "layer1": ("m0", 0), "layer3": ("m1", 1)}
    run = mt.pipeline(module, MESHES, stages, {"x": {"d": 0}}, microbatches=2, train=True, schedule="zb-h1")
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    torch.testing.assert_close(run(x, y), chain_loss(weights, x, y))
    return run


@row("`mpmd.named_computation`")
def test_named_computations():
    module = imported(Net(), 2)
    run = mt.pipeline(module, MESHES, {"m0": ["embed", "blocks.0"], "m1": ["blocks.1", "head"]}, train=True)
    text = run.explain()
    assert "stage 0 is of embed, blocks.0; transpose count 0 in F, 1 in B" in text
    assert "stage 1 is of blocks.1, blocks.2, head; transpose count 0 in F, 1 in B" in text


@row("`mpmd.named_tensor`")
def test_named_tensors(run):
    assert [stage.mesh for stage in run.stages] == ["m0", "m1"]
    assert run.stages[0].gives == ("layer1",)


@row("`mpmd.assign`, `mpmd.unassign`")
def test_assigned_values_come_and_go_whole(chained):
    module, weights = chained
    run = mt.pipeline(module, MESHES, {"layer0": "m0", "layer3": "m1"}, {"x": {"d": 0}})
    x, y = torch.randn(3, 6), torch.randn(3, 6)
    loss = run(x, y)
    assert type(loss) is torch.Tensor
    torch.testing.assert_close(loss, chain_loss(weights, x, y))


@row("`mpmd.fragment`")
def test_fragments(run):
    for here, kinds in zip(run.fragments, ("FIW", "FIW"), strict=True):
        assert set(here.fragments) <= set(kinds)
        assert all(layout.mesh == here.mesh for layout in here.fragments["F"].layouts.values())
    assert run.fragments[0].layouts["x"].placements()["d"] == mt.Shard(0)


@row("`mpmd.fragment_call`")
def test_fragments_that_are_alike_are_one(run):
    module, _ = chain(layers=5)
    run = mt.pipeline(module, {f"m{i}": {"d": 2} for i in range(4)}, ["layer0", "layer1", "layer2"])
    first, second = (here.fragments["F"].module.plan for here in run.fragments[1:3])
    assert first is second


@row("`mpmd.transfer`")
def test_transfers():
    x = torch.randn(5, 4)
    there = mt.transfer(mt.distribute(x, {"d": 2}, {"d": 0}), {"m": 3}, {"m": 1})
    assert there.mesh == mt.Mesh({"m": 3})
    assert torch.equal(there.full(), x)


def several(*outputs, count=3):
    """A function of `x` whose value of each of `count` meshes is a tanh of it, with bindings of these."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorStructInfo((4, 3), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            made = [builder.emit(op.tanh(op.multiply(x, relax.const(float(i + 1)))), f"part{i}") for i in range(count)]
            results = [builder.emit_output(builder.normalize(make(made)), f"out{i}") for i, make in enumerate(outputs)]
        builder.emit_func_output(results[0] if len(results) == 1 else relax.Tuple(results))
    return builder.get()


@row("`mpmd.broadcast`")
def test_a_value_that_several_meshes_take():
    mod = several(lambda parts: op.add(parts[0], parts[1]), lambda parts: op.multiply(parts[0], parts[2]))
    run = mt.pipeline(
        mod,
        {"m0": {"d": 1}, "m1": {"d": 2}, "m2": {"d": 3}},
        {"part0": "m0", "part1": "m1", "out0": "m1", "part2": "m2", "out1": "m2"},
    )
    assert all(stage.takes == {"part0": 0} for stage in run.stages[1:])
    x = torch.randn(4, 3)
    one, two, three = (torch.tanh(x * n) for n in (1, 2, 3))
    torch.testing.assert_close(run(x), (one + two, one * three))


REDUCED = {
    "add": (op.add, torch.add),
    "max": (op.maximum, torch.maximum),
    "min": (op.minimum, torch.minimum),
    "mul": (op.multiply, torch.mul),
    "or": (op.logical_or, torch.logical_or),
    "and": (op.logical_and, torch.logical_and),
}


@row("`mpmd.reduce`")
@pytest.mark.parametrize("reduction", REDUCED)
def test_what_meshes_reduce(reduction):
    make, by_torch = REDUCED[reduction]
    is_bool = reduction in ("or", "and")

    def operand(part):
        return op.greater(part, relax.const(0.1)) if is_bool else part

    mod = several(lambda parts: reduce(make, map(operand, parts)))
    meshes, x = {"m0": {"d": 1}, "m1": {"d": 2}, "m2": {"d": 3}, "m3": {"d": 2}}, torch.randn(4, 3)
    parts = [torch.tanh(x * n) for n in (1, 2, 3)]
    wanted = reduce(by_torch, [part > 0.1 if is_bool else part for part in parts])
    for place in ("m2", "m3"):  # with the last operand, or where it is used, as Shardy has it
        places = {"part0": "m0", "part1": "m1", "part2": "m2", "out0": place}
        run = mt.pipeline(mod, {mesh: meshes[mesh] for mesh in meshes if mesh <= place}, places, {"x": {"d": 0}})
        assert run.stages[-1].mesh == place
        torch.testing.assert_close(run(x), wanted)


class Towers(torch.nn.Module):
    """A tower for every mesh, whose values are reduced: of floats themselves, else where they are large."""

    def __init__(self, reduction):
        super().__init__()
        torch.manual_seed(0)
        self.towers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))
        self.head, self.reduction = torch.nn.Linear(6, 1), reduction

    def forward(self, x):
        """(n, 6) -> a number."""
        parts = [torch.tanh(tower(x)) for tower in self.towers]
        if self.reduction in ("or", "and"):
            found = reduce(REDUCED[self.reduction][1], [part > 0.1 for part in parts])
            made = torch.where(found, parts[0] + parts[1], parts[2])
        elif self.reduction in REDUCED:
            made = reduce(REDUCED[self.reduction][1], parts)
        else:
            made = getattr(torch.stack(parts), self.reduction)(0)
        return self.head(made).square().mean()


@row("`mpmd.reduce`")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("reduction", [*REDUCED, "sum", "mean", "prod", "amax", "amin"])
def test_training_through_what_meshes_reduce(reduction, schedule):
    """By operators of two, or of a stack of all."""
    model, x = Towers(reduction), torch.randn(12, 6)
    module = mt.from_torch(torch.export.export(model, (x[:3],)))
    meshes = {"m0": {"d": 1}, "m1": {"d": 2}, "m2": {"d": 3}}
    places = {"towers.0": "m0", "towers.1": "m1", "towers.2": "m2", "head": "m2"}
    run = mt.pipeline(module, meshes, places, {"x": {"d": 0}}, microbatches=4, train=True, schedule=schedule)
    loss = model(x)
    loss.backward()
    torch.testing.assert_close(run(x), loss.detach())
    gradients = run.gradients()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(gradients[module.names[name]], weight.grad, rtol=1e-4, atol=1e-6, msg=name)


@row("`mpmd.for`")
def test_the_loop_over_microbatches(run):
    assert run.schedule.num_microbatches == 2
    forwards = [action.microbatch for action in run.schedule.rows[0] if action.kind == "F"]
    assert forwards == [0, 1]


@row("`mpmd.call`")
def test_calls_of_functions_on_two_meshes():
    builder = relax.BlockBuilder()
    inner, x = (relax.Var(name, relax.TensorStructInfo((4, 3), "float32")) for name in ("v", "x"))
    with builder.function("twice", [inner], private=True):
        builder.emit_func_output(builder.emit(op.tanh(op.add(inner, inner))))
    twice = builder.get().get_global_var("twice")
    with builder.function("main", [x]):
        with builder.dataflow():
            first = builder.emit(relax.Call(twice, [x]), "first")
            second = builder.emit_output(relax.Call(twice, [first]), "second")
        builder.emit_func_output(second)
    run = mt.pipeline(builder.get(), MESHES, {"first": "m0", "second": "m1"}, {"x": {"d": 0}})
    assert all("twice" in str(stage.module) for stage in run.stages)
    x = torch.randn(4, 3)
    torch.testing.assert_close(run(x), torch.tanh(2 * torch.tanh(2 * x)))


@row("`mpmd.return`")
def test_what_stages_return(run):
    assert [stage.gives for stage in run.stages] == [("layer1",), ("loss",)]
    assert run.stages[1].results == ("loss",)


@row("topology, named mesh")
def test_topologies():
    topology = mt.Topology(MESHES)
    assert list(topology) == ["m0", "m1"]
    assert topology["m1"] == mt.Mesh({"d": 3})
    assert topology.num_devices == 5


@row("mesh tensor type")
def test_tensors_of_a_mesh():
    x = mt.distribute(torch.randn(4, 4), mt.Topology(MESHES)["m0"], {"d": 1})
    assert x.mesh == mt.Mesh({"d": 2})
    assert x.sharding == mt.Sharding.make({"d": 2}, 2, {"d": 1})


@row("origin, user origin")
def test_origins(run):
    assert "stage 0 is of layer1; transpose count 0 in F, 1 in W" in run.explain()
    assert "stage 1 is of loss; transpose count 0 in F, 1 in I and W" in run.explain()


def test_a_submodule_that_is_cut_is_no_origin():
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)), torch.nn.Tanh())
    module = mt.from_torch(torch.export.export(model, (torch.randn(2, 3),)))
    text = mt.pipeline(module, MESHES, ["0.0"]).explain()
    assert "stage 0 is of 0.0;" in text
    assert "stage 1 is of 0.1, 1;" in text


@row("reduction type")
@pytest.mark.parametrize(("reduction", "by_torch"), [("sum", torch.sum), ("max", torch.amax), ("min", torch.amin)])
def test_partial_sums_and_the_like(reduction, by_torch):
    parts = torch.randn(2, 4)
    layout = mt.Sharding.make(mt.Mesh({"d": 2}), 1, partial={"d": reduction})
    there = mt.transfer(mt.MeshTensor(list(parts), (4,), layout), {"m": 3}, {"m": 0})
    torch.testing.assert_close(there.full(), by_torch(parts, 0))


@row("propagation direction, edge node type")
@pytest.mark.parametrize("stated", ["x", "layer1"])
def test_layouts_spread_from_operands_and_from_results(chained, stated):
    run = mt.pipeline(chained[0], MESHES, {"layer1": "m0", "layer3": "m1"}, {"m0": {stated: {"d": 0}}}, train=True)
    assert {str(run.fragments[0].layouts[name]) for name in ("x", "layer1")} == {"S[0]"}


@row("memory kind")
def test_memory_kinds(chained):
    stages = {"layer1": "m0@pinned_host", "layer3": "m1"}
    run = mt.pipeline(chained[0], MESHES, stages, train=True, memory={"w0": "pinned_host"})
    assert {run.memory["w0"], run.memory["layer1"]} == {"pinned_host"}
    assert "'w0' in memory of kind 'pinned_host'" in run.explain()


@row("schedule `ParallelPipelinesWithWrapAround`")
def test_parallel_pipelines_are_a_test_of_their_own():
    from tests.api.pipeline import test_schedules

    assert "ParallelPipelinesWithWrapAround" in Path(test_schedules.__file__).read_text()


@row("schedules `1F1B`")
@pytest.mark.parametrize(
    "name", ["1F1B", "GPipe", "Circular", "ZeroBubbleH1", "ZeroBubbleH2", "GPipeBut1F1BForLastMesh"]
)
def test_names_of_schedules(name):
    schedule = mt.Schedule.named(name, meshes=3, microbatches=4)
    assert schedule.num_meshes == 3
    assert schedule.name in SCHEDULES


def test_every_row_of_the_table_has_a_test():
    page = (Path(__file__).parents[3] / "docs" / "pipelines.md").read_text().partition("## In Shardy's words")[2]
    rows = re.findall(r"^\| (.+?) \| .+ \|$", page, re.MULTILINE)[1:]
    untested = [words for words in rows if not any(words.startswith(tested) for tested in TESTED)]
    assert not untested
    assert len(rows) == len(TESTED)
    seed = "assign broadcast call for fragment fragment_call named_computation named_tensor reduce return transfer"
    assert all(f"`mpmd.{word}`" in page for word in [*seed.split(), "unassign"])
