"""Searches: at least as good as what people write, the same every time, and what is found runs."""

import dataclasses
import itertools
import json
import math
import signal
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from tvm import relax

import mesh_tensor as mt
from kernels.models import gpt2, mlp
from mesh_tensor.base.machine import Link, Machine, Memory
from mesh_tensor.searching.evaluate import Evaluator
from mesh_tensor.searching.named_dims import layouts_of
from tests.plan.loop_modules import LOOPS, looped
from tests.plan.test_manual import manual_module

# Products are dear, and links are fast enough to split them.
FAST = Machine("fast", {"float32": 1e9}, (Memory(10**9, 1e12),), (Link("wire", None, rate=1e9, start=1e-7),))
SLOW_LINKS = Machine("slow links", {"float32": 1e12}, (Memory(10**9, 1e11),), (Link("wire", None, 1e3, start=1.0),))


@pytest.fixture(scope="module")
def perceptron():
    return mt.from_torch(torch.export.export(mlp.build(), mlp.example_inputs()), check=False)


@pytest.fixture(scope="module")
def gpt():
    model = gpt2.build(gpt2.Config(layers=1))
    return mt.from_torch(torch.export.export(model, (torch.zeros(4, 8, dtype=torch.int64),)), check=False)


def presets(module, mesh, layouts):
    run = mt.distribute_module(module.mod, mesh, layouts, weights=module.params)
    return mt.simulate(run, FAST)


def test_no_worse_than_what_people_write(gpt):
    found = mt.search(gpt, 4, FAST, meshes=[{"x": 4}])
    for layouts in (gpt2.data_parallel("x"), gpt2.tensor_parallel(gpt2.Config(layers=1), "x"), {}):
        assert found.best.time <= presets(gpt, {"x": 4}, layouts).time * (1 + 1e-9)


def test_brute_force_agrees_on_a_small_space(perceptron):
    """All layouts of the three parameters on one axis."""
    found = mt.search(perceptron, 2, FAST, meshes=[{"x": 2}])
    names = ("x", "weight1", "weight2")
    times = []
    for dims in itertools.product((None, 0, 1), repeat=3):
        layouts = {name: {"x": dim} for name, dim in zip(names, dims, strict=True) if dim is not None}
        times.append(presets(perceptron, {"x": 2}, layouts).time)
    assert found.best.time == pytest.approx(min(times))


def test_all_colourings_of_few_dims_are_looked_at():
    """A beam of four ended 56 bytes above the least, after two steps that gave nothing better."""

    class Added(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(16, 24), torch.nn.Linear(24, 16)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(x)))

    module = mt.from_torch(torch.export.export(Added(), (torch.randn(8, 16),)), check=False)
    mesh = mt.Mesh({"x": 2, "y": 2})
    found = mt.search(module, mesh, FAST, objective="memory")
    evaluator, places = Evaluator(module.mod, "main", FAST), list(itertools.product(range(len(found.dims)), mesh))
    every = itertools.chain.from_iterable(itertools.combinations(places, n) for n in range(len(places) + 1))
    all_ways = [evaluator.strategy(mesh, layouts_of(found.dims, frozenset(each))) for each in every]
    assert found.best.memory == min(each.memory for each in all_ways if each is not None) == 1688


def test_what_is_found_is_what_is_simulated_and_it_runs(perceptron):
    found = mt.search(perceptron, 4, FAST)
    x = mlp.example_inputs()[0]
    whole = mt.distribute_module(perceptron.mod, {"x": 1}, weights=perceptron.params)(x)
    for strategy in found.strategies[:3]:
        run = found.distribute(strategy)
        made = mt.simulate(run, FAST)
        assert made.time == pytest.approx(strategy.time)
        assert made.peak_bytes == strategy.memory
        torch.testing.assert_close(run(x), whole, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.run(x, strategy=strategy), whole, rtol=1e-4, atol=1e-4)


def test_cost_is_time_by_devices_of_which_fewer_may_do(perceptron):
    """Where links are slow, nothing is won by a second device."""
    found = mt.search(perceptron, 4, replace(SLOW_LINKS, price=3.6), objective="cost", width=1)
    assert {strategy.mesh.num_devices for strategy in found.strategies} == {1, 2, 4}
    costs = [strategy.time * strategy.mesh.num_devices for strategy in found.strategies]
    assert costs[0] == min(costs)
    assert found.best.mesh.num_devices == 1
    assert "cost of 1000" in str(found)
    assert f"{found.best.time:.4g}" in str(found)  # 3.6 per hour, a thousand times: as many as seconds


