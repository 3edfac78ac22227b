"""Pipelines: closed forms of their bubbles, transfers, and what training simulates as."""

import json
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor.base.machine import Link, Machine, Memory, Roofline
from tests.api.pipeline.models import Net, imported

# What links do costs nothing, unless it is said.
FREE = Machine("free links", {"float32": 1e9}, (Memory(10**9, 1e9),), (Link("wire", None, rate=1e30, start=0.0),))


@pytest.fixture(scope="module")
def module():
    return imported(Net(), 4)


def simulated(module, machine=FREE, microbatches=4, train=False, **options):
    topology = {"m0": {"d": 2}, "m1": {"d": 2}}
    run = mt.pipeline(module, topology, ["blocks.1"], microbatches=microbatches, train=train, **options)
    return mt.simulate(run, machine)


@pytest.mark.parametrize("microbatches", [1, 4, 9])
def test_forwards_take_as_long_as_the_slower_stage_but_for_filling(module, microbatches):
    made = simulated(module, microbatches=microbatches)
    first, second = made.fragments[0, "F"].time, made.fragments[1, "F"].time
    assert made.time == pytest.approx(first + second + (microbatches - 1) * max(first, second))
    idle = 1 - microbatches * (first + second) / (2 * made.time)
    assert made.bubble == pytest.approx(idle)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_training_has_the_bubble_of_its_schedule(module, schedule):
    """With p meshes that take equally long it is (p - 1) / (m + p - 1); here the slower one counts."""
    made = simulated(module, microbatches=8, train=True, schedule=schedule)
    each = [made.fragments[stage, "F"].time + made.fragments[stage, "B"].time for stage in (0, 1)]
    assert made.time >= 8 * max(each)
    assert made.time <= 9 * max(each) + sum(each)
    alike = float(Fraction(1, 9))
    assert made.bubble >= alike * 0.9


def test_transfers_take_their_links_time(module):
    slow = replace(FREE, links=(Link("wire", None, rate=1e30, start=1.0),))
    made = simulated(module, slow, microbatches=1)
    assert made.transfers == {(0, 1): pytest.approx(1.0)}
    assert made.time == pytest.approx(made.fragments[0, "F"].time + 1.0 + made.fragments[1, "F"].time)


def test_meshes_in_one_node_send_over_the_link_inside(module):
    """Nodes of four devices: two meshes of two lie in the first one, the third in the second."""
    links = Link("inside", 4, rate=1e30, start=1.0), Link("between", None, rate=1e30, start=10.0)
    topology = {f"m{number}": {"d": 2} for number in range(3)}
    run = mt.pipeline(module, topology, ["blocks.0", "blocks.2"], microbatches=1)
    assert mt.simulate(run, replace(FREE, links=links)).transfers == {(0, 1): 1.0, (1, 2): 10.0}


def test_every_action_takes_what_it_takes_beside_its_fragment(module):
    """One microbatch goes through forwards and backwards of both stages: four actions, one after the other."""
    plain, slow = (simulated(module, replace(FREE, action=s), 1, train=True) for s in (0.0, 1.0))
    assert slow.time == pytest.approx(plain.time + 4)


@pytest.mark.parametrize("processors", [1, 2, 3])
def test_meshes_that_share_processors_take_turns(module, processors):
    """What runs at a time needs no more processors than there are; on one, everything takes its time."""
    apart, shared = (simulated(module, replace(FREE, processors=n), train=True) for n in (4, processors))
    bars = [bar for bar in shared.trace()["traceEvents"] if bar["ph"] == "X"]
    assert max(bar["ts"] + bar["dur"] for bar in bars) == pytest.approx(shared.time * 1e6)
    for start in {bar["ts"] for bar in bars}:
        running = [bar for bar in bars if bar["ts"] <= start < bar["ts"] + bar["dur"] * (1 - 1e-9)]
        assert len(running) * min(2, processors) <= processors or len(running) == 1
    assert apart.time < shared.time
    assert shared.time == pytest.approx(sum(map(shared.timeline.busy, (0, 1))) + sum(shared.endings))


def test_what_costs_most_and_what_would_change_it(module):
    slow = replace(FREE, links=(Link("wire", None, rate=1e30, start=1e-4),))
    made = simulated(module, slow, microbatches=8, train=True)
    first, *rest = made.groups()
    assert made.without([first.kind]) == first.without <= min(group.without for group in rest)
    assert made.without("transfers") == made.without(["transfers"]) < made.time
    with pytest.raises(mt.MeshTensorError, match="nothing is called '9F'"):
        made.without(["9F"])
    path = made.critical_path
    assert sum(group.critical for group in made.groups()) == pytest.approx(made.time)
    assert path[0].start == 0
    assert path[-1].end + made.endings[path[-1].mesh] == pytest.approx(made.time)
    text = made.why()
    assert f"1. {first.kind}: {first.count} x" in text
    assert "To change that: most of it is" in text
    assert "Bubble: " in text
    assert made.utilisation("float32") * made.time * 1e9 == pytest.approx(made.flops)
    counters = [event for event in made.trace()["traceEvents"] if event["ph"] == "C" and event["pid"] == 0]
    assert max(event["args"]["bytes"] for event in counters) == made.peaks[0]
    assert made.page().count("<polyline") == 2


