"""What a runtime has to provide, and the memory that it runs on; memory kinds: where a value lies while nothing
computes with it.

A backend gives each step its meaning once, ahead of any run: an action, which is run at every call. "device" memory is
where a value was made; "pinned_host" is memory of the host that a device copies from and to while it computes. On a CPU
both are the same memory.

Overwriting what callers bring: not before it is known that nothing can fail, and that the results are finite.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any, Protocol

import torch
from tvm import tirx

from mesh_tensor.base.errors import did_you_mean, listing, refuse, shown
from mesh_tensor.program.builder import Overwritten
from mesh_tensor.program.program import Program, ProgramValue
from mesh_tensor.program.steps import KernelStep, Meanings
from mesh_tensor.targets.tile_memory import memory_of

from .elementwise import clone, not_finite, within


class Memory:
    """What this process holds while a program runs: per storage the local memory, in whatever form the backend has it,
    what was started and not yet waited for (by the name of the value that it makes), the kernel's own scalars, and what
    the backend's actions find for the program's sizes (`sized`). Keeps count of the bytes per device of what is told to
    `hold` and `drop`."""

    __slots__ = ("_sizes", "held", "live_bytes", "peak_bytes", "pending", "scalars", "sized")

    def __init__(self, scalars: dict[str, int | float], first: Memory | None = None) -> None:
        """`first`: what is there from the beginning."""
        self.held: dict[str, Any] = {} if first is None else first.held.copy()
        self.pending: dict[str, Any] = {}
        self.sized: Sequence[Any] = ()
        self.scalars = scalars
        self._sizes: dict[str, int] = {} if first is None else first._sizes.copy()
        self.live_bytes: int = 0 if first is None else first.live_bytes
        self.peak_bytes = self.live_bytes

    def hold(self, storage: str, local: Any, nbytes: int) -> None:
        """From now on `storage` is `local`, of `nbytes` on each device."""
        self.held[storage] = local
        self.expect(storage, nbytes)

    def expect(self, storage: str, nbytes: int) -> None:
        """Count `nbytes` for `storage`, as a step makes it bit by bit before it is held."""
        self.live_bytes += nbytes - self._sizes.get(storage, 0)
        self._sizes[storage] = nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def drop(self, storage: str) -> None:
        """Forget `storage`."""
        del self.held[storage]
        self.live_bytes -= self._sizes.pop(storage)

    def changed(self, made: Mapping[str, int], dropped: Sequence[str], peak: int) -> None:
        """Count what was done to `held` by others: the storages that were `made`, with their bytes, and those that were
        `dropped`; on the way there were `peak` bytes more than before."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + peak)
        self._sizes.update(made)
        self.live_bytes += sum(made.values()) - sum([self._sizes.pop(storage) for storage in dropped])


def part_of(value: ProgramValue, tile: torch.Tensor) -> torch.Tensor:
    """What a value is of its storage's tile: the slab, as a view, or all of it."""
    slab = value.slab
    return tile if slab is None else tile.narrow(slab.dim, slab.start, slab.stop - slab.start)


def arguments_of(step: KernelStep, program: Program) -> list[ProgramValue | str | int]:
    """For every parameter of the step's kernel but the coordinates: the value, the scalar's name, or the size."""
    values = iter([program.values[name] for name in step.args])
    others: Iterator[str | int] = iter((*step.scalars, *step.sizes))
    takes_tensor = _takes_tensor(step.func)
    own = takes_tensor[: len(takes_tensor) - len(step.axes)]
    return [next(values) if is_tensor else next(others) for is_tensor in own]


@lru_cache(maxsize=1024)
def _takes_tensor(func: tirx.PrimFunc) -> tuple[bool, ...]:
    """Per parameter."""
    return tuple(param in func.buffer_map for param in func.params)


Action = Callable[[Memory], None]


class Backend(Meanings[Action | None], Protocol):
    """A runtime: how the steps run here (None: nothing happens). What can be prepared is, when a step is given its
    meaning."""

    program: Program

    def run(self, memory: Memory, before_overwriting: Callable[[], None] = lambda: None) -> None:
        """Run all steps on a memory that holds the inputs' storages (and outputs', where the caller has them).
        `before_overwriting` is called before the first one that writes an input's (`Program.overwrites_from`)."""


DEVICE, PINNED_HOST = KINDS = ("device", "pinned_host")
Moved = Callable[[Any, Callable[[torch.Tensor], torch.Tensor]], Any]


@dataclass(frozen=True)
class PutAway:
    """A value whose memory is the host's, and the device that it is of."""

    value: Any
    device: torch.device


def checked_kind(kind: Any, what: str) -> str:
    """A memory kind; others are refused."""
    if kind not in KINDS:
        refuse(
            f"{what} is in memory of kind {shown(kind)}{did_you_mean(str(kind), KINDS)}", fix=f"use {listing(KINDS)}"
        )
    return kind


def put_away(value: Any, device: torch.device, kind: str, moved: Moved) -> Any:
    """A value that lies on a device, as it is kept in memory of this kind: itself, where that is the same. `moved`
    gives a value with other memory."""
    return value if kind == DEVICE or _is_host(device) else PutAway(moved(value, _to_host), device)


def fetched(value: Any, moved: Moved) -> Any:
    """A value to compute with."""
    if not isinstance(value, PutAway):
        return value
    device = value.device
    return moved(value.value, lambda tensor: tensor.to(device, non_blocking=True, copy=True))


def plain(value: Any) -> Any:
    """A value as it lies over the mesh, in whatever memory."""
    return value.value if isinstance(value, PutAway) else value


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory. What is enqueued on the device's stream before is in it; who takes it there comes
    after it in the same stream."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def _is_host(device: torch.device) -> bool:
    """Whether memory of a device is the host's; tests say no, for other memory that is made of the host's."""
    return device.type == "cpu"


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


def copied(storages: Iterable[str], held: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of what is held, of one tile or of a list of tiles."""
    return {s: cloned(held[s]) for s in storages}


def cloned(local: Any) -> Any:
    """A copy of what is held."""
    return [clone(tile) for tile in local] if isinstance(local, list) else clone(local)
