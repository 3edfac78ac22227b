"""A schedule as a picture: a row per mesh, time from left to right. In a terminal, or as SVG."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from .clock import Costs, Event, Timeline, timeline
from .dependencies import Takes
from .schedule import Schedule

_UNITS: Mapping[str, float] = {"F": 1, "B": 2, "I": 1, "W": 1}
_COLORS = {"F": "#7aa6dc", "B": "#8fc98f", "I": "#8fc98f", "W": "#e5b567"}
_ANSI = {"F": 44, "B": 42, "I": 42, "W": 43}
_ROW, _LEFT, _SVG_UNIT = 28, 70, 22  # pixels: a row, the names of meshes, the shortest action


def terminal(
    schedule: Schedule,
    costs: Costs = _UNITS,
    *,
    color: bool = False,
    width: int | None = None,
    takes: Takes | None = None,
) -> str:
    """The schedule as text: a cell per action, dots where a mesh idles.

    `width` is how many characters the whole may take; without it, the shortest action has room for its label.
    """
    times = timeline(schedule, costs, takes=takes)
    labels = {event: _label(schedule, event) for row in times.rows for event in row}
    if width is None:
        scale = max((len(text) + 1) / float(e.end - e.start) for e, text in labels.items() if e.end > e.start)
    else:
        scale = width / float(times.makespan)
    names = [f"mesh {mesh}" for mesh in range(schedule.num_meshes)]
    lines = [_line(row, labels, scale, round(scale * float(times.makespan)), color) for row in times.rows]
    return "\n".join(f"{name:<8}{line}".rstrip() for name, line in zip(names, lines, strict=True))


def _line(row: tuple[Event, ...], labels: Mapping[Event, str], scale: float, width: int, color: bool) -> str:
    cells, at = [], 0
    for event in row:
        start, end = round(scale * float(event.start)), round(scale * float(event.end))
        text = labels[event][: end - start].ljust(end - start)
        cells.append("." * (start - at) + (f"\033[{_ANSI[event.action.kind]};30m{text}\033[0m" if color else text))
        at = end
    return "".join(cells) + "." * (width - at)


def svg(schedule: Schedule, costs: Costs = _UNITS, times: Timeline | None = None) -> str:
    """The schedule as SVG: F blue, B and I green, W yellow, later stages of a mesh paler; titles say the times."""
    times = times or timeline(schedule, costs)
    shortest = min((float(e.end - e.start) for row in times.rows for e in row if e.end > e.start), default=1.0)
    scale = _SVG_UNIT / shortest
    width, height = _LEFT + scale * float(times.makespan) + 10, _ROW * schedule.num_meshes + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'font-family="sans-serif" font-size="10">',
        f"<title>{escape(schedule.name)}</title>",
    ]
    for mesh, row in enumerate(times.rows):
        top = 5 + _ROW * mesh
        parts.append(f'<text x="5" y="{top + 17}" font-size="12">mesh {mesh}</text>')
        parts += [_box(schedule, event, top, scale) for event in row]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(schedule: Schedule, event: Event, top: int, scale: float) -> str:
    left, wide = _LEFT + scale * float(event.start), scale * float(event.end - event.start)
    chunk = sorted(s for s, mesh in schedule.mesh_of.items() if mesh == event.mesh).index(event.action.stage)
    opacity = max(0.3, 1 - 0.35 * chunk)
    title = f"{event.action}: {event.action.name} of stage {event.action.stage}, microbatch {event.action.microbatch}"
    title += f", {float(event.start):g} to {float(event.end):g}"
    return (
        f'<g><title>{title}</title><rect x="{left:.1f}" y="{top}" width="{wide:.1f}" height="{_ROW - 4}" '
        f'fill="{_COLORS[event.action.kind]}" fill-opacity="{opacity:.2f}" stroke="white"/>'
        f'<text x="{left + wide / 2:.1f}" y="{top + 16}" text-anchor="middle">{event.action.microbatch}</text></g>'
    )


def _label(schedule: Schedule, event: Event) -> str:
    action = event.action
    several = schedule.num_stages > schedule.num_meshes
    return str(action) if several else f"{action.kind}{action.microbatch}"
