"""Stages that cost alike."""

import dataclasses
import itertools
import random

import pytest

from mesh_tensor import MeshTensorError
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.pipelining.balance import _cut, balanced_stages
from mesh_tensor.pipelining.flow import Flow
from tests.api.pipeline.models import chain


def test_the_dearest_stage_is_the_cheapest_that_can_be():
    draw = random.Random(0)
    for _ in range(200):
        n = draw.randint(2, 8)
        seconds = [draw.randint(0, 9) for _ in range(n)]
        crossing = {place: draw.randint(0, 3) for place in range(1, n) if draw.random() < 0.8}
        count = draw.randint(1, 1 + len(crossing))

        def dearest(ends, seconds=seconds, crossing=crossing):
            starts = [0, *ends]
            stages = zip(starts, [*ends, len(seconds)], strict=True)
            return max(sum(seconds[a:b]) + crossing.get(a, 0) + crossing.get(b, 0) for a, b in stages)

        best = min(dearest(ends) for ends in itertools.combinations(crossing, count - 1))
        assert dearest(_cut(seconds, crossing, count)) == best


def test_alike_layers_are_divided_evenly():
    flow = Flow(chain(layers=6, width=64)[0].mod, "main")
    machine = dataclasses.replace(Machine.preset("h100x16"), links=())  # what goes over costs nothing
    stages = balanced_stages(flow, 3, ["x", "y"], machine)
    products = [sum("layer" in name for name in stage.names) for stage in stages]
    assert len(stages) == 3
    assert max(products) - min(products) <= 1
    assert [name for stage in stages for name in stage.names] == list(flow.bindings)


def test_what_crosses_costs_both_sides():
    """However dear it is beside what is computed, two stages are alike."""
    flow = Flow(chain(layers=6)[0].mod, "main")
    stages = balanced_stages(flow, 2, ["x", "y"], CPU)
    assert [sum("layer" in name for name in stage.names) for stage in stages] == [3, 3]


def test_more_stages_than_places_to_cut():
    flow = Flow(chain(layers=2)[0].mod, "main")
    with pytest.raises(MeshTensorError, match=r"20 stages of a function that can be cut in \d places"):
        balanced_stages(flow, 20, ["x", "y"], Machine.preset("h100x16"))