def test_a_first_microbatch_gradients_are_kept_and_others_added(module):
    """Both pass over memory: what is kept is read and written, what is added reads two and writes one."""
    alone, both = (simulated(module, microbatches=n, train=True, schedule="gpipe") for n in (1, 2))
    (kept,) = [e.end - e.start for e in alone.timeline.rows[1] if e.action.kind == "B"]
    run = both.fragments[1, "B"].time
    first, second = (e.end - e.start for e in both.timeline.rows[1] if e.action.kind == "B")
    assert kept == pytest.approx(first)
    assert first > run
    assert (second - run) / (first - run) == pytest.approx(1.5)


def alone(module, machine=FREE, microbatches=1, devices=1):
    """Training on two meshes of so many devices."""
    topology = {"m0": {"d": devices}, "m1": {"d": devices}}
    run = mt.pipeline(module, topology, ["blocks.1"], microbatches=microbatches, train=True)
    return mt.simulate(run, machine)


def test_gradients_that_another_stage_waits_for_are_on_their_way_before_those_of_weights(module):
    """As ranks do that have a mesh to themselves; devices that share processors, or a mesh, hand on at the end."""
    run = mt.pipeline(module, {"m0": {"d": 1}, "m1": {"d": 1}}, ["blocks.1"], train=True)
    made = mt.simulate(run, FREE)
    (rest,) = made.rest.values()
    _, after = run.fragments[1].fragments["B"].module.around_handing_on()
    backward = made.fragments[1, "B"]
    late = [step for step in backward.steps if any(each is backward.program.steps[step.number] for each in after)]
    assert any(step.kind == "einsum" for step in late)
    assert rest == pytest.approx(sum(step.end - step.start for step in late))
    (forward, backward), (first, last) = made.timeline.rows[1], made.timeline.rows[0]
    handed_on = backward.end - rest - made.beside[1, "B"][0]
    assert (forward.start, backward.start) == (pytest.approx(first.end), pytest.approx(forward.end))
    assert last.start == pytest.approx(handed_on)
    assert backward.start < last.start < backward.end
    assert made.time == pytest.approx(max(last.end, backward.end))
    assert not alone(module, replace(FREE, processors=2)).rest
    assert not alone(module, devices=2).rest
    assert f"{rest * 1e6:.4g} us of it after what others wait for" in str(made)


def test_what_is_handed_on_early_is_on_the_critical_path_until_then(module):
    slow = replace(FREE, links=(Link("wire", None, rate=1e30, start=1e-4),))
    made = alone(module, slow, microbatches=4)
    assert sum(group.critical for group in made.groups()) == pytest.approx(made.time)
    later = replace(made, rest={})
    assert made.time < later.time
    assert sum(group.critical for group in later.groups()) == pytest.approx(later.time)
    assert min(group.critical for group in made.groups()) >= 0


def test_the_trace_and_the_text(module, tmp_path):
    made = simulated(module, microbatches=3)
    trace = made.trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [bar["name"] for bar in bars if bar["pid"] == 0] == ["0F0", "0F1", "0F2"]
    assert max(bar["ts"] + bar["dur"] for bar in bars) == pytest.approx(made.time * 1e6)
    lines = str(made).splitlines()
    assert lines[0] == "forward on m0, m1, machine free links"
    assert lines[2].startswith("  0F  ")
    assert lines[-1].startswith("  from stage 0 to 1  ")


def test_more_devices_than_the_machine_has(module):
    with pytest.raises(mt.MeshTensorError, match="has 4 devices, the machine 2"):
        simulated(module, FREE.with_devices(2))


def test_training_is_simulated_like_any_module():
    x, y = torch.randn(8, 6), torch.randint(5, (8,))
    step = mt.training_step(nn.Linear(6, 5), F.cross_entropy, (x, y), optimizer="sgd", lr=0.1)
    run = mt.distribute_module(step, {"data": 2}, {"input": {"data": 0}})
    run(x, y)
    made = mt.simulate(run, "cpu")
    assert any(step.kind == "all_reduce over data" for step in made.steps)
    assert made.peak_bytes > 0


