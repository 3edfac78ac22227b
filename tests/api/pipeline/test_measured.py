"""Measured times of a call: the rows of the schedule, as a timeline, a picture and a trace."""

import json
import xml.etree.ElementTree as xml

import pytest
import torch

import mesh_tensor as mt
from mesh_tensor.api.pipeline.explain import svg
from tests.api.pipeline.models import chain
from tests.refusals import refusal

TOPOLOGY = {"m0": {"d": 2}, "m1": {"d": 3}}
CUTS = {"1f1b": ["layer1"], "interleaved": ["layer0", "layer1", "layer2"], "zb-h1": ["layer1"], "forward": ["layer1"]}


def made(schedule):
    module, _ = chain()
    train = schedule != "forward"
    return mt.pipeline(module, TOPOLOGY, CUTS[schedule], microbatches=4, schedule=schedule, train=train)


@pytest.mark.parametrize("schedule", CUTS)
def test_rows_are_those_of_the_schedule(schedule, tmp_path):
    run = made(schedule)
    for _ in range(2):
        run(torch.randn(12, 6), torch.randn(12, 6))
    times, trace = run.timeline(), run.trace(tmp_path / "trace.json")
    assert [[event.action for event in row] for row in times.rows] == [list(row) for row in run.schedule.rows]
    for row in times.rows:
        ends = [at for event in row for at in (event.start, event.end)]
        assert ends == sorted(ends)
    assert min(row[0].start for row in times.rows) == 0
    assert 0 < times.bubble < 1
    assert json.loads((tmp_path / "trace.json").read_text()) == trace
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] != "gradients"]
    assert [(bar["pid"], bar["name"]) for bar in bars] == [
        (mesh, str(action)) for mesh, row in enumerate(run.schedule.rows) for action in row
    ]
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names == {0: "m0", 1: "m1"}
    boxes = xml.fromstring(svg(run.schedule, times=times)).findall(".//{http://www.w3.org/2000/svg}rect")
    assert len(boxes) == len(bars)


def test_an_action_begins_when_what_it_takes_is_there():
    run = made("1f1b")
    run(torch.randn(12, 6), torch.randn(12, 6))
    starts = {event.action: event.start for row in run.timeline().rows for event in row}
    for action, start in starts.items():
        if action.stage == 1 and action.kind == "F":
            assert start >= starts[action._replace(stage=0)]
        if action.stage == 0 and action.kind == "B":
            assert start >= starts[action._replace(stage=1)]


def test_bytes_are_those_that_are_held():
    run = made("1f1b")
    run(torch.randn(12, 6), torch.randn(12, 6))
    for mesh, name in enumerate(run.topology):
        events = [event for event in run.trace()["traceEvents"] if event["ph"] == "C" and event["pid"] == mesh]
        assert max(event["args"]["bytes"] for event in events) == run.peak_bytes[name]
        assert events[-1]["args"]["bytes"] == 0


def test_without_a_call_there_are_none():
    run = made("1f1b")
    assert "there are no times of a call" in refusal(run.trace)
    run(torch.randn(12, 6), torch.randn(12, 6))
    refusal(run, torch.randn(11, 6), torch.randn(12, 6))
    assert "call the pipeline first" in refusal(run.timeline)
