"""A Simulation in the format of Chrome's tracing, which Perfetto reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .simulate import Simulation


def trace(simulation: Simulation, path: str | Path | None) -> dict[str, Any]:
    """One process, a thread per stream, an event per step in microseconds, and a counter of the bytes held."""
    made = simulation
    streams = ["device", *(link.name for link in made.machine.links)]
    events: list[dict[str, Any]] = [_named("process_name", 0, f"{made.program.name} on {made.program.mesh}")]
    events += [_named("thread_name", thread, name) for thread, name in enumerate(streams)]
    for step in made.steps:
        arguments = {"step": step.number, "bound": step.bound, "flops": step.flops, "bytes": step.nbytes}
        place = {"pid": 0, "tid": streams.index(step.stream), "ts": step.start * 1e6}
        events.append(
            {"ph": "X", "name": step.kind, "cat": step.bound, **place, "dur": (step.end - step.start) * 1e6}
            | {"args": arguments}
        )
        events.append({"ph": "C", "name": "memory", "pid": 0, "ts": step.start * 1e6, "args": {"bytes": step.held}})
    made_trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"machine": made.machine.name}}
    if path is not None:
        Path(path).write_text(json.dumps(made_trace), encoding="utf-8")
    return made_trace


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 0, "tid": thread, "args": {"name": name}}