def test_a_mesh_that_starts_inside_of_a_node_sends_between_nodes(module):
    """Nodes have 4 devices: a mesh of 4 behind one of 2 lies in two of them."""
    nodes = replace(FREE, links=(Link("near", 4, rate=1e30, start=0.0), Link("far", None, rate=1e30, start=1.0)))

    def reduced(first):
        topology = {"m0": {"d": first}, "m1": {"d": 4}}
        layouts = {"tokens": {"d": 0}, "labels": {"d": 0}, "blocks.1": {"d": 0}}
        run = mt.pipeline(module, topology, ["blocks.1"], layouts, microbatches=1, train=True)
        return mt.simulate(run, nodes).endings[1]

    assert reduced(4) < 1e-9
    assert reduced(2) >= 1


def test_values_of_fragments_are_handed_to_them_and_taken_from_them(module):
    """Each tile of what they take and give, one after the other where devices share a processor; and what is kept of
    the first gradients, which devices share here."""
    alone = replace(FREE, processors=1)
    run = mt.pipeline(module, {"m0": {"d": 2}, "m1": {"d": 2}}, ["blocks.1"], microbatches=2, train=True)
    tiles = [2 * (len(each.takes) + len(each.gives)) for here in run.fragments for each in here.fragments.values()]
    longer = mt.simulate(run, replace(alone, value=1.0)).time - mt.simulate(run, alone).time
    kept = sum(len(here.sums["B"]) for here in run.fragments)
    assert longer == pytest.approx(2 * sum(tiles) + kept)
    apart = mt.simulate(run, replace(FREE, value=1.0))
    assert apart.time < longer


def test_fragments_that_share_caches_find_them_full_of_what_others_touched(module):
    """By themselves they would find what they touch in the nearest memory; devices with processors of their own do."""
    near, far = Memory(2**20, 1e9), Memory(2**30, 1e3)
    wide = replace(FREE, memory=(near, far))
    run = mt.pipeline(module, {"m0": {"d": 1}, "m1": {"d": 1}}, ["blocks.1"], train=True)
    touched = sum(
        each.tile_bytes
        for here in run.fragments
        for f in here.fragments.values()
        for each in f.module.program.stored.values()
    )
    some = replace(wide, memory=(replace(near, size=touched - 1), far))
    program = run.fragments[0].fragments["F"].module.program
    by_itself = mt.simulate(program, replace(some, processors=1)).time
    assert mt.simulate(run, some).fragments[0, "F"].time == by_itself
    assert mt.simulate(run, replace(wide, processors=1)).fragments[0, "F"].time == by_itself
    assert mt.simulate(run, replace(some, processors=1)).fragments[0, "F"].time > 10 * by_itself


@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_that_are_added_up_are_held_once(microbatches):
    """Of a layer of many weights, beside them: their gradients' sum, to which each microbatch's is added as it is
    made."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 512, bias=False), nn.Linear(512, 64, bias=False)

        def forward(self, x):
            return self.second(torch.relu(self.first(x))).sum()

    program = mt.from_torch(torch.export.export(Layer(), (torch.zeros(2, 64),)), check=False)
    run = mt.pipeline(program, {"m0": {"d": 1}}, 1, microbatches=microbatches, train=True, reduction="sum")
    weights = 4 * 2 * 64 * 512
    assert 2 * weights < mt.simulate(run, "cpu").peak_bytes < 2.1 * weights


class Normed(nn.Module):
    """A norm between two linear layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5))

    def forward(self, x, y):
        """The loss."""
        return F.cross_entropy(self.layers(x), y)


def test_gradients_run_an_operator_again_that_another_fragment_ran():
    """torch keeps what a norm computed for its gradients in one program; ranks carry it from forward to backward."""
    normed = mt.from_torch(torch.export.export(Normed(), (torch.randn(4, 6), torch.randint(5, (4,)))))
    classes = {"nn.layer_norm": Roofline(start=1.0), "gradient of nn.layer_norm": Roofline(start=10.0)}
    machine = replace(FREE, classes=classes)

    def seconds(processors, **options):
        run = mt.pipeline(normed, {"m": {"d": 1}}, 1, train=True, **options)
        steps = mt.simulate(run, replace(machine, processors=processors)).fragments[0, "B"].steps
        return sum(s.end - s.start for s in steps if s.kind == "gradient of nn.layer_norm")

    assert seconds(None) == pytest.approx(10.0)
    assert seconds(1) == pytest.approx(11.0)
    assert seconds(1, recompute=True) == pytest.approx(10.0)  # the backward runs it itself
    x = {"x": {"d": 0}, "y": {"d": 0}}
    split = mt.distribute_module(mt.gradient(normed), {"d": 2}, x)
    steps = mt.simulate(split, replace(machine, processors=1)).steps  # devices take turns: each runs it again
    assert sum(s.end - s.start for s in steps if s.kind == "gradient of nn.layer_norm") == pytest.approx(22.0)