def test_a_mesh_is_laid_out_as_it_is_and_a_bar_says_how_far_it_is(perceptron, capsys):
    found = mt.search(perceptron, mt.Mesh({"a": 2, "b": 2}), FAST, progress=True)
    assert {strategy.mesh for strategy in found.strategies} == {mt.Mesh({"a": 2, "b": 2})}
    assert capsys.readouterr().err.endswith("] 1 of 1\n")


def test_the_code_says_the_same(perceptron):
    found = mt.search(perceptron, 4, FAST)
    names = {"mt": mt, "mod": perceptron.mod}
    exec(found.code(), names)  # what a user would paste
    run = mt.distribute_module(names["mod"], weights=perceptron.params, machine=FAST)
    assert mt.simulate(run, FAST).time == pytest.approx(found.best.time)


def test_the_code_names_the_machine(perceptron):
    named, made = (mt.search(perceptron, 2, machine, meshes=[{"x": 2}], width=1) for machine in ("h100x2", FAST))
    assert named.code().endswith("# run = mt.distribute_module(mod, machine='h100x2', weights=...)")
    assert made.code().endswith("machine=machine, weights=...)")


def test_the_same_every_time(gpt):
    first, again = (mt.search(gpt, 2, FAST, width=2, meshes=[{"x": 2}]) for _ in range(2))
    assert first.strategies == again.strategies
    assert first.planned == again.planned == len(first.strategies)


def test_it_goes_on_from_what_was_saved(perceptron, tmp_path):
    found = mt.search(perceptron, 4, FAST, width=2)
    found.save(tmp_path / "found.json")
    again = mt.search(perceptron, 4, FAST, width=2, known=tmp_path / "found.json")
    assert again.strategies == found.strategies
    assert again.planned == 0 < found.planned
    with pytest.raises(mt.MeshTensorError, match=r"is of another search[\s\S]*other 'machine'"):
        mt.search(perceptron, 4, SLOW_LINKS, known=tmp_path / "found.json")
    (tmp_path / "found.json").write_text("[]")
    with pytest.raises(mt.MeshTensorError, match="holds no search"):
        mt.search(perceptron, 4, FAST, known=tmp_path / "found.json")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("time", math.nan, "time is nan"),
        ("memory", math.inf, "memory is inf"),
        ("layouts", [["x", [["nowhere", 0]]]], "'x' can't lie as {'nowhere': 0}"),
        ("layouts", [["x", [["x", 9]]]], "'x' can't lie as {'x': 9}"),
    ],
)
def test_what_was_saved_is_broken(perceptron, tmp_path, name, value, message):
    found = mt.search(perceptron, 4, FAST, width=1, meshes=[{"x": 4}])
    found.save(tmp_path / "found.json")
    made = json.loads((tmp_path / "found.json").read_text())
    (tmp_path / "found.json").write_text(json.dumps({**made, "strategies": [{**made["strategies"][0], name: value}]}))
    with pytest.raises(mt.MeshTensorError, match=f"holds no search: {message}"):
        mt.search(perceptron, 4, FAST, known=tmp_path / "found.json")


def test_where_links_are_slow_nothing_is_sent(gpt):
    assert mt.search(gpt, 4, SLOW_LINKS, meshes=[{"x": 2, "y": 2}], width=1).best.received == 0


def test_memory_counts_where_it_is_short(perceptron):
    free = mt.search(perceptron, 4, SLOW_LINKS)
    least = mt.search(perceptron, 4, SLOW_LINKS, objective="memory").best
    assert least.memory == min(strategy.memory for strategy in free.strategies)
    assert least.memory < free.best.memory
    limited = mt.search(perceptron, 4, SLOW_LINKS, memory_limit=free.best.memory - 1)
    assert limited.best.memory < free.best.memory
    assert limited.best.time > free.best.time


def test_the_front_trades_time_for_memory(gpt):
    front = mt.search(gpt, 4, FAST, meshes=[{"x": 4}]).pareto()
    assert front == sorted(front, key=lambda strategy: strategy.time)
    assert [s.memory for s in front] == sorted((s.memory for s in front), reverse=True)


def test_the_table(perceptron):
    found = mt.search(perceptron, 4, FAST)
    lines = str(found).splitlines()
    assert lines[0] == f"{len(found.strategies)} strategies on fast"
    assert lines[2].split()[:2] == ["{'x':", "4}"] or "'y'" in lines[2]
    assert len(lines) == 12


