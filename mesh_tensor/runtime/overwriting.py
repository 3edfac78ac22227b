"""Overwriting what callers bring: not before it is known that nothing can fail, and that the results are finite."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch

from mesh_tensor.program.builder import Overwritten
from mesh_tensor.targets.tile_memory import memory_of

from .elementwise import not_finite, within

# Per value of a program: its valid parts on the devices of this process. Per storage: all tiles of this process.
Parts = Callable[[str], Iterable[torch.Tensor]]


@dataclass
class Leave:
    """Leave to overwrite tensors that a caller brings: whether it is `given`, and whether it was `used`, so that they
    are no longer what they were, whatever happens then."""

    given: bool = False
    used: bool = False


@contextmanager
def finishing(leave: Leave) -> Iterator[None]:
    """What runs within is interrupted (Ctrl-C, SIGINT) as ever until leave was used: then after it has finished, or by
    a second interruption. Interruptions reach a process's main thread alone."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        if leave.used and not waiting:
            waiting.append((number, frame))
        else:
            before(number, frame)

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    for number, frame in waiting:
        before(number, frame)


def may_overwrite(overwritten: Overwritten, others: Iterable[str], parts: Parts, tiles: Parts) -> bool:
    """Whether all that is made in place will be finite, as the values `others` are, and nobody else has that memory."""
    by_norm: dict[float, list[torch.Tensor]] = {}
    for name, norm in overwritten.norms.items():
        by_norm.setdefault(norm, []).extend(parts(name))
    if not overwritten.storages or not all(within(tensors, norm) for norm, tensors in by_norm.items()):
        return False
    if not_finite({name: parts(name) for name in others}):
        return False
    written = [_memory(tile) for storage in overwritten.storages for tile in tiles(storage)]
    kept = {_memory(tile) for storage in overwritten.kept for tile in tiles(storage)}
    return len(set(written)) == len(written) and kept.isdisjoint(written)


def _memory(tensor: torch.Tensor) -> int:
    return memory_of(tensor) if tensor.numel() else id(tensor)


def copied(storages: Iterable[str], held: Mapping[str, object]) -> dict[str, object]:
    """Copies of what is held, of one tile or of a list of tiles."""
    return {s: _copy(held[s]) for s in storages}


def _copy(local: object) -> object:
    return [tile.clone() for tile in local] if isinstance(local, list) else local.clone()  # type: ignore[attr-defined]
