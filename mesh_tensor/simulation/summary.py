"""A Simulation as text: its table, and what would change it; and in the format of Chrome's tracing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesh_tensor.base.decisions import columns

if TYPE_CHECKING:
    from .simulate import Simulation, StepTime


import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .simulate import Simulation


@dataclass(frozen=True)
class Group:
    """Steps of one kind: how many, their seconds in all and on the critical path, what most of that is for, and the
    seconds that everything would take without them."""

    kind: str
    stream: str
    count: int
    seconds: float
    critical: float
    bound: str
    flops: int
    nbytes: int
    without: float


def groups(
    steps: Sequence[StepTime], path: Sequence[StepTime], time: float, without: Callable[[Iterable[str]], float]
) -> list[Group]:
    """The steps by kind; those first without which everything would be over soonest."""
    by_kind: dict[str, list[StepTime]] = defaultdict(list)
    for step in steps:
        by_kind[step.kind].append(step)
    critical: dict[str, float] = defaultdict(float)
    for step in path:
        critical[step.kind] += step.end - step.start
    found = [_group(kind, alike, critical[kind], without) for kind, alike in by_kind.items()]
    return sorted(found, key=lambda group: (group.without, -group.seconds))


def _group(kind: str, steps: Sequence[StepTime], critical: float, without: Callable[[Iterable[str]], float]) -> Group:
    by_bound: dict[str, float] = defaultdict(float)
    for step in steps:
        by_bound[step.bound] += step.end - step.start
    return Group(
        kind,
        steps[0].stream,
        len(steps),
        sum(by_bound.values()),
        critical,
        max(by_bound, key=by_bound.__getitem__),
        sum(step.flops for step in steps),
        sum(step.nbytes for step in steps),
        without((kind,)),
    )


def table(simulation: Simulation) -> str:
    """Time and memory, then a line per kind of step."""
    made, machine = simulation, simulation.machine
    memory = f"{in_bytes(made.peak_bytes)} of {in_bytes(machine.main_memory.size)}"
    waiting = f"{made.exposed:.0%} waiting for collectives"
    head = [
        f"{made.program.name} on {made.program.mesh}, machine {machine.name}",
        f"  time {in_seconds(made.time)}: {in_seconds(made.computing)} computing, {waiting}",
        f"  memory {memory} per device{'' if made.fits else ': more than there is'}",
    ]
    rows = [("steps", "times", "takes", "of the critical path", "bound by", "flops", "bytes", "without them")]
    for group in made.groups():
        share = f"{group.critical / made.time:.0%}" if made.time else "-"
        rows.append(
            (group.kind, str(group.count), in_seconds(group.seconds), share, group.bound)
            + (f"{group.flops:,}", f"{group.nbytes:,}", in_seconds(group.without))
        )
    return "\n".join([*head, *columns(rows)])


_WAYS_OUT = {
    "flops": "split it over more devices, or compute it in a dtype with a higher rate",
    "memory": "fuse it with what makes or uses its tensors, take a smaller dtype, or split it further",
    "start": "give each call more to do: larger tiles, fewer microbatches, fused operators",
}
_LATENCY = "join its collectives into fewer and larger ones, or replicate what is small"


def why(dearest: Sequence[Group], simulation: Simulation) -> str:
    """A paragraph per group."""
    made = simulation
    lines = [f"{in_seconds(made.time)}, of which {made.exposed:.0%} waiting for collectives"]
    for number, group in enumerate(dearest, 1):
        share = group.critical / made.time if made.time else 0.0
        lines.append(
            f"{number}. {group.kind}: {group.count} x, {in_seconds(group.seconds)}, {share:.0%} of the critical path; "
            f"bound by {group.bound}. If it took no time: {in_seconds(group.without)}."
        )
        lines.append(f"   To change that: {_way_out(group, made)}.")
    return "\n".join(lines)


def _way_out(group: Group, simulation: Simulation) -> str:
    links = [link.name for link in simulation.machine.links]
    if group.stream in links:
        if group.bound == "start":
            return _LATENCY
        inner = links.index(group.stream)
        closer = f"make its axis a later one of the mesh, inside {links[inner - 1]}; " if inner else ""
        hidden = "start it earlier, beside what computes" if group.critical else "nothing: it is hidden already"
        return f"{closer}{hidden}; send a smaller dtype, or choose a layout that needs less of it"
    return _WAYS_OUT[group.bound]


def in_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def in_bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:.0f} B"


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
