"""Searches over ways to train: what is found runs and is right, its numbers are those of what runs, it goes on."""

import math
import random
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from kernels.models import gpt2
from mesh_tensor.api import model_pieces, search_training
from mesh_tensor.api.pipeline import planned
from mesh_tensor.api.search_training import in_full
from mesh_tensor.api.split_pieces import layouts_over_data
from mesh_tensor.base.machine import Link, Memory
from mesh_tensor.searching.choices import Choice
from mesh_tensor.searching.pieces import Composer, Estimate

CPU = mt.Machine.preset("cpu")
FAST = mt.Machine("fast links", {"float32": 1e9}, (Memory(10**9, 1e12),), (Link("wire", None, rate=1e11, start=1e-9),))


class Loss(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.model = gpt2.build(gpt2.Config(64, 32, 4, layers, 4, 8))

    def forward(self, x, y):
        logits = self.model(x)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


def exported(layers):
    torch.manual_seed(0)
    model, rows = Loss(layers), torch.export.Dim("rows", min=1, max=64)
    example = torch.randint(64, (4, 8)), torch.randint(64, (4, 8))
    program = torch.export.export(model, example, dynamic_shapes={"x": {0: rows}, "y": {0: rows}})
    return model, mt.from_torch(program, check=False)


def batch():
    return torch.randint(64, (8, 8)), torch.randint(64, (8, 8))


@pytest.fixture(scope="module")
def gpt():
    return exported(4)


@pytest.fixture(scope="module")
def found(gpt):
    return mt.search(gpt[1], 4, CPU, batch=8, finalists=1)


def test_what_is_found_trains_as_the_model_does(gpt, found):
    model, module = gpt
    x, y = batch()
    model.zero_grad()
    wanted = model(x, y)
    wanted.backward()
    kinds = {(p.choice.zero, p.choice.meshes, p.choice.sequence): p for p in reversed(found.plans)}
    for plan in random.Random(0).sample(list(kinds.values()), 4):
        run = found.pipeline(plan, target="c")
        torch.testing.assert_close(run(x, y), wanted.detach(), rtol=1e-5, atol=1e-5)
        gradients = run.gradients()
        for name, weight in model.named_parameters():
            torch.testing.assert_close(gradients[module.names[name]], weight.grad, rtol=1e-4, atol=1e-5)


def test_the_best_is_planned_in_full_and_its_numbers_are_those_of_its_pipeline(found):
    best = found.best
    assert best.in_full
    run = found.pipeline(target="c")
    run(*batch())
    made = mt.simulate(run, CPU)
    update = best.time - made.time
    assert 0 <= update < best.time / 4
    assert made.peak_bytes < best.memory


def test_zero_1_updates_parts_and_keeps_states_for_them(found):
    plan = next(p for p in found.plans if p.choice.zero == 1 and p.choice.model == 2)
    data, weights, kept = batch(), [], []

    def momentum(weight, gradient, state):
        state["momentum"] = 0.9 * state["momentum"] + gradient if "momentum" in state else gradient
        elements.append(math.prod(gradient.sharding.tile_shape(tuple(gradient.shape))))
        return weight - 0.1 * state["momentum"]

    for rule in (momentum, found.rule(momentum, plan)):
        run, elements = found.pipeline(plan, target="c"), []
        for _ in range(2):
            run(*data)
            run.update(rule)
        weights.append(run.weights())
        kept.append(sum(elements))
    for name, whole in weights[0].items():
        torch.testing.assert_close(weights[1][name], whole, rtol=1e-5, atol=1e-6)
    assert plan.choice.data == 2
    assert kept[0] / 2 <= kept[1] < 0.52 * kept[0]  # biases that are split over the model axis have no other dim


def test_pieces_say_what_planning_in_full_says(found):
    composer = Composer(CPU, 2)
    plain = [p for p in found.plans if not p.choice.recompute and not p.choice.sequence]
    for split in (False, True):
        for plan in random.Random(1).sample([p for p in plain if (p.choice.zero == 3) == split], 4):
            full = in_full(replace(plan, in_full=False), found.pieces, composer, 8)
            assert plan.time == pytest.approx(full.time, rel=0.15)
            assert plan.memory == pytest.approx(full.memory, rel=0.15)


def test_rows_of_a_module_are_shared_by_devices_of_the_data_axis():
    """Pieces of a module for four rows were priced as if every device computed all of them."""
    program = torch.export.export(Loss(2), (torch.randint(64, (4, 8)), torch.randint(64, (4, 8))))
    few = {"model": [1], "schedules": ["1f1b"], "recompute": [False], "zero": [0, 3]}
    found = mt.search(mt.from_torch(program, check=False), 4, FAST, batch=8, finalists=0, **few)
    plans = [plan for plan in found.plans if plan.choice.data == 4]
    assert [plan.choice.rows(8) for plan in plans] == [1, 1]
    for plan in plans:
        full = in_full(plan, found.pieces, Composer(FAST, 2), 8)
        assert plan.time == pytest.approx(full.time, rel=0.15)


def test_weights_are_split_over_the_data_axis_where_heads_are_not():
    """Twelve heads can't be shared by eight devices: such weights stayed whole."""
    weights = {"query": (768, 768), "out": (768, 768), "narrow": (4, 96), "bias": (768,), "table": (50000, 768)}
    model = {"query": {"model": 0}, "out": {"model": 1}, "bias": {"model": 0}}
    split = layouts_over_data(weights, model, 8)
    assert split == {
        "query": {"data": 1},
        "out": {"data": 0},
        "narrow": {"data": 1},
        "bias": {},
        "table": {"data": 0},
    }


def test_finalists_are_not_all_of_what_pieces_leave_most_out_of(monkeypatch):
    """Planned in full, ZeRO-3 takes twice what it was put together to: so the second one is the fastest without it."""
    plans = [Estimate(Choice(zero=zero), time, 1, ()) for zero, time in ((3, 1.0), (3, 1.1), (0, 1.2), (3, 0.1))]
    made = [replace(each, time=each.time * (2 if each.choice.zero else 1), in_full=True) for each in plans]
    monkeypatch.setattr(search_training, "in_full", lambda plan, *_: made[plans.index(plan)])
    options = SimpleNamespace(finalists=2, limit=1, objective="time")
    assert search_training._in_full(plans[:3], None, None, 1, options, math.inf) == [made[0], made[2], plans[1]]
    assert search_training._in_full([plans[0], plans[3]], None, None, 1, options, math.inf) == [made[3], made[0]]


def test_layers_go_where_least_is_done_beside_them(found):
    for plan in found.plans:
        assert sum(plan.layers) == 4
        assert len(plan.layers) == plan.choice.stages


def test_the_code_makes_the_same_pipeline(gpt, found):
    names = {"mt": mt, "module": gpt[1]}
    exec(found.code(), names)  # what a user would paste
    data, other = batch(), found.pipeline()
    torch.testing.assert_close(names["run"](*data), other(*data), rtol=0, atol=0)
    assert names["run"].explain(CPU) == other.explain(CPU)


def test_stages_on_the_meshes_of_a_topology(gpt):
    few = {"microbatches": [2], "schedules": ["1f1b"], "zero": [0], "recompute": [False], "sequence": [False]}
    found = mt.search(gpt[1], mt.Topology({"a": {"x": 2}, "b": {"x": 2}}), CPU, batch=8, finalists=1, **few)
    assert {str(plan.choice) for plan in found.plans} == {"D2 H1 P2 K2 1f1b", "D1 H2 P2 K2 1f1b"}
    data = batch()
    first = found.run(*data)
    torch.testing.assert_close(first, gpt[0](*data).detach(), rtol=1e-5, atol=1e-5)
    (run, _), *others = found._runs.values()
    assert run.topology.names == ("a", "b")
    found.run(*data)
    assert list(found._runs.values()) == [(run, {}), *others]  # made once
    cheap = mt.search(gpt[1], 4, CPU, batch=8, objective="cost", finalists=1, **few)
    assert {plan.choice.devices for plan in cheap.plans} == {1, 2, 4}
    assert cheap.best.time * cheap.best.choice.devices == min(p.time * p.choice.devices for p in cheap.plans)


def test_halves_of_backwards(gpt):
    """Schedules that run them apart are searched, say what planning in full says, and train right."""
    model, module = gpt
    x, y = batch()
    model.zero_grad()
    wanted = model(x, y)
    wanted.backward()
    few = {"model": [1], "zero": [0], "microbatches": [2, 4], "recompute": [False]}
    found = mt.search(module, 4, CPU, batch=8, finalists=0, schedules=["1f1b", "zb-h1", "zb-h2", "zbv"], **few)
    times = {(p.choice.schedule, p.choice.microbatches): p for p in reversed(found.plans) if p.choice.meshes == 4}
    assert times["zb-h1", 4].time < times["1f1b", 4].time
    plans = [times["zb-h1", 4], next(p for p in found.plans if p.choice.schedule == "zbv")]
    for plan in plans:
        full = in_full(plan, found.pieces, Composer(CPU, 2), 8)
        assert plan.time == pytest.approx(full.time, rel=0.25)
        assert plan.memory == pytest.approx(full.memory, rel=0.3)
        run = found.pipeline(plan, target="c")
        torch.testing.assert_close(run(x, y), wanted.detach(), rtol=1e-5, atol=1e-5)
        gradients = run.gradients()
        for name, weight in model.named_parameters():
            torch.testing.assert_close(gradients[module.names[name]], weight.grad, rtol=1e-4, atol=1e-5)


def test_stages_on_meshes_of_different_sizes(gpt):
    """Three devices: a stage on two of them is better than three stages, or three devices in one; and it trains."""
    model, module = gpt
    few = {"zero": [0, 3], "sequence": [False], "recompute": [False]}
    found = mt.search(module, 3, FAST, batch=8, finalists=1, uneven=True, **few)
    even = mt.search(module, 3, FAST, batch=8, finalists=0, **few)
    assert found.best.choice.parts
    assert found.best.choice.devices == 3
    assert found.best.time < even.best.time
    x, y = batch()
    model.zero_grad()
    wanted = model(x, y)
    wanted.backward()
    names = {"mt": mt, "module": module, "machine": FAST}
    exec(found.code(), names)  # what a user would paste
    run = names["run"]
    torch.testing.assert_close(run(x, y), wanted.detach(), rtol=1e-5, atol=1e-5)
    gradients = run.gradients()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(gradients[module.names[name]], weight.grad, rtol=1e-4, atol=1e-5)
    assert {str(p.choice) for p in even.plans} < {str(p.choice) for p in found.plans}


def test_deeper_models_take_no_more_planning(gpt):
    few = {
        "microbatches": [2],
        "model": [1, 2],
        "schedules": ["1f1b"],
        "zero": [0],
        "recompute": [False],
        "sequence": [False],
    }
    shallow, deep = (mt.search(module, 4, FAST, batch=8, finalists=0, **few) for module in (gpt[1], exported(8)[1]))
    assert shallow.pieces.planned == deep.pieces.planned
    alike = {plan.choice: plan for plan in deep.plans}
    for plan in shallow.plans:
        assert plan.time < alike[plan.choice].time < 2 * plan.time


def test_it_goes_on_from_what_was_saved(gpt, found, tmp_path):
    found.save(tmp_path / "found.json")
    again = mt.search(gpt[1], 4, CPU, batch=8, finalists=1, known=tmp_path / "found.json")
    assert again.plans == found.plans
    assert again.pieces.planned == 0


def test_memory_comes_first(gpt, found):
    few = {"model": [1], "zero": [0], "schedules": ["1f1b"]}
    sizes = sorted(plan.memory for plan in found.plans if plan.choice.model == 1 and not plan.choice.zero)
    limit = sizes[len(sizes) // 3]
    held = mt.search(gpt[1], 4, CPU, batch=8, memory_limit=limit, finalists=1, **few)
    assert held.best.memory <= limit
    assert held.too_large > 0
    least = mt.search(gpt[1], 4, CPU, batch=8, objective="memory", finalists=0, **few)
    assert least.best.memory == min(plan.memory for plan in least.plans)


def test_the_front_and_its_picture(found):
    front = found.pareto()
    assert all(a.time < b.time and a.memory > b.memory for a, b in zip(front, front[1:], strict=False))
    assert not any(p.time < each.time and p.memory < each.memory for p in found.plans for each in front)
    assert "o" in found.picture()
    assert str(found).count("\n") == 11
    assert "; planned in full: the first 1, and put together of pieces: the others\n" in str(found)


def test_stages_that_compute_alike_are_planned_once(monkeypatch):
    few = {"zero": [0], "recompute": [False], "sequence": [False], "model": [1], "schedules": ["1f1b"]}
    found = mt.search(exported(8)[1], 4, CPU, batch=8, finalists=0, microbatches=[4], **few)
    plan = next(p for p in found.plans if p.choice.meshes == 4 and p.layers[1] == p.layers[2])
    laid_out, one = [], model_pieces.training_fragments

    def counted(stage, *rest):
        laid_out.append(stage.index)
        return one(stage, *rest)

    monkeypatch.setattr(model_pieces, "training_fragments", counted)
    made = found.simulation(plan)
    assert laid_out == [0, 1, 3]
    monkeypatch.setattr(planned, "_equal", lambda *_: False)  # each is planned for itself
    each = found.simulation(plan)
    assert laid_out == [0, 1, 3, 0, 1, 2, 3]
    assert (made.time, made.peaks, made.transfers, made.endings) == (
        each.time, each.peaks, each.transfers, each.endings,
    )  # fmt: skip
    assert {key: sim.time for key, sim in made.fragments.items()} == {k: sim.time for k, sim in each.fragments.items()}


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_leaves_what_was_found_so_far_to_run_and_to_go_on_from(gpt, found, tmp_path):
    _, module = gpt
    at = 5

    def stop(done, _):
        if done == at:
            signal.raise_signal(signal.SIGINT)

    part = mt.search(module, 4, CPU, batch=8, finalists=1, progress=stop)
    assert {plan.choice for plan in part.plans} < {plan.choice for plan in found.plans}
    assert 0 < len(part.plans) < at
    assert part.plans[0].in_full
    assert torch.isfinite(part.run(*batch()))
    part.save(tmp_path / "part.json")
    again = mt.search(module, 4, CPU, batch=8, finalists=1, known=tmp_path / "part.json")
    assert [plan.choice for plan in again.plans] == [plan.choice for plan in found.plans]