def ctrl_c(at):
    """Progress that is stopped when so many were looked at."""
    return lambda done, _: signal.raise_signal(signal.SIGINT) if done == at else None


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_leaves_what_was_found_so_far_to_run_and_to_go_on_from(perceptron, tmp_path):
    meshes = [{"x": 2}, {"x": 4}, {"x": 2, "y": 2}]
    whole = mt.search(perceptron, 4, FAST, meshes=meshes)
    part = mt.search(perceptron, 4, FAST, meshes=meshes, progress=ctrl_c(1))
    assert {strategy.mesh for strategy in part.strategies} == {mt.Mesh({"x": 2})}
    assert set(map(str, part.strategies)) == {str(s) for s in whole.strategies if s.mesh == mt.Mesh({"x": 2})}
    assert part.pareto()
    x = mlp.example_inputs()[0]
    expected = mt.distribute_module(perceptron.mod, {"x": 1}, weights=perceptron.params)(x)
    torch.testing.assert_close(part.run(x), expected, rtol=1e-4, atol=1e-4)
    part.save(tmp_path / "part.json")
    again = mt.search(perceptron, 4, FAST, meshes=meshes, known=tmp_path / "part.json", progress=ctrl_c(2))
    assert {strategy.mesh for strategy in again.strategies} == {mt.Mesh({"x": 2}), mt.Mesh({"x": 4})}
    again.save(tmp_path / "part.json")
    rest = mt.search(perceptron, 4, FAST, meshes=meshes, known=tmp_path / "part.json")
    assert [str(s) for s in rest.strategies] == [str(s) for s in whole.strategies]
    assert rest.planned + again.planned + part.planned == whole.planned
    other = mt.search(perceptron, 4, FAST, meshes=meshes[1:2], known=tmp_path / "part.json")
    assert {strategy.mesh for strategy in other.strategies} == {mt.Mesh({"x": 4})}


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_before_anything_was_found_ends_the_search(perceptron, monkeypatch):
    stop = ctrl_c(1)
    monkeypatch.setattr(Evaluator, "strategy", lambda *_: stop(1, 1))
    with pytest.raises(KeyboardInterrupt):
        mt.search(perceptron, 4, FAST)


@pytest.mark.parametrize("name", ["recurrent", "summed"])
def test_loops_are_planned_as_they_run(name):
    """Once, not step by step, however many steps there are."""
    found = mt.search(looped(LOOPS[name], 4), 2, "h100x2")
    assert found.simulation().time == pytest.approx(found.best.time)
    assert found.simulation().peak_bytes == found.best.memory


@pytest.mark.parametrize("level", [0, 3])
def test_a_step_of_training_is_searched_with_all_of_its_state(level):
    """What its optimizer keeps, too; what is found trains as one device does, and is what was simulated."""
    model, loss = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)), F.mse_loss
    batch = torch.randn(8, 8), torch.randn(8, 8)
    step = mt.training_step(model, loss, batch, optimizer="adamw")
    found = mt.search(dataclasses.replace(step, zero=level), 4, "h100", objective="memory", meshes=[{"x": 4}])
    assert found.best.memory < found.simulation(found.strategies[-1]).peak_bytes / 2
    assert (found.simulation().time, found.simulation().peak_bytes) == (found.best.time, found.best.memory)
    names = {"dataclasses": dataclasses, "mt": mt, "step": step}
    exec(found.code(), names)
    runs = found.distribute(), mt.distribute_module(names["step"], {"x": 4}), mt.distribute_module(step, {"x": 1})
    losses = [[run(*batch) for _ in range(3)] for run in runs]
    torch.testing.assert_close(losses[0], losses[2])
    torch.testing.assert_close(losses[1], losses[2])
    with pytest.raises(mt.MeshTensorError, match="a step of training with a batch"):
        mt.search(step, 4, batch=8)


def test_manual_computations_keep_their_axes():
    """A product with a sum over an axis of its own: searched on it and one more, it runs right, and as simulated."""

    def summed(emit, x, w):
        return emit(mt.comm.all_reduce(emit(relax.op.matmul(x, w)), {"m": 2}))

    mod = manual_module(summed, [(8, 16), (16, 4)], {"m": 2}, [{"m": 1}, {"m": 0}], {})
    found = mt.search(mod, 4, "h100x4")
    assert {tuple(each.mesh.shape) for each in found.strategies} == {("data", "m"), ("m", "data")}
    x, w = torch.randn(8, 16), torch.randn(16, 4)
    for strategy in found.strategies[:3]:
        torch.testing.assert_close(found.run(x, w, strategy=strategy), x @ w, rtol=1e-4, atol=1e-4)
        assert strategy.time == pytest.approx(found.simulation(strategy).time)
    with pytest.raises(mt.MeshTensorError, match="over 'm', which are not searched exactly"):
        found.over_exact()
