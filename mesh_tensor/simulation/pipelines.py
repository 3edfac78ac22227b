"""What a pipeline takes on a Machine: its fragments are simulated once each, then its schedule goes by their times;
and what its meshes hold."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh_tensor.base.collectives import BETWEEN, collective_time
from mesh_tensor.base.dtypes import dtype_bits
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.placement import Partial, Replicate
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.pipelining.check import Held
from mesh_tensor.pipelining.clock import Timeline, timeline
from mesh_tensor.pipelining.fragments import gradient_name
from mesh_tensor.pipelining.schedule import Action, Schedule
from mesh_tensor.program.program import Program
from mesh_tensor.redistribution.transfer import TransferPlan

from .summary import in_bytes, in_seconds, pipeline_page


@dataclass(frozen=True)
class PipelineSimulation:
    """What a pipeline takes on a Machine.

    timeline     when every action of the schedule runs, mesh by mesh
    fragments    (stage, kind) -> the fragment's own Simulation
    transfers    (stage, stage) -> seconds of what goes from one to the other, for a microbatch
    endings      per mesh: seconds in which gradients are reduced after its last action
    peaks        per mesh: the most bytes that one of its devices holds
    shared       seconds that all meshes take of processors that they share; 0 where each device has one
    """

    machine: Machine
    meshes: tuple[str, ...]
    schedule: Schedule
    timeline: Timeline
    fragments: Mapping[tuple[int, str], Any]
    transfers: Mapping[tuple[int, int], float]
    endings: tuple[float, ...]
    peaks: tuple[int, ...]
    shared: float = 0.0

    @property
    def time(self) -> float:
        """Seconds, from the first action's start until all gradients are reduced; at least what meshes take of
        processors that they share."""
        ends = [row[-1].end if row else 0.0 for row in self.timeline.rows]
        return max(self.shared, *(end + ending for end, ending in zip(ends, self.endings, strict=True)))

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a device holds: weights, sums of gradients, what is left for backwards, and what a
        fragment needs beside."""
        return max(self.peaks)

    @property
    def fits(self) -> bool:
        """Whether the machine's memory holds that."""
        return self.peak_bytes <= self.machine.main_memory.size

    @property
    def bubble(self) -> float:
        """The share of the time that the meshes don't work, over all of them."""
        return self.timeline.bubble

    def per_second(self, count: float) -> float:
        """How many there are per second, of what there are `count` per batch (tokens, images)."""
        return count / self.time if self.time else 0.0

    def trace(self, path: str | Path | None = None) -> dict[str, Any]:
        """The timeline as Chrome's tracing and Perfetto read it, a process per mesh; written to `path`, if there is
        one."""
        events: list[dict[str, Any]] = []
        for number, (name, row) in enumerate(zip(self.meshes, self.timeline.rows, strict=True)):
            events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
            for event in row:
                place = {"pid": number, "tid": 0, "ts": event.start * 1e6, "dur": (event.end - event.start) * 1e6}
                events.append({"ph": "X", "name": str(event.action), "cat": event.action.name, **place})
        made = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"machine": self.machine.name}}
        if path is not None:
            Path(path).write_text(json.dumps(made), encoding="utf-8")
        return made

    def page(self, path: str | Path | None = None) -> str:
        """The timeline as an HTML page that needs nothing else; written to `path`, if there is one."""
        return pipeline_page(self, path)

    def __str__(self) -> str:
        head = f"{self.schedule.name} on {', '.join(self.meshes)}, machine {self.machine.name}"
        lines = [
            head,
            f"  time {in_seconds(self.time)}, bubble {self.bubble:.1%}, {in_bytes(self.peak_bytes)} per device",
        ]
        for (stage, kind), made in self.fragments.items():
            lines.append(f"  {stage}{kind}  {in_seconds(made.time)}, {in_bytes(made.peak_bytes)} per device")
        for (source, target), seconds in self.transfers.items():
            lines.append(f"  from stage {source} to {target}  {in_seconds(seconds)}")
        return "\n".join(lines)


