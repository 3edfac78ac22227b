"""A PipelineSimulation as text: its table, and what would change it; in Chrome's format; and as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh_tensor.pipelining.clock import Event

from .summary import CURVE, LEFT, ROW, WIDTH, in_bytes, in_seconds, label, left_out_lines, named, rect, way_out, written

if TYPE_CHECKING:
    from .pipelines import PipelineSimulation

SENT, REDUCED = "transfers", "reductions"  # what steps are called that are no actions
_KINDS = "FBIW"


@dataclass(frozen=True)
class ActionGroup:
    """Actions of a stage and kind ("0F"), what goes from mesh to mesh, or reductions of gradients: how many, their
    seconds in all and on the critical path, and the seconds that everything would take without them."""

    kind: str
    count: int
    seconds: float
    critical: float
    without: float


def action_groups(simulation: PipelineSimulation) -> list[ActionGroup]:
    """Those first without which everything would be over soonest."""
    made, found = simulation, dict[str, list[float]]()
    for row in made.timeline.rows:
        for event in row:
            found.setdefault(f"{event.action.stage}{event.action.kind}", []).append(event.end - event.start)
    path, critical = made.critical_path, dict[str, float]()
    taken = [made.given(event, later.mesh) for event, later in pairwise(path)] + [event.end for event in path[-1:]]
    for event, end in zip(path, taken, strict=True):
        kind = f"{event.action.stage}{event.action.kind}"
        critical[kind] = critical.get(kind, 0.0) + end - event.start
    both = 1 + made.schedule.has_backward
    if sent := [each for each in made.transfers.values() if each]:
        found[SENT] = sent * made.schedule.num_microbatches * both
        critical[SENT] = sum(later.start - end for end, later in zip(taken, path[1:], strict=False))
    if reduced := [each for each in made.endings if each]:
        found[REDUCED] = reduced
        critical[REDUCED] = made.time - (path[-1].end if path else 0.0)
    groups = [
        ActionGroup(kind, len(times), sum(times), critical.get(kind, 0.0), made.without((kind,)))
        for kind, times in found.items()
    ]
    return sorted(groups, key=lambda group: (group.without, -group.seconds))


def pipeline_why(simulation: PipelineSimulation, most: int) -> str:
    """A paragraph per group, and what the bubble takes."""
    made = simulation
    lines = [
        f"{in_seconds(made.time)}, of which {made.bubble:.0%} of the meshes' time is bubble, and {made.exposed:.0%} "
        "waiting for collectives"
    ]
    for number, group in enumerate(made.groups()[:most], 1):
        share = group.critical / made.time if made.time else 0.0
        lines.append(
            f"{number}. {group.kind}: {group.count} x, {in_seconds(group.seconds)}, {share:.0%} of the critical path. "
            f"If it took no time: {in_seconds(group.without)}."
        )
        lines.append(f"   To change that: {_way_out(group, made)}.")
    if made.bubble:
        busy = [made.timeline.busy(mesh) for mesh in range(len(made.meshes))]
        lines.append(f"Bubble: {made.bubble:.0%}. To change that: {_less_bubble(made, busy)}.")
    return "\n".join(lines)


def _way_out(group: ActionGroup, simulation: PipelineSimulation) -> str:
    made = simulation
    if group.kind == SENT:
        return "cut the model where less goes on, or make meshes neighbours on a faster link"
    if group.kind == REDUCED:
        return "fewer devices along the axes that the batch is split over, or ZeRO, which sends half of it"
    run = next((each for (stage, kind), each in made.fragments.items() if f"{stage}{kind}" == group.kind), None)
    if run is None or not (dearest := run.groups()[:1]):
        return "fewer actions: fewer stages, or fewer microbatches"
    (step,) = dearest
    return f"most of it is {step.kind} ({in_seconds(step.seconds)}, bound by {step.bound}): {way_out(step, run)}"


def _less_bubble(simulation: PipelineSimulation, busy: Sequence[float]) -> str:
    made, mean = simulation, sum(busy) / len(busy)
    slowest = max(range(len(busy)), key=busy.__getitem__)
    if busy[slowest] > 1.2 * mean:
        return f"move layers away from mesh {made.meshes[slowest]}, which works {busy[slowest] / mean:.1f} x the mean"
    return "more microbatches, or a schedule with less of it (interleaved, zb-h1)"


def pipeline_table(simulation: PipelineSimulation) -> str:
    """Time, shares and memory, then a line per fragment and way between stages."""
    made = simulation
    lines = [
        f"{made.schedule.name} on {', '.join(made.meshes)}, machine {made.machine.name}",
        f"  time {in_seconds(made.time)}, bubble {made.bubble:.1%}, {made.exposed:.1%} waiting for collectives, "
        f"{in_bytes(made.peak_bytes)} per device{'' if made.fits else ': more than there is'}",
    ]
    for (stage, kind), run in made.fragments.items():
        early = made.rest.get((stage, kind))
        words = f", {in_seconds(early)} of it after what others wait for" if early else ""
        lines.append(f"  {stage}{kind}  {in_seconds(run.time)}, {in_bytes(run.peak_bytes)} per device{words}")
    for (source, target), seconds in made.transfers.items():
        lines.append(f"  from stage {source} to {target}  {in_seconds(seconds)}")
    return "\n".join([*lines, *left_out_lines(made.left_out)])


@dataclass(frozen=True)
class DeviceRow:
    """What a device of a mesh does in seconds: its actions, from when to when it does what follows them, and the bytes
    that it holds from each action on, and at last."""

    mesh: str
    device: int
    events: tuple[Event, ...]
    ending: tuple[float, float]
    held: Sequence[int]


def pipeline_trace(simulation: PipelineSimulation, path: str | Path | None) -> dict[str, Any]:
    """Of the first device of each mesh."""
    made = simulation
    rows = zip(made.meshes, made.timeline.rows, made.timeline.endings, made.held, strict=True)
    devices = [DeviceRow(name, 0, row, ending, held) for name, row, ending, held in rows]
    return chrome_trace(devices, {"machine": made.machine.name}, path)


def chrome_trace(rows: Sequence[DeviceRow], about: dict[str, Any], path: str | Path | None) -> dict[str, Any]:
    """A process per mesh, a thread per device, an event per action in microseconds, and a counter of the bytes that a
    device holds; in Chrome's format, written to `path` if there is one."""
    events, meshes = list[dict[str, Any]](), list(dict.fromkeys(row.mesh for row in rows))
    for row in rows:
        place = {"pid": meshes.index(row.mesh), "tid": row.device}
        if row.device == 0:
            events.append(named("process_name", 0, row.mesh) | place)
        for event, nbytes in zip(row.events, row.held, strict=False):
            events.append(_bar(place, str(event.action), event.action.name, event.start, event.end))
            events.append(_memory(place, event.start, nbytes))
        start, end = row.ending
        if end > start:
            events.append(_bar(place, REDUCED, "gradients", start, end))
        events.append(_memory(place, start, row.held[-1]))
    made = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    if path is not None:
        Path(path).write_text(json.dumps(made), encoding="utf-8")
    return made


