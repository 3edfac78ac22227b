"""explain_pipeline: stages, what they cost and hold, what goes between them, and the schedule, as text for people
and as a picture: a row per mesh, time from left to right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from mesh_tensor.annotations.names import relax_function, source_names
from mesh_tensor.base.decisions import columns
from mesh_tensor.base.topology import Topology
from mesh_tensor.pipelining.check import Held, Takes, peaks
from mesh_tensor.pipelining.clock import Costs, Event, Timeline, timeline
from mesh_tensor.pipelining.fragments import gradient_name
from mesh_tensor.pipelining.schedule import Action, Schedule
from mesh_tensor.pipelining.stages import FUNCTION
from mesh_tensor.redistribution.transfer import TransferPlan
from mesh_tensor.simulation.simulate import simulate
from mesh_tensor.simulation.stages import held_for_backward

from ..fragments import StageFragments

_WIDTH = 100  # characters of a picture


def explain_pipeline(
    topology: Topology,
    schedule: Schedule,
    stages: Sequence[StageFragments],
    takes: Takes,
    machine: object,
    memory: Mapping[str, str],
) -> str:
    """All that was decided; times are those of the fragments on a machine."""
    seconds = {
        (here.stage.index, kind): simulate(fragment.module, machine).time  # type: ignore[arg-type]  # checked there
        for here in stages
        for kind, fragment in here.fragments.items()
    }
    held = {here.stage.index: held_bytes(here) for here in stages}
    sections = [
        [f"pipeline of {len(stages)} stages on {topology}"],
        ["stages", *_stages(stages, seconds, held), *_origins(stages)],
        ["transfers of a microbatch", *_transfers(stages)],
        [
            *_schedule(schedule, seconds, takes),
            *_peaks(topology, schedule, held),
            *_memory(stages, memory),
            *_state(stages),
        ],
    ]
    return "\n\n".join("\n".join(section) for section in sections)


def held_bytes(here: StageFragments) -> Held:
    """The bytes that all of a stage's devices hold of one microbatch for its backward: after F, and after I."""
    one = held_for_backward(here)
    return Held(one.forward * here.mesh.num_devices, (one.weight or 0) * here.mesh.num_devices)


def _stages(
    stages: Sequence[StageFragments], seconds: Mapping[tuple[int, str], float], held: Mapping[int, Held]
) -> list[str]:
    kinds = [kind for kind in "FBIW" if any(kind in here.fragments for here in stages)]
    times = {here.stage.index: sum(seconds.get((here.stage.index, kind), 0.0) for kind in kinds) for here in stages}
    total = sum(times.values()) or 1.0
    rows: list[tuple[str, ...]] = [
        ("stage", "mesh", "weights", *(f"{kind} (us)" for kind in kinds), "share", "held (bytes)", "gives")
    ]
    for here in stages:
        stage = here.stage
        cells = [f"{seconds[stage.index, kind] * 1e6:.1f}" if (stage.index, kind) in seconds else "-" for kind in kinds]
        share, weights = f"{times[stage.index] / total:.0%}", len(set(stage.params) - set(here.inputs))
        held_here = f"{held[stage.index].forward:,}"
        rows.append((str(stage.index), stage.mesh, str(weights), *cells, share, held_here, ", ".join(stage.gives)))
    return columns(rows)


def _origins(stages: Sequence[StageFragments]) -> Iterator[str]:
    """The outermost submodules that each stage computes the whole of, or else those that end there, or the values; and
    how often its fragments are transposed: Shardy's origins."""
    named = [_computed(here) for here in stages]
    for here, names in zip(stages, named, strict=True):
        others = [name for each in named for name in each if name not in names]
        whole = [name for name in names if not any(other.startswith(f"{name}.") for other in others)] or names
        outer = [name for name in whole if not any(name.startswith(f"{other}.") for other in whole)]
        back = " and ".join(kind for kind in "BIW" if kind in here.fragments)
        counts = "transpose count 0 in F" + (f", 1 in {back}" if back else "")
        yield f"  stage {here.stage.index} is of {', '.join(outer or here.stage.gives)}; {counts}"


def _computed(here: StageFragments) -> list[str]:
    """The submodules whose results a stage computes."""
    func = relax_function(here.stage.module, FUNCTION)
    params = {var.name_hint for var in func.params}
    return [theirs for theirs, own in source_names(func).items() if own not in params]


def _transfers(stages: Sequence[StageFragments]) -> list[str]:
    rows: list[tuple[str, ...]] = [("value", "from", "to", "layout there", "bytes", "messages", "spread there")]
    rows += [row for here in stages for row in _received(stages, here)]
    return columns(rows) if len(rows) > 1 else ["  none"]


def _received(stages: Sequence[StageFragments], here: StageFragments) -> Iterator[tuple[str, ...]]:
    for name, source in here.stage.takes.items():
        there = stages[source]
        yield _row(name, there, here)
        if gradient_name(name) in here.given:
            yield _row(gradient_name(name), here, there)


def _row(name: str, source: StageFragments, target: StageFragments) -> tuple[str, ...]:
    ends = f"{source.stage.index} ({source.stage.mesh})", f"{target.stage.index} ({target.stage.mesh})"
    layout = target.layouts[name]
    if source.stage.mesh == target.stage.mesh:
        return (name, *ends, str(layout), "0", "0", "-")
    shape, dtype = source.types[name]
    plan = TransferPlan.make(shape, str(dtype), dtype.itemsize, source.layouts[name], layout)
    after = ", ".join(move.kind for move in plan.after.moves) or "-"
    return (name, *ends, str(layout), f"{plan.bytes:,}", str(len(plan.sends)), after)


def _schedule(schedule: Schedule, seconds: Mapping[tuple[int, str], float], takes: Takes) -> list[str]:
    def cost(action: Action) -> float:
        return max(seconds.get((action.stage, action.kind), 0.0), 1e-9)

    times = timeline(schedule, cost, takes=takes)
    head = f"schedule {schedule.name}: {schedule.num_microbatches} microbatches, {times.makespan * 1e6:.1f} us"
    return [
        f"{head}, bubble {float(times.bubble):.1%}",
        *terminal(schedule, cost, width=_WIDTH, takes=takes).splitlines(),
    ]


def _state(stages: Sequence[StageFragments]) -> Iterator[str]:
    for stage in (here.stage for here in stages if here.stage.state):
        yield f"stage {stage.index} writes {', '.join(stage.state)}: handed on from microbatch to microbatch"


def _memory(stages: Sequence[StageFragments], memory: Mapping[str, str]) -> Iterator[str]:
    for here in stages:
        weights = {*here.stage.params} - {*here.inputs}
        for name in sorted(weights & memory.keys()):
            yield f"stage {here.stage.index} has the weight {name!r} in memory of kind {memory[name]!r}"
        for name in sorted((here.later["F"] - weights) & memory.keys()):
            yield f"stage {here.stage.index} holds {name.removeprefix('saved.')!r} in memory of kind {memory[name]!r}"


def _peaks(topology: Topology, schedule: Schedule, held: Mapping[int, Held]) -> list[str]:
    counts, sizes = peaks(schedule), peaks(schedule, held)
    return [
        f"{name} holds at most {count:g} microbatches for backwards, {size:,.0f} bytes"
        for name, count, size in zip(topology, counts, sizes, strict=True)
        if schedule.has_backward
    ]


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
