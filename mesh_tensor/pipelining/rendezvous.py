"""Whether a schedule hangs where a send waits for its receive, and channels keep their order (as those of NCCL do).

Every mesh issues its actions in order: what an action takes is received before it, what it gives is sent after it. On a
channel, messages wait for each other; an action waits for what it takes. Tags (gloo) are a channel per message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

from mesh_tensor.base.errors import listing, refuse

from .check import Dependencies, Takes
from .schedule import Action, Schedule


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
