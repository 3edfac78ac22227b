"""A schedule's own clock: when every action starts and ends, from what each kind costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

from ..base.errors import refuse
from .check import Dependencies, Takes, check_schedule
from .schedule import KINDS, Action, Schedule

Costs = Mapping[str, float] | Callable[[Action], float]


class Event(NamedTuple):
    """An action on its mesh, from `start` to `end`."""

    mesh: int
    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """When every action of a schedule runs, mesh by mesh. Exact where costs are ints or Fractions.

    >>> timeline(Schedule.named("1f1b", meshes=2, microbatches=4), {"F": 1, "B": 2})
    Timeline(makespan=15, bubble=0.2)
    """

    rows: tuple[tuple[Event, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """When the last action ends."""
        return max((row[-1].end for row in self.rows if row), default=0)

    def busy(self, mesh: int) -> float:
        """How long a mesh computes."""
        return sum(event.end - event.start for event in self.rows[mesh])

    def idle(self, mesh: int) -> float:
        """How long a mesh doesn't compute, until the last one ends."""
        return self.makespan - self.busy(mesh)

    def idle_inside(self, mesh: int) -> float:
        """How long a mesh doesn't compute between its first action and its last one's end."""
        row = self.rows[mesh]
        return row[-1].end - row[0].start - self.busy(mesh) if row else 0

    @property
    def bubble(self) -> float:
        """The part of the time that the meshes don't compute, over all of them."""
        idle = sum(self.idle(mesh) for mesh in range(len(self.rows)))
        return idle / (len(self.rows) * self.makespan) if self.makespan else 0

    def __repr__(self) -> str:
        return f"Timeline(makespan={self.makespan:g}, bubble={float(self.bubble):.3g})"


def timeline(
    schedule: Schedule,
    costs: Costs,
    transfer: float | Callable[[int, int], float] = 0,
    takes: Takes | None = None,
) -> Timeline:
    """Run the schedule on a clock: an action starts once its mesh is free and what it needs is there.

    `costs` are per kind (B is I + W where it isn't given), or of an action. A value takes `transfer` from one mesh to
    another, or what that says of the two stages. Sends and receives take none of a mesh's time.
    """
    cost = costs if callable(costs) else _of_kinds(costs, schedule)
    dependencies = Dependencies(schedule, takes)
    mesh_of, ended = schedule.mesh_of, cast(dict[Action, float], {})
    delay = transfer if callable(transfer) else lambda source, target: transfer
    rows: list[list[Event]] = [[] for _ in schedule.rows]
    left, before = sum(map(len, schedule.rows)), -1
    while left != before:
        before = left
        for mesh, (events, row) in enumerate(zip(rows, schedule.rows, strict=True)):
            for action in row[len(events) :]:
                needs = dependencies.needs(action)
                if not all(need in ended for need in needs):
                    break
                start = events[-1].end if events else 0
                for need in needs:
                    other = mesh_of[need.stage] != mesh
                    start = max(start, ended[need] + (delay(need.stage, action.stage) if other else 0))
                ended[action] = end = start + cost(action)
                events.append(Event(mesh, start, end, action))
                left -= 1
    if left:
        check_schedule(schedule, takes=takes)  # says what can't go on, and why
    return Timeline(tuple(map(tuple, rows)))


def _of_kinds(costs: Mapping[str, float], schedule: Schedule) -> Callable[[Action], float]:
    table = dict(costs)
    if "B" not in table and {"I", "W"} <= table.keys():
        table["B"] = table["I"] + table["W"]
    missing = {action.kind for row in schedule.rows for action in row} - table.keys()
    if missing:
        refuse(
            [f"no cost for {kind} ({KINDS[kind]})" for kind in sorted(missing)],
            where=f"schedule {schedule.name!r}",
            fix='give a cost per kind that it runs, as in {"F": 1, "B": 2}',
        )
    return lambda action: table[action.kind]
