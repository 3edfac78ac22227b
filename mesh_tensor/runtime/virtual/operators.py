"""What all devices of a virtual mesh do at the step of an operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import add

import torch

from mesh_tensor.program.steps import OpStep
from mesh_tensor.runtime.backend import Memory
from mesh_tensor.runtime.elementwise import device_threads
from mesh_tensor.runtime.placement import Layout
from mesh_tensor.targets.op_steps import added_results_of, results_of
from mesh_tensor.targets.straight_line import TileCall


@dataclass(frozen=True, slots=True)
class OpKind:
    """What of an OpAction follows from sizes: the `calls` of each device, which make results of so many bytes each.
    `poisoned`: the layouts of these, if padding is poisoned; `apart`: devices work at the same time, as there is enough
    to do."""

    calls: list[TileCall]
    sizes: tuple[int, ...]
    poisoned: tuple[Layout, ...] | None
    apart: bool


@dataclass(slots=True, eq=False)
class OpAction:
    """All devices call an operator on the storages `names`; what they make are `results`. `kind`: the number of its
    OpKind; `totals`: what they are added to, where it is held; `alike`: devices with the same operands share results.
    (One object: a plan has thousands, which the garbage collector looks at.)"""

    step: OpStep
    kind: int
    names: tuple[str, ...]
    results: tuple[str, ...]
    totals: tuple[str, ...]
    alike: bool

    def __call__(self, memory: Memory) -> None:
        kind: OpKind = memory.sized[self.kind]
        calls, poisoned = kind.calls, kind.poisoned
        operands = list(zip(*(memory.held[name] for name in self.names), strict=True)) or [()] * len(calls)
        taken = operands
        totals: list[tuple[torch.Tensor | None, ...]] | None = None
        if any(name in memory.held for name in self.totals):
            nothing = [None] * len(calls)
            totals = list(zip(*(memory.held.pop(name, nothing) for name in self.totals), strict=True))
            taken = list(map(add, operands, totals))
        leaders = _leaders(taken) if self.alike else list(range(len(operands)))
        work = sorted(set(leaders))
        made: dict[int, list[torch.Tensor]] = {}

        def of_device(index: int) -> None:
            rank = work[index]
            call, given = calls[rank], operands[rank]
            if totals is None:
                made[rank] = results_of(self.step, call, given)
            else:
                made[rank] = added_results_of(self.step, call, given, totals[rank])
            if poisoned is not None:
                made[rank] = [layout.poisoned(t, rank) for layout, t in zip(poisoned, made[rank], strict=True)]

        _run_all(of_device, len(work), device_threads().run if kind.apart else one_by_one)
        for position, (name, size) in enumerate(zip(self.results, kind.sizes, strict=True)):
            memory.hold(name, [made[leader][position] for leader in leaders], size)


def _leaders(operands: list[tuple[torch.Tensor, ...]]) -> list[int]:
    """Per device, the first one whose operands are the same tensors."""
    first: dict[tuple[int, ...], int] = {}
    return [first.setdefault(tuple(map(id, tiles)), rank) for rank, tiles in enumerate(operands)]


def _run_all(work: Callable[[int], None], count: int, run: Callable[[Callable[[int], None], int], None]) -> None:
    """Devices as `run` does it, torch in each of them with one thread; a single one with all of torch's threads."""
    threads = torch.get_num_threads()
    if count == 1 or threads == 1:
        run(work, count)
        return
    torch.set_num_threads(1)
    try:
        run(work, count)
    finally:
        torch.set_num_threads(threads)


def one_by_one(work: Callable[[int], None], count: int) -> None:
    """All devices, one after the other."""
    for rank in range(count):
        work(rank)