def simulate_pipeline(pipe: Any, machine: Machine, simulation: Callable[[Program, Machine], Any]) -> PipelineSimulation:
    """Simulate an `api.pipeline.Pipeline`; its meshes lie one after the other on the machine.

    Raises:
        MeshTensorError: its sizes are open, or the machine can't hold it.
    """
    machine.check_holds(pipe.topology.num_devices, str(pipe.topology))
    stages = pipe.fragments
    made = {
        (here.stage.index, kind): simulation(fragment.module.program, machine)
        for here in stages
        for kind, fragment in here.fragments.items()
    }
    transfers: dict[tuple[int, int], float] = {}
    for here in stages:
        for source, seconds in _transfers(stages, here, machine, pipe.topology.num_devices):
            transfers[source, here.stage.index] = transfers.get((source, here.stage.index), 0.0) + seconds

    adding = {here.stage.index: _adding(here, machine) for here in stages}
    last = {here.stage.index: "W" if "W" in here.fragments else "B" for here in stages}

    def cost(action: Action) -> float:
        added = adding[action.stage][action.microbatch > 0] if action.kind == last[action.stage] else 0.0
        run = made.get((action.stage, action.kind))
        return machine.action + added + (0.0 if run is None else run.time)

    def delay(source: int, target: int) -> float:
        return transfers.get((source, target), transfers.get((target, source), 0.0))

    takes = {here.stage.index: tuple(dict.fromkeys(here.stage.takes.values())) for here in stages}
    clock = timeline(pipe.schedule, cost, delay, takes)
    ends = [0.0] * len(pipe.topology.names)
    for here in stages:
        ends[pipe.schedule.mesh_of[here.stage.index]] += _reducing(here, machine)
    peaks = pipeline_peaks(pipe.schedule, stages, made, len(ends))
    shared = _shared(pipe, machine, clock, ends, sum(transfers.values()))
    return PipelineSimulation(
        machine, pipe.topology.names, pipe.schedule, clock, made, transfers, tuple(ends), peaks, shared
    )


def _shared(pipe: Any, machine: Machine, clock: Timeline, endings: Sequence[float], sent: float) -> float:
    """Seconds that all meshes take of processors that they share, `sent` of them for what every microbatch sends
    forwards, and its gradients backwards."""
    if machine.processors is None:
        return 0.0
    seconds = sent * pipe.schedule.num_microbatches * (1 + pipe.schedule.has_backward)
    for mesh, (name, ending) in enumerate(zip(pipe.topology.names, endings, strict=True)):
        share = min(1.0, pipe.topology[name].num_devices / machine.processors)
        seconds += (clock.busy(mesh) + ending) * share
    return seconds


def _adding(here: Any, machine: Machine) -> tuple[float, float]:
    """Seconds in which a microbatch's gradients of a stage's weights are kept, of the first one, and added to those
    before, of others."""
    nbytes, starts = 0, 0
    for name in map(gradient_name, summed_gradients(here)):
        layout = _as_made(here, name)
        axes = {axis for axes in layout.dims for axis in axes} | {axis for axis, _ in layout.partial}
        rounds = machine.rounds(math.prod(here.mesh.size(axis) for axis in axes))
        nbytes += rounds * tile_bytes(here, [name], GRADIENT)
        starts += rounds
    seconds = nbytes / machine.memory_rate(3 * nbytes)
    started = machine.launch * (min(1, starts) if machine.processors is None else starts)  # else all start as one
    return started + 2 * seconds, started + 3 * seconds


def _as_made(here: Any, name: str) -> Sharding:
    """How a weight's gradient lies as a backward leaves it."""
    made = next(each for kind, each in here.fragments.items() if kind != "F" and name in each.gives)
    return made.layouts[name]


def _reducing(here: Any, machine: Machine) -> float:
    """Seconds in which the gradients of a stage's weights are reduced that its backwards leave as parts."""
    seconds, rounds = 0.0, machine.rounds(here.mesh.num_devices)
    for name in map(gradient_name, summed_gradients(here)):
        if axes := tuple(axis for axis, _ in _as_made(here, name).partial):
            group = math.prod(here.mesh.size(axis) for axis in axes)
            received = 2 * (group - 1) / group * tile_bytes(here, [name], GRADIENT)
            seconds += rounds * collective_time(machine, BETWEEN[Partial, Replicate].name, received, here.mesh, axes)
    return seconds


