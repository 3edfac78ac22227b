"""When the actions of one mesh's part of a run begin and end."""

from __future__ import annotations

from collections.abc import Callable
from time import time

from mesh_tensor.pipelining.schedule import Action


class Stopwatch:
    """When a row's actions run: `began` is called once what an action takes is there. In seconds since the epoch, which
    ranks on one machine share."""

    def __init__(self) -> None:
        self.rows: list[tuple[Action, float, float, int]] = []  # from when to when, and the bytes held afterwards
        self.ending = (0.0, 0.0)
        self._began: float | None = None

    def began(self) -> None:
        """The action computes from now on."""
        self._began = time()

    def ended(self, action: Action, held: int) -> None:
        """The action has handed on what it made. One that computes nothing takes no time."""
        now = time()
        self.rows.append((action, now if self._began is None else self._began, now, held))
        self._began = None

    def at_end(self, work: Callable[[], None]) -> None:
        """Do what follows the last action."""
        start = time()
        work()
        self.ending = start, time()
