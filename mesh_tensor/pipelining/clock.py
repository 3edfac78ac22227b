"""A schedule's own clock: when every action starts and ends, from what each kind costs; and whether it hangs where a
send waits for its receive, and channels keep their order.

Every mesh issues its actions in order: what an action takes is received before it, what it gives is sent after it. On a
channel, messages wait for each other; an action waits for what it takes. Tags (gloo) are a channel per message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

from mesh_tensor.base.errors import listing, refuse

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


class Message(NamedTuple):
    """What an action makes goes from one mesh to another, for an action there."""

    source: int
    target: int
    made: Action
    taken: Action


#: How messages are divided over channels of a mesh: the number of channels grows from first to last.
CHANNELS: dict[str, Callable[[Message, int], Hashable]] = {
    "one stream": lambda message, mesh: 0,
    "per peer": lambda message, mesh: frozenset((message.source, message.target)),
    "per peer and direction": lambda message, mesh: (message.source, message.target, message.made.kind == "F"),
    "per message": lambda message, mesh: message,
}


def hangs(schedule: Schedule, channels: str = "per peer and direction", takes: Takes | None = None) -> str:
    """Where the schedule hangs with such channels, in words; nothing where it runs to its end."""
    if channels not in CHANNELS:
        refuse(f"there are no channels {channels!r}", fix=f"use {listing(list(CHANNELS))}")
    return _Run(schedule, CHANNELS[channels], Dependencies(schedule, takes)).stuck()


class _Run:
    """Meshes that issue their messages and actions as far as they get."""

    def __init__(
        self, schedule: Schedule, channel: Callable[[Message, int], Hashable], dependencies: Dependencies
    ) -> None:
        self._channel = channel
        self._awaited = _awaited(schedule, dependencies)
        self._todo = [deque(_issued(row, self._awaited)) for row in schedule.rows]
        self._queues: list[dict[Hashable, deque[Message]]] = [{} for _ in schedule.rows]
        self._done: set[Message] = set()

    def stuck(self) -> str:
        """What each mesh waits for, when nothing goes on any more."""
        while self._issue() or self._exchange():
            pass
        waits = [f"mesh {mesh} waits before {todo[0]}" for mesh, todo in enumerate(self._todo) if todo]
        return "; ".join(waits)

    def _issue(self) -> bool:
        """Messages queue up; an action runs once what it takes is there."""
        progress = False
        for mesh, todo in enumerate(self._todo):
            while todo and self._can_go(todo[0]):
                first = todo.popleft()
                if isinstance(first, Message):
                    self._queues[mesh].setdefault(self._channel(first, mesh), deque()).append(first)
                progress = True
        return progress

    def _can_go(self, first: Message | Action) -> bool:
        return isinstance(first, Message) or all(message in self._done for message in self._awaited[first])

    def _exchange(self) -> bool:
        """Messages that are first in their channel on both sides are exchanged."""
        heads = [{queue[0] for queue in queues.values() if queue} for queues in self._queues]
        met = {m for there in heads for m in there if m in heads[m.source] and m in heads[m.target]}
        for queues in self._queues:
            for queue in queues.values():
                if queue and queue[0] in met:
                    queue.popleft()
        self._done |= met
        return bool(met)


def _awaited(schedule: Schedule, dependencies: Dependencies) -> dict[Action, list[Message]]:
    """Per action the messages that it takes from other meshes."""
    mesh_of = schedule.mesh_of
    return {
        action: [
            Message(mesh_of[need.stage], mesh, need, action)
            for need in dependencies.needs(action)
            if mesh_of[need.stage] != mesh
        ]
        for mesh, row in enumerate(schedule.rows)
        for action in row
    }


def _issued(row: Iterable[Action], awaited: Mapping[Action, list[Message]]) -> Iterator[Message | Action]:
    """What a mesh issues: receives before their action, the action, then the sends of what it made."""
    sent: dict[Action, list[Message]] = {}
    for messages in awaited.values():
        for message in messages:
            sent.setdefault(message.made, []).append(message)
    for action in row:
        yield from awaited[action]
        yield action
        yield from sent.get(action, ())
