"""Ranks as threads of one process: connections, a board and a clock that stand in for gloo's sockets, torch's store and
time. The calls, their numbers, tags and agreements, who waits and who is woken: all that is the real code.

Time stands still while any thread can go on. When all wait, it goes on by a tick, and the watches look."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch

from mesh_tensor import Mesh
from mesh_tensor.runtime.ranks.calls import Calls
from mesh_tensor.runtime.ranks.ranks import Group

TICK, TIMEOUT = 0.05, 20.0


class Killed(BaseException):
    """The process of a rank ends."""


class World:
    """Some ranks, what they write on the board, and what is under way between them."""

    def __init__(self, count: int) -> None:
        self.count, self.now = count, 0.0
        self.changed = threading.Condition()
        self.waiting: dict[threading.Thread, Callable[[], bool]] = {}
        self.running: set[threading.Thread] = set()
        self.board: dict[str, str] = {}
        self.dead: set[int] = set()
        self.broken: set[tuple[int, int, int]] = set()  # generation, and the two ranks
        self.under_way: dict[tuple[int, ...], Message] = {}
        self.collisions: list[str] = []
        self.ranks: list[WorldRanks] = []

    def monotonic(self) -> float:
        """The time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Wait for a time to come."""
        end = self.now + seconds
        self.until(lambda: self.now >= end)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds."""
        with self.changed:
            me = threading.current_thread()
            self.waiting[me] = holds
            self.changed.notify_all()
            self.changed.wait_for(holds)
            del self.waiting[me]

    def run(self, bodies: Iterable[tuple[str, Callable[[], None]]]) -> None:
        """Run each body in a thread of that name, until all have ended."""
        threads = [threading.Thread(target=self._ending(body), name=name, daemon=True) for name, body in bodies]
        self.running = set(threads)
        for thread in threads:
            thread.start()
        while True:
            with self.changed:
                assert self.changed.wait_for(self._stands_still, 60), "a thread neither waits nor ends"
                if not self.running:
                    return
                self.now += TICK
                assert self.now < 100 * TIMEOUT, "nobody ends"
            for ranks in self.ranks:
                if ranks.rank not in self.dead:
                    ranks.calls.watch(self.now)
            with self.changed:
                self.changed.notify_all()

    def _stands_still(self) -> bool:
        return set(self.waiting) >= self.running and not any(holds() for holds in self.waiting.values())

    def _ending(self, body: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                body()
            finally:
                with self.changed:
                    self.running.discard(threading.current_thread())
                    self.changed.notify_all()

        return run

    def kill(self, rank: int) -> None:
        """A rank's process ends: it says nothing any more, and its connections close."""
        with self.changed:
            self.dead.add(rank)
            for generation in range(self.ranks[rank].calls.generation + 1):
                self._break(generation, rank)

    def cut(self, generation: int, rank: int) -> None:
        """Close the connections of a rank."""
        with self.changed:
            self._break(generation, rank)

    def _break(self, generation: int, rank: int) -> None:
        self.broken |= {(generation, *sorted((rank, other))) for other in range(self.count) if other != rank}
        self.changed.notify_all()

    def offer(self, half: str, at: tuple[int, ...], tensor: torch.Tensor) -> Message:
        """A send or a receive; `at`: generation, sender, receiver, tag. Both halves make a message."""
        with self.changed:
            message = self.under_way.setdefault(at, Message(self, at))
            assert half not in message.halves, f"two messages with one tag: {at}"
            message.halves[half] = tensor
            if len(message.halves) == 2:
                sent, received = message.halves["send"], message.halves["receive"]
                if sent.numel() != received.numel():
                    self.collisions.append(f"{at}: {sent.numel()} elements sent, {received.numel()} expected")
                else:
                    received.copy_(sent)
                message.done = not message.lost()
                del self.under_way[at]
                self.changed.notify_all()
            return message


class Message:
    """On its way; waited for by both sides."""

    def __init__(self, world: World, at: tuple[int, ...]) -> None:
        self._world, self._at = world, at
        self.halves: dict[str, torch.Tensor] = {}
        self.done = False

    def lost(self) -> bool:
        """Whether it will never arrive."""
        generation, sender, receiver, _ = self._at
        return (generation, *sorted((sender, receiver))) in self._world.broken

    def wait(self) -> None:
        end = self._world.now + TIMEOUT
        self._world.until(lambda: self.done or self.lost() or self._world.now >= end)
        if not self.done:
            raise RuntimeError("Connection closed by peer" if self.lost() else "Timed out waiting")


class WorldWire:
    """A rank's connections in one generation."""

    def __init__(self, world: World, rank: int, generation: int) -> None:
        self._world, self._rank, self._generation = world, rank, generation

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Message:
        return self._begin("send", (self._generation, self._rank, to, tag), tensor)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Message:
        return self._begin("receive", (self._generation, source, self._rank, tag), tensor)

    def cut(self) -> None:
        self._world.cut(self._generation, self._rank)

    def _begin(self, half: str, at: tuple[int, ...], tensor: torch.Tensor) -> Message:
        message = self._world.offer(half, at, tensor)
        if message.lost():
            raise RuntimeError("Connection closed by peer")
        return message


class WorldBoard:
    """What a rank can write and read."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank

    def say(self, key: str, words: str) -> None:
        with self._world.changed:
            if self._rank not in self._world.dead:
                self._world.board[key] = words

    def read(self, key: str) -> str | None:
        with self._world.changed:
            return self._world.board.get(key)


class WorldRanks:
    """What `Ranks` are to kernels."""

    def __init__(self, world: World, rank: int, mesh: Mesh) -> None:
        self.mesh, self.rank, self._world, self.device_mesh = mesh, rank, world, self
        self.calls = Calls(rank, range(world.count), str(mesh), world)
        self._group = Group(tuple(range(world.count)), None, self.calls, True)
        world.ranks.append(self)

    def place(self, rank: int) -> int:
        return rank

    def group(self, axes: Iterable[str]) -> Any:
        return self._group

    def is_gone(self) -> bool:
        return False

    def meet(self) -> bool:
        with self.calls.lock:
            if not self.calls.connected:
                world = self._world
                board, timeout = WorldBoard(world, self.rank), timedelta(seconds=TIMEOUT)
                self.calls.begin("world", board, lambda generation: WorldWire(world, self.rank, generation), timeout)
        return True
