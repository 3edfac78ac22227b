"""What a pipeline takes on a Machine: its fragments are simulated once each, then its schedule goes by their times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mesh_tensor.base.machine import Link, Machine
from mesh_tensor.base.topology import Topology
from mesh_tensor.pipelining.check import Dependencies, Takes
from mesh_tensor.pipelining.clock import Event, Processors, Timeline, timeline
from mesh_tensor.pipelining.schedule import Action, Schedule
from mesh_tensor.program.program import Program

from .pipeline_summary import (
    REDUCED,
    SENT,
    ActionGroup,
    action_groups,
    pipeline_page,
    pipeline_table,
    pipeline_trace,
    pipeline_why,
)
from .stages import adding_seconds, held_bytes_of, reducing_seconds, transfer_seconds
from .summary import Simulated, check_count, named_kinds


@dataclass(frozen=True, eq=False)
class PipelineSimulation(Simulated):
    """What a pipeline takes on a Machine.

    fragments    (stage, kind) -> the fragment's own Simulation
    beside       (stage, kind) -> seconds of the first microbatch's action beside its fragment, and of every other's
    handing      (stage, kind) -> seconds in which the fragment is given its values, and they are taken from it
    rest         (stage, kind) -> seconds of the fragment after what other stages wait for is handed on
    transfers    (stage, stage) -> seconds of what goes from one to the other, for a microbatch
    endings      per mesh: seconds in which gradients are reduced after its last action
    held         per mesh: the most bytes that one of its devices holds while each action runs, and at last
    takes        per stage, the stages that it takes values of
    devices      per mesh
    left_out     what is not simulated, in words
    """

    machine: Machine
    meshes: tuple[str, ...]
    schedule: Schedule
    fragments: Mapping[tuple[int, str], Any]
    beside: Mapping[tuple[int, str], tuple[float, float]]
    handing: Mapping[tuple[int, str], float]
    rest: Mapping[tuple[int, str], float]
    transfers: Mapping[tuple[int, int], float]
    endings: tuple[float, ...]
    held: tuple[tuple[int, ...], ...]
    takes: Takes
    devices: tuple[int, ...]
    left_out: tuple[str, ...] = ()

    @cached_property
    def timeline(self) -> Timeline:
        """When every action of the schedule runs, mesh by mesh. Where meshes share processors, an action waits for
        them, and what it receives of other meshes is part of it."""
        return self._played(frozenset())

    @property
    def time(self) -> float:
        """Seconds, from the first action's start until all gradients are reduced."""
        return self.timeline.end

    @property
    def peaks(self) -> tuple[int, ...]:
        """Per mesh: the most bytes that one of its devices holds."""
        return tuple(map(max, self.held))

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a device holds: weights, sums of gradients, what is left for backwards, and what a
        fragment needs beside."""
        return max(self.peaks)

    @property
    def bubble(self) -> float:
        """The share of the time, 0 to 1, that the meshes don't work, over all of them."""
        return self.timeline.bubble

    @property
    def exposed(self) -> float:
        """The share of the time, 0 to 1, that devices wait for collectives of their mesh, over all of them. Waiting for
        other meshes is part of the bubble."""
        if not self.time:
            return 0.0
        waiting = list(self.endings)
        for event in self._events.values():
            run = self.fragments.get((event.action.stage, event.action.kind))
            waiting[event.mesh] += 0.0 if run is None else run.exposed * run.time
        return self._per_device(waiting) / self.time

    @property
    def flops(self) -> float:
        """Floating-point operations of one device, in the mean over all."""
        rows = self.timeline.rows
        return self._per_device([sum(self._flops(event.action) for event in row) for row in rows])

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """The actions that the end waited for, one after the other; a gap between two is a transfer."""
        ends = [end for _, end in self.timeline.endings]
        found = list(self.timeline.rows[ends.index(max(ends))][-1:])
        while found and (before := self._waited_for(found[-1])):
            found.append(before)
        return tuple(reversed(found))

    def given(self, event: Event, mesh: int) -> float:
        """When what an action gives starts on its way to a mesh: before its end, where it hands that on first."""
        return event.end if event.mesh == mesh else event.end - self._early(event.action)

    def without(self, kinds: Iterable[str] | str) -> float:
        """The seconds that everything would take if what is called so took none: actions of a stage ("0F"), what
        goes from mesh to mesh ("transfers"), gradients' reductions at the end ("reductions"). Refused where nothing is
        called so."""
        actions = {f"{event.action.stage}{event.action.kind}" for event in self._events.values()}
        return self._played(named_kinds(kinds, actions | {SENT, REDUCED})).end

    def groups(self) -> list[ActionGroup]:
        """The actions by stage and kind, transfers and reductions; those first without which everything would be over
        soonest."""
        return action_groups(self)

    def why(self, most: int = 3) -> str:
        """What costs most, what for, and what would change that."""
        check_count(most)
        return pipeline_why(self, most)

    def trace(self, path: str | Path | None = None) -> dict[str, Any]:
        """The timeline as Chrome's tracing and Perfetto read it, a process per mesh, with the bytes that a device of it
        holds; written to `path`, if there is one."""
        return pipeline_trace(self, path)

    def page(self, path: str | Path | None = None) -> str:
        """The timeline as an HTML page that needs nothing else; written to `path`, if there is one."""
        return pipeline_page(self, path)

    def __str__(self) -> str:
        return pipeline_table(self)

    def _played(self, without: frozenset[str]) -> Timeline:
        """The schedule, where what is called so takes no time."""
        shared = self.machine.processors

        def delay(source: int, target: int) -> float:
            return 0.0 if SENT in without else self._delay(source, target)

        def cost(action: Action) -> float:
            received = 0.0 if shared is None else self._receiving(action) * (SENT not in without)
            if f"{action.stage}{action.kind}" in without:
                return received
            run = self.fragments.get((action.stage, action.kind))
            beside = self.beside[action.stage, action.kind][action.microbatch > 0]
            beside += self.machine.action + self.handing.get((action.stage, action.kind), 0.0)
            return beside + received + (0.0 if run is None else run.time)

        def early(action: Action) -> float:
            return 0.0 if f"{action.stage}{action.kind}" in without else self._early(action)

        endings = [0.0 if REDUCED in without else ending for ending in self.endings]
        if shared is None:
            return timeline(self.schedule, cost, delay, self.takes, endings=endings, early=early)
        processors = Processors(shared, [min(shared, count) for count in self.devices])
        return timeline(self.schedule, cost, 0.0, self.takes, endings=endings, processors=processors)

    def _receiving(self, action: Action) -> float:
        """Seconds of what an action takes of other meshes."""
        needs = [need for need in self._dependencies.needs(action) if need.stage != action.stage]
        return sum(self._delay(need.stage, action.stage) for need in needs)

    def _waited_for(self, event: Event) -> Event | None:
        """The action that another one waited for: the last that ended of what it needs, with its way, and of those
        before it on its mesh; or, where that was earlier, on processors that it needs."""
        row, by_action = self.timeline.rows[event.mesh], self._events
        found = [(each.end, each) for each in row[: row.index(event)][-1:]]
        for need in self._dependencies.needs(event.action):
            made = by_action[need]
            sent = 0.0 if self.machine.processors is not None else self._delay(need.stage, event.action.stage)
            found.append((self.given(made, event.mesh) + sent, made))
        last = max(found, key=lambda each: each[0], default=None)
        if self.machine.processors is not None and (last is None or last[0] < event.start):
            left = [each for each in by_action.values() if each.end == event.start > each.start]
            return left[0] if left else None
        return None if last is None else last[1]

    @cached_property
    def _events(self) -> dict[Action, Event]:
        return {event.action: event for row in self.timeline.rows for event in row}

    @cached_property
    def _dependencies(self) -> Dependencies:
        return Dependencies(self.schedule, self.takes)

    def _delay(self, source: int, target: int) -> float:
        """Seconds from a stage to another one, forwards or back."""
        return self.transfers.get((source, target), self.transfers.get((target, source), 0.0))

    def _early(self, action: Action) -> float:
        """Seconds before an action's end in which other stages have what it hands on first: gradients of weights are
        computed then, and added up."""
        key = action.stage, action.kind
        return self.rest[key] + self.beside[key][action.microbatch > 0] if self.rest.get(key) else 0.0

    def _flops(self, action: Action) -> int:
        run = self.fragments.get((action.stage, action.kind))
        return 0 if run is None else run.flops

    def _per_device(self, per_mesh: Iterable[float]) -> float:
        """The mean over all devices of what each device of a mesh has."""
        return sum(each * count for each, count in zip(per_mesh, self.devices, strict=True)) / sum(self.devices)


