"""A Simulation as text: its table, and what would change it; in the format of Chrome's tracing; and as an HTML page."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh_tensor.base.decisions import columns
from mesh_tensor.base.errors import did_you_mean, listing, refuse, shown
from mesh_tensor.base.machine_checks import check_number

if TYPE_CHECKING:
    from .simulate import Simulation, StepTime


class Simulated:
    """What follows of `time`, `flops` and `peak_bytes` on a `machine`."""

    @property
    def fits(self: Any) -> bool:
        """Whether `peak_bytes` fit into the memory of one of the machine's devices."""
        return self.peak_bytes <= self.machine.main_memory.size

    def utilisation(self: Any, dtype: str, flops: float | None = None) -> float:
        """The share of a device's peak on `dtype` ("float16") that is used; `flops` are the operations that
        count, of one device (a model's own, say): all of them if they are left out."""
        count = self.flops if flops is None else flops
        check_number("flops", count, where="utilisation", fix="give the operations of one device: a number from 0 up")
        peak = self.machine.peak(dtype)
        return count / (self.time * peak) if self.time else 0.0

    def per_second(self: Any, count: float) -> float:
        """How many there are per second, of what there are `count` per run or batch (tokens, images)."""
        check_number("count", count, where="per_second", fix="say how many there are in all: a number from 0 up")
        return count / self.time if self.time else 0.0


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
    steps: Sequence[StepTime], path: Sequence[StepTime], without: Callable[[Iterable[str]], float]
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


def named_kinds(kinds: Iterable[str] | str, known: Collection[str]) -> frozenset[str]:
    """What steps are called, one or several; refused where none is called so."""
    given = [kinds] if isinstance(kinds, str) or not isinstance(kinds, Iterable) else list(kinds)
    if missing := [each for each in given if each not in known]:
        refuse(
            [f"nothing is called {shown(each)}{did_you_mean(str(each), known)}" for each in missing],
            where="without",
            why=f"there are {listing(sorted(known))}",
            fix="name what the table has, one or several",
        )
    return frozenset(given)


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
    return "\n".join([*head, *columns(rows), *left_out_lines(made.left_out)])


def left_out_lines(texts: Iterable[str]) -> list[str]:
    """What is not simulated, a line each."""
    return [f"  not simulated: {text}" for text in texts]


def check_count(most: object) -> None:
    """Refuse what is no number of groups."""
    if type(most) is not int or most < 0:
        refuse(f"most is {shown(most)}", where="why", fix="say how many to name, from 0 up: 3 if it is left out")


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
        lines.append(f"   To change that: {way_out(group, made)}.")
    return "\n".join(lines)


def way_out(group: Group, simulation: Simulation) -> str:
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
    events: list[dict[str, Any]] = [named("process_name", 0, f"{made.program.name} on {made.program.mesh}")]
    events += [named("thread_name", thread, name) for thread, name in enumerate(streams)]
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


def named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 0, "tid": thread, "args": {"name": name}}


WIDTH, ROW, LEFT, CURVE = 1200, 34, 110, 120
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")
_MOST = 20_000  # bars: of more, the shortest are left out


def page(simulation: Simulation, path: str | Path | None) -> str:
    """The page; bars name their step when they are pointed at."""
    made = simulation
    streams = ["device", *(link.name for link in made.machine.links)]
    top = len(streams) * ROW
    scale = (WIDTH - LEFT) / made.time if made.time else 0.0
    shown = sorted(made.steps, key=lambda step: step.start - step.end)[:_MOST]
    kinds = {group.kind: number for number, group in enumerate(made.groups())}
    critical = set(made.critical_path)
    bars = [_bar(step, streams.index(step.stream) * ROW, scale, kinds[step.kind], critical) for step in shown]
    names = [label(name, i * ROW + 20) for i, name in enumerate(streams)]
    left_out = len(made.steps) - len(shown)
    note = f"<p>The shortest {left_out:,} steps are left out.</p>" if left_out else ""
    drawn = "".join([*names, *bars, _curve(made, top + 10, scale)])
    return written(made.program.name, note, drawn, top + CURVE + 30, (table(made), made.why()), path)


def written(title: str, note: str, drawn: str, height: int, texts: Sequence[str], path: str | Path | None) -> str:
    """A page with a drawing and texts; written to `path`, if there is one."""
    text = (
        f"<!doctype html><meta charset='utf-8'><title>{escape(title)}</title>"
        "<style>body{font:14px sans-serif;margin:2em}text{font:12px sans-serif}rect:hover{opacity:.6}"
        f"pre{{background:#f4f4f4;padding:1em;overflow:auto}}</style><h1>{escape(title)}</h1>{note}"
        f'<svg width="{WIDTH}" height="{height}">{drawn}</svg>'
        + "".join(f"<pre>{escape(each)}</pre>" for each in texts)
        + "\n"
    )
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def _bar(step: StepTime, y: int, scale: float, kind: int, critical: Collection[StepTime]) -> str:
    words = f"{step.kind}: {(step.end - step.start) * 1e6:.1f} us, bound by {step.bound}, step {step.number}"
    edge = ' stroke="#000" stroke-width="0.5"' if step in critical else ""
    return rect(words, step.start, step.end, y, scale, kind, edge)


def label(words: str, y: float) -> str:
    return f'<text x="0" y="{y}">{escape(words)}</text>'


def rect(words: str, start: float, end: float, y: int, scale: float, kind: int, edge: str = "") -> str:
    x, width = LEFT + start * scale, max(0.3, (end - start) * scale)
    return (
        f'<rect x="{x:.2f}" y="{y + 4}" width="{width:.2f}" height="{ROW - 8}" '
        f'fill="{_COLOURS[kind % len(_COLOURS)]}"{edge}><title>{escape(words)}</title></rect>'
    )


def _curve(simulation: Simulation, y: int, scale: float) -> str:
    """The bytes held, over time."""
    highest = max(1, simulation.peak_bytes)
    points = []
    for step in sorted(simulation.steps, key=lambda step: step.start):
        height = y + CURVE - step.held / highest * CURVE
        points += [f"{LEFT + step.start * scale:.1f},{height:.1f}", f"{LEFT + step.end * scale:.1f},{height:.1f}"]
    name = label("memory", y + 14) + label(f"{highest / 2**20:,.1f} MiB", y + 30)
    return f'{name}<polyline points="{" ".join(points)}" fill="none" stroke="#333"/>'