def _transfers(stages: Any, here: Any, machine: Machine, devices: int) -> Iterator[tuple[int, float]]:
    """What a stage takes of others on other meshes, forwards: from which stage, and how long that is on its way."""
    forward = here.fragments["F"]
    types = dict(zip(forward.takes, (value.type for value in forward.module.plan.graph.params), strict=True))
    for name, source in here.stage.takes.items():
        if stages[source].stage.mesh == here.stage.mesh:
            continue
        tensor, itemsize = types[name], max(1, dtype_bits(types[name].dtype) // 8)
        layouts = stages[source].layouts[name], here.layouts[name]
        plan = TransferPlan.make(tensor.shape, tensor.dtype, itemsize, *layouts)
        link = machine.link(devices)
        moved = max(plan.busiest()) + plan.before.bytes + plan.after.bytes
        yield source, (link.start + moved / link.rate) * machine.rounds(here.mesh.num_devices)


GRADIENT = 4  # bytes of an element at least: sums are kept in float32


def tile_bytes(here: Any, names: Iterable[str], least: int = 0) -> int:
    """Of values of a stage's fragments, by name; an element counts as `least` bytes at least."""
    total = 0
    for name in names:
        shape, dtype = here.types[name]
        total += math.prod(here.layouts[name].tile_shape(shape)) * max(least, dtype.itemsize)
    return total


def weights_of(here: Any) -> list[str]:
    """The parameters of a stage that stay."""
    return [name for name in here.stage.params if name not in here.inputs]


def held_for_backward(here: Any) -> Held:
    """What a stage holds of one microbatch: after F, and after I."""
    later = {name for kind, fragment in here.fragments.items() if kind != "F" for name in fragment.takes}
    halfway = set(here.fragments["W"].takes) if {"I", "W"} <= here.fragments.keys() else later
    made = {*here.fragments["F"].takes, *here.fragments["F"].gives}
    given = {name for kind in "FI" if kind in here.fragments for name in here.fragments[kind].gives}
    from_input = here.fragments["I"].takes if "I" in here.fragments else ()
    after_input, weights = halfway & {*made, *given, *from_input}, set(weights_of(here))
    return Held(tile_bytes(here, (later & made) - weights), tile_bytes(here, after_input - weights))


def summed_gradients(here: Any) -> list[str]:
    """The weights whose gradients a stage's fragments make."""
    return [name for name in weights_of(here) if gradient_name(name) in here.given]


def pipeline_peaks(
    schedule: Schedule, stages: Sequence[Any], made: Mapping[tuple[int, str], Any], meshes: int
) -> tuple[int, ...]:
    """Per mesh: the most that one of its devices holds."""
    held = {here.stage.index: held_for_backward(here) for here in stages}
    found = []
    for mesh in range(meshes):
        mine = [here for here in stages if schedule.mesh_of[here.stage.index] == mesh]
        state = sum(
            tile_bytes(here, weights_of(here)) + tile_bytes(here, map(gradient_name, summed_gradients(here)), GRADIENT)
            for here in mine
        )
        beside = {here.stage.index: _beside(here, held[here.stage.index], made) for here in mine}
        live, most = 0.0, 0.0
        for action in schedule.rows[mesh]:
            most = max(most, live + beside[action.stage].get(action.kind, 0))
            live += held[action.stage].change(action.kind) if schedule.has_backward else 0
            most = max(most, live)
        found.append(state + int(most))
    return tuple(found)


def _beside(here: Any, held: Held, made: Mapping[tuple[int, str], Any]) -> dict[str, int]:
    """What each fragment of a stage needs beside weights and what was there before it."""
    weights, found = set(weights_of(here)), {}
    for kind, fragment in here.fragments.items():
        own = tile_bytes(here, [name for name in fragment.takes if name in weights])
        before = {"F": 0.0, "W": held.forward if held.weight is None else held.weight}.get(kind, held.forward)
        found[kind] = max(0, made[here.stage.index, kind].peak_bytes - own - int(before))
    return found
