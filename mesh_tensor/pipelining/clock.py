"""A schedule's own clock: when every action starts and ends, from what each kind costs; and whether it hangs where a
send waits for its receive, and channels keep their order.

Every mesh issues its actions in order: what an action takes is received before it, what it gives is sent after it. On a
channel, messages wait for each other; an action waits for what it takes. Tags (gloo) are a channel per message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mesh_tensor.base.errors import listing, refuse, shown

from .check import Dependencies, Takes, check_schedule, is_amount
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

    endings   per mesh: from when to when what follows its last action runs

    >>> timeline(Schedule.named("1f1b", meshes=2, microbatches=4), {"F": 1, "B": 2})
    Timeline(makespan=15, bubble=0.2)
    """

    rows: tuple[tuple[Event, ...], ...]
    endings: tuple[tuple[float, float], ...] = ()

    @cached_property
    def makespan(self) -> float:
        """When the last action ends."""
        return max((row[-1].end for row in self.rows if row), default=0)

    @property
    def end(self) -> float:
        """When everything has ended, what follows the last actions, too."""
        return max((self.makespan, *(end for _, end in self.endings)))

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


@dataclass(frozen=True)
class Processors:
    """So many processors that meshes share; an action of a mesh keeps `needed[mesh]` of them busy."""

    count: int
    needed: Sequence[int]


def timeline(
    schedule: Schedule,
    costs: Costs,
    transfer: float | Callable[[int, int], float] = 0,
    takes: Takes | None = None,
    *,
    endings: Sequence[float] = (),
    processors: Processors | None = None,
    early: Callable[[Action], float] = lambda action: 0,
) -> Timeline:
    """Run the schedule on a clock: an action starts once its mesh is free and what it needs is there; and, where
    meshes share processors, once enough of these are free: what can start first does.

    `costs` are per kind (B is I + W where it isn't given), or of an action. A value takes `transfer` from one mesh to
    another, or what that says of the two stages. Sends and receives take none of a mesh's time. `endings` are what
    every mesh does after its last action; `early`: how long before an action's end other meshes have what it gives.
    """
    clock = _Clock(schedule, costs if callable(costs) else _of_kinds(costs, schedule), transfer, takes, early)
    after = list(endings) or [0] * schedule.num_meshes
    starts = clock.run() if processors is None else clock.run_on(processors, after)
    return clock.made(starts, after)


class _Clock:
    def __init__(
        self,
        schedule: Schedule,
        cost: Callable[[Action], float],
        transfer: float | Callable[[int, int], float],
        takes: Takes | None,
        early: Callable[[Action], float],
    ) -> None:
        self._schedule, self._cost, self._takes, self._early = schedule, cost, takes, early
        self._dependencies = Dependencies(schedule, takes)
        self._delay = transfer if callable(transfer) else lambda source, target: transfer
        self._ended: dict[Action, float] = {}
        self._rows: list[list[Event]] = [[] for _ in schedule.rows]

    def run(self) -> list[float]:
        """Meshes have processors of their own: each goes on as far as it can. Gives when each has ended."""
        progress = True
        while progress:
            progress = False
            for mesh, row in enumerate(self._schedule.rows):
                for action in row[len(self._rows[mesh]) :]:
                    start = self._ready(mesh, action)
                    if start is None:
                        break
                    self._do(mesh, action, start)
                    progress = True
        return [self._free(mesh) for mesh in range(len(self._rows))]

    def run_on(self, processors: Processors, endings: Sequence[float]) -> list[float]:
        """Meshes share processors: one action after the other, that which can start first; and what follows each
        mesh's last action. Gives when that starts."""
        free, starts = [0.0] * processors.count, dict[int, float]()
        while True:
            waiting = [mesh for mesh in range(len(self._rows)) if mesh not in starts]
            found = [each for mesh in waiting if (each := self._next(mesh, free[processors.needed[mesh] - 1]))]
            if not found:
                return [starts.get(mesh, 0.0) for mesh in range(len(self._rows))]
            start, mesh, action = min(found, key=lambda each: each[:2])
            if action is None:
                starts[mesh], end = start, start + endings[mesh]
            else:
                end = self._do(mesh, action, start)
            needed = processors.needed[mesh]
            free = sorted([*free[needed:], *[end] * needed])

    def _next(self, mesh: int, free: float) -> tuple[float, int, Action | None] | None:
        """What a mesh does next, and from when on it can; no action stands for what follows all."""
        row, done = self._schedule.rows[mesh], len(self._rows[mesh])
        action = row[done] if done < len(row) else None
        start = self._free(mesh) if action is None else self._ready(mesh, action)
        return None if start is None else (max(start, free), mesh, action)

    def _free(self, mesh: int) -> float:
        return self._rows[mesh][-1].end if self._rows[mesh] else 0

    def _ready(self, mesh: int, action: Action) -> float | None:
        """When an action could start by what it needs; nothing while that hasn't run."""
        start, ended, mesh_of = self._free(mesh), self._ended, self._schedule.mesh_of
        for need in self._dependencies.needs(action):
            if need not in ended:
                return None
            there = ended[need]
            if mesh_of[need.stage] != mesh:
                there += self._delay(need.stage, action.stage) - self._early(need)
            start = max(start, there)
        return start

    def _do(self, mesh: int, action: Action, start: float) -> float:
        self._ended[action] = end = start + self._cost(action)
        self._rows[mesh].append(Event(mesh, start, end, action))
        return end

    def made(self, starts: Sequence[float], endings: Sequence[float]) -> Timeline:
        """What has run; refused where something can't go on."""
        if len(self._ended) < sum(map(len, self._schedule.rows)):
            check_schedule(self._schedule, takes=self._takes)  # says what can't go on, and why
        pairs = zip(starts, endings, strict=True)
        return Timeline(tuple(map(tuple, self._rows)), tuple((start, start + took) for start, took in pairs))


def _of_kinds(costs: Mapping[str, float], schedule: Schedule) -> Callable[[Action], float]:
    table = dict(costs)
    if "B" not in table and {"I", "W"} <= table.keys():
        table["B"] = table["I"] + table["W"]
    kinds = sorted({action.kind for row in schedule.rows for action in row})
    problems = [f"no cost for {kind} ({KINDS[kind]})" for kind in kinds if kind not in table]
    strange = {kind: table[kind] for kind in kinds if kind in table and not is_amount(table[kind])}
    problems += [f"the cost of {kind} ({KINDS[kind]}) is {shown(cost)}" for kind, cost in strange.items()]
    if problems:
        refuse(
            problems,
            where=f"schedule {schedule.name!r}",
            fix='give a cost of at least 0 per kind that it runs, as in {"F": 1, "B": 2}',
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