def simulate_pipeline(pipe: Any, machine: Machine, simulation: Callable[..., Any]) -> PipelineSimulation:
    """Simulate an `api.pipeline.Pipeline`; its meshes lie one after the other on the machine. Refused where its sizes
    are open, or the machine can't hold it."""
    machine.check_holds(pipe.topology.num_devices, str(pipe.topology))
    stages, names = pipe.fragments, pipe.topology.names
    starts = _starts(pipe.topology)
    inside = [  # what fragments make stays where it is
        replace(machine, result=0.0).seen_from(starts[name], pipe.topology[name].num_devices) for name in names
    ]

    def between(*meshes: str) -> Link:
        ends = [starts[mesh] + pipe.topology[mesh].num_devices for mesh in meshes]
        return machine.joining(min(starts[mesh] for mesh in meshes), max(ends) - 1)

    fragments = {(here.stage.index, kind): each for here in stages for kind, each in here.fragments.items()}
    touched = _touched(fragments, machine)
    made = {
        key: simulation(
            fragment.module.program,
            inside[pipe.schedule.mesh_of[key[0]]],
            elsewhere=sum(touched.values()) - touched[key],
        )
        for key, fragment in fragments.items()
    }
    handing = {key: _handing(fragment, machine, sum(touched.values())) for key, fragment in fragments.items()}
    rest = {
        (here.stage.index, kind): seconds
        for here in stages
        if machine.processors is None  # as ranks of their own do; devices that share processors hand on at the end
        for kind, fragment in here.fragments.items()
        if (seconds := after_handing_on(fragment, made[here.stage.index, kind], simulation))
    }
    transfers: dict[tuple[int, int], float] = {}
    for here in stages:
        for source, seconds in transfer_seconds(stages, here, machine, between):
            transfers[source, here.stage.index] = transfers.get((source, here.stage.index), 0.0) + seconds
    beside: dict[tuple[int, str], tuple[float, float]] = {}
    endings = [0.0] * len(names)
    for here in stages:
        stage = here.stage.index
        last = "W" if "W" in here.fragments else "B"
        beside |= {(stage, kind): adding_seconds(here, machine) if kind == last else (0.0, 0.0) for kind in "FBIW"}
        mesh = pipe.schedule.mesh_of[stage]
        endings[mesh] += reducing_seconds(here, inside[mesh])
    return PipelineSimulation(
        machine,
        names,
        pipe.schedule,
        made,
        beside,
        handing,
        rest,
        transfers,
        tuple(endings),
        held_bytes_of(pipe.schedule, stages, machine, len(names)),
        {here.stage.index: tuple(dict.fromkeys(here.stage.takes.values())) for here in stages},
        tuple(pipe.topology[name].num_devices for name in names),
        tuple(dict.fromkeys([*(text for run in made.values() for text in run.left_out), *pipe.not_simulated])),
    )


