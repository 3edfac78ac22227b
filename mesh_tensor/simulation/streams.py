"""The streams of a device: one for what it computes, one per kind of link.

Every device of a Program runs the same steps, so one of them, the busiest at each step, stands for all: what is
simulated doesn't grow with the mesh.

A step starts when its stream is free. A collective that is waited for at once holds the device up; one that only
starts takes from what the device computes the share of its time that the machine says, until it is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mesh_tensor.base.dtypes import dtype_bits
from mesh_tensor.base.machine import Machine
from mesh_tensor.program.loop_step import LoopStep
from mesh_tensor.program.program import Program, ProgramValue
from mesh_tensor.program.steps import AllocStep, CollectiveStep, FreeStep, KernelStep, OpStep, Step, WaitStep

from .costs import COMPUTE, NOTHING, StepCost, StepCosts

RUN, SEND, START, WAIT = range(4)


class Event(NamedTuple):
    """What a step does to streams; `which` is a link's number (SEND, START), or the event that is waited for."""

    kind: int
    seconds: float
    which: int


class Events:
    """The events of a program's steps, with the cost of each and the number of its step. What takes no time and waits
    for nothing is no event."""

    def __init__(self, program: Program, machine: Machine, prices: StepCosts | None = None) -> None:
        self.all: list[Event] = []
        self.costs: list[StepCost] = []
        self.steps: list[int] = []
        self._prices = StepCosts(program, machine) if prices is None else prices
        self._started: dict[str, int] = {}
        self._machine, self._number = machine, 0
        for number, step in enumerate(program.steps):
            self._number = number
            if made := step.mean(self):
                self.all.append(made[0])
                self.costs.append(made[1])
                self.steps.append(number)

    def kernel(self, step: KernelStep) -> tuple[Event, StepCost] | None:
        """The device is busy."""
        return _on_device(self._prices.kernel(step))

    def op(self, step: OpStep) -> tuple[Event, StepCost] | None:
        """The device is busy."""
        return _on_device(self._prices.op(step))

    def collective(self, step: CollectiveStep) -> tuple[Event, StepCost] | None:
        """The link is busy, and the device, too, if it waits; or the device alone, where nothing is sent."""
        cost = self._prices.collective(step)
        if cost.stream == COMPUTE:
            return _on_device(cost)
        if not step.wait:
            self._started[step.dst] = len(self.all)
        return Event(SEND if step.wait else START, cost.seconds, cost.stream), cost

    def loop(self, step: LoopStep) -> None:
        """The events of its steps, as often as they are run; once, where only data says how often."""
        bodies = [body for body in (step.test, step.body) if isinstance(body, Program)]
        prices, known = [self._prices.inside(body) for body in bodies], dict[int, Events]()
        for turn in range(step.count or 1):
            for which, body in enumerate(bodies):
                first = len(self.all)
                if turn < 2:  # the first time finds what was before it, all others what the last one left
                    known[which] = Events(body, self._machine, prices[which])
                inner = known[which]
                moved = [e._replace(which=e.which + first) if e.kind == WAIT else e for e in inner.all]
                self.all += moved
                self.costs += inner.costs
                self.steps += [self._number] * len(moved)
        self._prices.after(prices, step.count or 1)

    def wait(self, step: WaitStep) -> tuple[Event, StepCost] | None:
        """The device waits, if anything was sent."""
        started = self._started.pop(step.collective.dst, None)
        return None if started is None else (Event(WAIT, 0.0, started), NOTHING)

    def alloc(self, step: AllocStep) -> None:
        """No time."""

    def free(self, step: FreeStep) -> None:
        """No time."""
        self._prices.free(step)


def _on_device(cost: StepCost) -> tuple[Event, StepCost] | None:
    return (Event(RUN, cost.seconds, 0), cost) if cost.seconds else None


def called_seconds(program: Program, machine: Machine, elsewhere: int = 0) -> float:
    """What a run takes beside its steps, with handing on the results that operators, and collectives among them, make;
    kernels write to them. `elsewhere` as StepCosts takes it."""
    steps: tuple[Step, ...] = (*program.ops, *program.collectives) if machine.result and program.ops else ()
    made = {program.values[name].storage for step in steps for name in step.writes}
    given = [program.values[each.output] for each in program.parameters if each.output is not None]
    given = [value for value in given if value.storage in made]
    results = [(math.prod(value.shape) * dtype_bits(value.dtype) // 8, _parts(value, machine)) for value in given]
    return machine.called(elsewhere + sum(value.tile_bytes for value in program.stored.values()), results)


def _parts(value: ProgramValue, machine: Machine) -> int:
    """In how many parts a caller takes a result: devices that share processors have all of it."""
    layout = value.sharding
    axes = {axis for dim in layout.dims for axis in dim} | {axis for axis, _ in layout.partial}
    return 1 if machine.processors is None else math.prod(layout.mesh.size(axis) for axis in axes)


def play(events: Iterable[Event], links: int, busy: float) -> tuple[float, list[float]]:
    """When everything has ended, and when each event ends; all streams are free at 0."""
    now, streams = 0.0, [0.0] * links
    ends: list[float] = []
    end = ends.append
    for kind, seconds, which in events:
        if kind == RUN:
            now += seconds
            end(now)
        elif kind == SEND:
            if streams[which] > now:
                now = streams[which]
            now += seconds
            streams[which] = now
            end(now)
        elif kind == START:
            begin = streams[which]
            if now > begin:
                begin = now
            streams[which] = begin = begin + seconds
            now += busy * seconds
            end(begin)
        else:
            if ends[which] > now:
                now = ends[which]
            end(now)
    return max([now, *streams]), ends


def critical(events: Sequence[Event], ends: Sequence[float], busy: float) -> list[int]:
    """The events that the end waited for, each for the one before it, by number and in order of time."""
    before: list[list[int]] = []
    last, streams = -1, dict[int, int]()
    for number, (kind, seconds, which) in enumerate(events):
        found = [last]
        if kind in (SEND, START):
            found.append(streams.get(which, -1))
            streams[which] = number
        elif kind == WAIT:
            found.append(which)
        before.append([each for each in found if each >= 0])
        if kind != START or busy * seconds:
            last = number
    if not events:
        return []
    number = max(range(len(events)), key=lambda each: (ends[each], each))
    path = [number]
    while before[number]:
        number = max(before[number], key=lambda each: (ends[each], each))
        path.append(number)
    return path[::-1]
