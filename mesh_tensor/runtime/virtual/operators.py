"""What all devices of a virtual mesh do at the step of an operator; and, where checks are on (`lowering.verify`),
whether those that are to hold the same do, bit for bit: who reads that of one would never see that another's is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import add

import torch

from mesh_tensor.lowering.verify import raise_on
from mesh_tensor.program.program import Program, ProgramValue
from mesh_tensor.program.steps import OpStep
from mesh_tensor.runtime.backend import Action, Memory, part_of
from mesh_tensor.runtime.elementwise import device_threads
from mesh_tensor.runtime.placement import Layout, layout_of
from mesh_tensor.runtime.reshard import Tiles
from mesh_tensor.targets.dtypes import torch_dtype
from mesh_tensor.targets.op_steps import added_results_of, results_of
from mesh_tensor.targets.straight_line import TileCall

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def written(program: Program, number: int) -> Callable[[Memory], None]:
    """A look at what the step of this number has written.

    Raises:
        VerificationError: when it is taken, and devices that are to hold the same of a value don't. It names the value,
            the devices and the first element.
    """
    step = program.steps[number]
    is_there = step.starts is None or step.starts.wait
    values = [value for name in step.writes if not (value := program.values[name]).inner] if is_there else []

    def look(memory: Memory) -> None:
        problems = [fact for value in values for fact in _differing(value, memory.held[value.storage])]
        raise_on(problems, f"program {program.name}: what {step.words} leaves")

    return look


def compared(action: Action, at: int) -> Action:
    """The action of a step, and then the look that `Memory.sized` has under this number."""

    def run(memory: Memory) -> None:
        action(memory)
        memory.sized[at](memory)

    return run


def _differing(value: ProgramValue, tiles: Tiles) -> Iterator[str]:
    """The devices that hold something else of a value than the first one that is to hold the same."""
    layout = layout_of(value.shape, torch_dtype(value.dtype), value.sharding)
    for rank, tile in enumerate(tiles):
        holder = layout.holder(rank)
        if tile is tiles[holder]:
            continue
        parts = [layout.valid_part([part_of(value, each) for each in tiles], device) for device in (holder, rank)]
        place = first_difference(*parts)
        if place is not None:
            yield _told(value, (holder, rank), place, [part[place].item() for part in parts])


def first_difference(one: torch.Tensor, other: torch.Tensor) -> tuple[int, ...] | None:
    """The first place where two tensors of one shape and dtype differ in a bit; any NaN is like any other.

    >>> first_difference(torch.tensor([0.0, 1.0]), torch.tensor([0.0, -1.0]))
    (1,)
    """
    bits = _BITS[one.itemsize]
    differ = one.contiguous().view(bits) != other.contiguous().view(bits)
    if one.is_floating_point() and bool(differ.any()):
        differ &= ~(one.double().isnan() & other.double().isnan())
    return tuple(differ.nonzero()[0].tolist()) if bool(differ.any()) else None


def _told(value: ProgramValue, devices: tuple[int, int], place: tuple[int, ...], found: list[float]) -> str:
    mesh, start = value.sharding.mesh, value.sharding.tile_offset(value.shape, devices[0])
    one, other = map(mesh.coordinate, devices)
    index = [offset + position for offset, position in zip(start, place, strict=True)]
    return f"{value.name} ('{value.sharding}') at {index} is {found[0]} on device {one}, {found[1]} on {other}"


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
