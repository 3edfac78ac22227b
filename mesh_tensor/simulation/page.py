"""Simulations as HTML pages: streams or meshes as bars, memory as a curve, the table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from .summary import table

if TYPE_CHECKING:
    from .pipelines import PipelineSimulation
    from .simulate import Simulation, StepTime

_WIDTH, _ROW, _LEFT, _CURVE = 1200, 34, 110, 120
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")
_MOST = 20_000  # bars: of more, the shortest are left out


def page(simulation: Simulation, path: str | Path | None) -> str:
    """The page; bars name their step when they are pointed at."""
    made = simulation
    streams = ["device", *(link.name for link in made.machine.links)]
    top = len(streams) * _ROW
    scale = (_WIDTH - _LEFT) / made.time if made.time else 0.0
    shown = sorted(made.steps, key=lambda step: step.start - step.end)[:_MOST]
    kinds = {group.kind: number for number, group in enumerate(made.groups())}
    critical = {step.number for step in made.critical_path}
    bars = [_bar(step, streams.index(step.stream) * _ROW, scale, kinds[step.kind], critical) for step in shown]
    names = [f'<text x="0" y="{i * _ROW + 20}">{escape(name)}</text>' for i, name in enumerate(streams)]
    left_out = len(made.steps) - len(shown)
    note = f"<p>The shortest {left_out:,} steps are left out.</p>" if left_out else ""
    drawn = "".join([*names, *bars, _curve(made, top + 10, scale)])
    return _written(made.program.name, note, drawn, top + _CURVE + 30, (table(made), made.why()), path)


def pipeline_page(simulation: PipelineSimulation, path: str | Path | None) -> str:
    """The page of a pipeline: a row per mesh, a bar per action, which it names."""
    made = simulation
    scale = (_WIDTH - _LEFT) / made.timeline.makespan if made.timeline.makespan else 0.0
    names = [f'<text x="0" y="{i * _ROW + 20}">{escape(name)}</text>' for i, name in enumerate(made.meshes)]
    bars = []
    for number, row in enumerate(made.timeline.rows):
        for event in row:
            words = f"{event.action}: {(event.end - event.start) * 1e6:.1f} us"
            kind = "FBIW".index(event.action.kind)
            bars.append(_rect(words, event.start, event.end, number * _ROW, scale, kind))
    return _written(made.schedule.name, "", "".join([*names, *bars]), len(names) * _ROW, (str(made),), path)


def _written(title: str, note: str, drawn: str, height: int, texts: Sequence[str], path: str | Path | None) -> str:
    """A page with a drawing and texts; written to `path`, if there is one."""
    text = (
        f"<!doctype html><meta charset='utf-8'><title>{escape(title)}</title>"
        "<style>body{font:14px sans-serif;margin:2em}text{font:12px sans-serif}rect:hover{opacity:.6}"
        f"pre{{background:#f4f4f4;padding:1em;overflow:auto}}</style><h1>{escape(title)}</h1>{note}"
        f'<svg width="{_WIDTH}" height="{height}">{drawn}</svg>'
        + "".join(f"<pre>{escape(each)}</pre>" for each in texts)
        + "\n"
    )
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def _bar(step: StepTime, y: int, scale: float, kind: int, critical: set[int]) -> str:
    words = f"{step.kind}: {(step.end - step.start) * 1e6:.1f} us, bound by {step.bound}, step {step.number}"
    edge = ' stroke="#000" stroke-width="0.5"' if step.number in critical else ""
    return _rect(words, step.start, step.end, y, scale, kind, edge)


def _rect(words: str, start: float, end: float, y: int, scale: float, kind: int, edge: str = "") -> str:
    x, width = _LEFT + start * scale, max(0.3, (end - start) * scale)
    return (
        f'<rect x="{x:.2f}" y="{y + 4}" width="{width:.2f}" height="{_ROW - 8}" '
        f'fill="{_COLOURS[kind % len(_COLOURS)]}"{edge}><title>{escape(words)}</title></rect>'
    )


def _curve(simulation: Simulation, y: int, scale: float) -> str:
    """The bytes held, over time."""
    highest = max(1, simulation.peak_bytes)
    points = []
    for step in sorted(simulation.steps, key=lambda step: step.start):
        height = y + _CURVE - step.held / highest * _CURVE
        points += [f"{_LEFT + step.start * scale:.1f},{height:.1f}", f"{_LEFT + step.end * scale:.1f},{height:.1f}"]
    name = f'<text x="0" y="{y + 14}">memory</text><text x="0" y="{y + 30}">{highest / 2**20:,.1f} MiB</text>'
    return f'{name}<polyline points="{" ".join(points)}" fill="none" stroke="#333"/>'