def _bar(place: dict[str, int], name: str, category: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, **place, "ts": start * 1e6, "dur": (end - start) * 1e6}


def _memory(place: dict[str, int], start: float, nbytes: int) -> dict[str, Any]:
    name = f"memory of device {place['tid']}" if place["tid"] else "memory"
    return {"ph": "C", "name": name, "pid": place["pid"], "ts": start * 1e6, "args": {"bytes": nbytes}}


def pipeline_page(simulation: PipelineSimulation, path: str | Path | None) -> str:
    """The page: a row per mesh, a bar per action, which it names; and below, what a device of each mesh holds."""
    made, drawn = simulation, list[str]()
    scale = (WIDTH - LEFT) / made.time if made.time else 0.0
    top, highest = len(made.meshes) * ROW, max(1, made.peak_bytes)
    for number, (name, row, held) in enumerate(zip(made.meshes, made.timeline.rows, made.held, strict=True)):
        drawn.append(label(name, number * ROW + 20))
        for event in row:
            words = f"{event.action}: {(event.end - event.start) * 1e6:.1f} us"
            kind = _KINDS.index(event.action.kind)
            drawn.append(rect(words, event.start, event.end, number * ROW, scale, kind))
        start, end = made.timeline.endings[number]
        if end > start:
            words = f"{REDUCED}: {(end - start) * 1e6:.1f} us"
            drawn.append(rect(words, start, end, number * ROW, scale, len(_KINDS)))
        floor = top + (number + 1) * CURVE
        spans = [(event.start, event.end) for event in row] + [(start, made.time)]
        points = [
            f"{LEFT + at * scale:.1f},{floor - nbytes / highest * (CURVE - 20):.1f}"
            for span, nbytes in zip(spans, held, strict=True)
            for at in span
        ]
        drawn.append(label(f"{name}: {in_bytes(max(held))}", floor - CURVE + 34))
        drawn.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="#333"/>')
    height = top + len(made.meshes) * CURVE + 10
    return written(made.schedule.name, "", "".join(drawn), height, (pipeline_table(made), made.why()), path)