def _touched(fragments: Mapping[tuple[int, str], Any], machine: Machine) -> dict[tuple[int, str], int]:
    """The bytes that each fragment touches in caches that all of them share, where processors are shared."""
    programs = {key: fragment.module.program for key, fragment in fragments.items()}
    return {
        key: machine.rounds(program.mesh.num_devices) * sum(each.tile_bytes for each in program.stored.values())
        if machine.processors is not None
        else 0
        for key, program in programs.items()
    }


def _handing(fragment: Any, machine: Machine, touched: int) -> float:
    """Seconds in which a fragment's values are handed to it, and taken from it, after so many bytes were touched."""
    values = len(fragment.takes) + len(fragment.gives)
    tiles = values * fragment.module.program.mesh.num_devices
    return tiles * machine.value + values * machine.colder(touched)


def after_handing_on(fragment: Any, run: Any, simulation: Callable[[Program, Machine], Any]) -> float:
    """Seconds of a fragment after it has handed on what others wait for; 0 where that is there at its end."""
    before, after = fragment.module.around_handing_on()
    if not before:
        return 0.0
    ordered = simulation(replace(run.program, steps=(*before, *after)), run.machine)
    return sum(step.end - step.start for step in ordered.steps if step.number >= len(before))


def _starts(topology: Topology) -> dict[str, int]:
    found, count = dict[str, int](), 0
    for name in topology.names:
        found[name] = count
        count += topology[name].num_devices
    return found
