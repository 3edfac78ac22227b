"""The virtual mesh: every device of a mesh in one process, on the cores of a CPU or on one GPU.

Devices run a kernel step at the same time, in threads, and an operator where that makes up for handing it on; a
collective copies between their tiles. Memory is a list of tiles, one per device, per storage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import add

import torch

from mesh_tensor.program.loop_step import LoopStep
from mesh_tensor.program.program import Program, ProgramValue
from mesh_tensor.program.steps import AllocStep, CollectiveStep, FreeStep, KernelStep, OpStep, Step, WaitStep
from mesh_tensor.program.verify import verify_collective
from mesh_tensor.rules.operator.cost import pays_apart
from mesh_tensor.runtime.backend import Action, Memory, arguments_of, part_of
from mesh_tensor.runtime.elementwise import clone, device_threads
from mesh_tensor.runtime.loops import LoopAction, LoopTiles
from mesh_tensor.runtime.placement import Layout, layout_of
from mesh_tensor.runtime.reshard import Tiles, reshard_of
from mesh_tensor.targets.dtypes import torch_dtype
from mesh_tensor.targets.kernels import Target
from mesh_tensor.targets.op_steps import (
    Section,
    TileFunction,
    differs_by_rank,
    in_sections,
    recorded_pairs,
    tile_calls,
    tile_functions,
)
from mesh_tensor.targets.straight_line import TileCall
from mesh_tensor.targets.totals import totals_of


class VirtualMesh:
    """Runs `program` for all devices of its mesh: the Backend of one process."""

    def __init__(self, program: Program, target: Target, *, poison: bool = False, totals: Collection[str] = ()) -> None:
        """`totals`: results that are added to what is held for them."""
        self.program = program
        self.device = target.device()
        self.layouts = {
            name: layout_of(v.shape, torch_dtype(v.dtype), v.sharding) for name, v in program.values.items()
        }
        self._target, self._poison, self._totals = target, poison, totals
        self._kinds: dict[tuple, _OpKind] = {}
        _check_storages(program)
        self._records = recorded_pairs(program)
        alone = program.mesh.num_devices == 1 and not poison
        first, last = program.steps[: program.overwrites_from], program.steps[program.overwrites_from :]
        self._first, self._last = self._actions(first, alone), self._actions(last, alone)

    def run(self, memory: Memory, before_overwriting: Callable[[], None] = lambda: None) -> None:
        """Run all steps, in order, on the storages that `memory` holds."""
        for action in self._first:
            action(memory)
        before_overwriting()
        for action in self._last:
            action(memory)

    def _actions(self, steps: Sequence[Step], alone: bool) -> list[Action]:
        runs = in_sections(steps) if alone else ((step,) for step in steps)
        return [action for run in runs if (action := self._run(run)) is not None]

    def _run(self, run: Sequence[Step]) -> Action | None:
        """What steps that follow each other are here; several are OpSteps of a mesh's only device."""
        if not isinstance(run[0], OpStep) or self.program.mesh.num_devices > 1 or self._poison:
            return run[0].mean(self)
        section = Section(run, self.program, 0, self._target, listed=True, records=self._records, totals=self._totals)
        sizes = {storage: self.layouts[value.name].tile_bytes for storage, value in self.program.stored.items()}
        made, dropped, peak = section.memory(sizes)

        def action(memory: Memory) -> None:
            section(memory.held)
            memory.changed(made, dropped, peak)

        return action

    def kernel(self, step: KernelStep) -> Action | None:
        """All devices run the step's kernel on their tiles; nothing happens if what it writes has no elements."""
        if all(self.layouts[name].tile_bytes == 0 for name in step.writes):
            return None
        kernel = self._target.compile(step.func, self._poison)
        order = arguments_of(step, self.program)
        mesh = self.program.mesh
        places = [[mesh.coordinate(rank)[axis] for axis in step.axes] for rank in range(mesh.num_devices)]

        def of_device(memory: Memory) -> Callable[[int], None]:
            held = memory.held
            columns = [
                _parts(given, held[given.storage])
                if isinstance(given, ProgramValue)
                else [memory.scalars[given] if isinstance(given, str) else given] * len(places)
                for given in order
            ]
            return lambda rank: kernel(*[column[rank] for column in columns], *places[rank])

        if len(places) == 1 or not self._target.threaded:
            return lambda memory: _one_by_one(of_device(memory), len(places))
        return lambda memory: device_threads().run(of_device(memory), len(places))

    def op(self, step: OpStep) -> Action:
        """All devices call the operator; those whose operands are the same tensors call it once and share the
        results, unless these are written again."""
        # Devices with equal operands share results, but the padding of each is its own. What looks at where the device
        # stands makes its padding on purpose.
        stored, kind = self.program.values, self._kind(step)
        results = tuple([stored[name].storage for name in step.results])
        # What a later step works on in place, as collectives do on buckets, each device has for itself.
        writes = self.program.last_writes
        last = all(writes.get(name, step) is step for name in results)
        return _OpAction(
            tile_functions(step, kind.calls),
            tuple([stored[name].storage for name in step.args]),
            results,
            kind.sizes,
            kind.poisoned,
            totals_of(step, results, self._totals) if self._totals else (),
            alike=kind.alike and last,
            apart=kind.apart,
        )

    def _kind(self, step: OpStep) -> _OpKind:
        """What is the same for all steps of one call on values that lie alike, as those of a model's layers."""
        layouts, whole = self.layouts, tuple([name in step.whole for name in step.results])
        comes, gives = (tuple([layouts[name] for name in group]) for group in (step.args, step.results))
        key = step.call, id(step.kernel), step.checked, whole, comes, gives
        if key not in self._kinds:
            differs = differs_by_rank(step)
            poison = self._poison and not differs
            self._kinds[key] = _OpKind(
                tile_calls(step, self.program, range(self.program.mesh.num_devices), self._target),
                tuple([layout.tile_bytes for layout in gives]),
                gives if poison else None,
                alike=not differs and not poison,
                apart=pays_apart(step.call),
            )
        return self._kinds[key]

    def collective(self, step: CollectiveStep) -> Action | None:
        """Tiles change from the layout of `src` to that of `dst`. Devices that end with the same tile share it where
        nothing writes to it later."""
        src, dst = self.program.values[step.src], self.program.values[step.dst]
        verify_collective(step, src, dst)
        reshard = reshard_of(dst.shape, torch_dtype(dst.dtype), src.sharding, dst.sharding)
        source, target = src.storage, dst.storage
        share = self.program.last_writes[target].collective is step and dst.slab is None
        copies = source == target and not reshard.in_place

        def action(memory: Memory) -> None:
            tiles = _parts(src, memory.held[source])
            made = tiles if source == target else _parts(dst, memory.held[target])
            reshard([clone(tile) for tile in tiles] if copies else tiles, made, share=share)

        if step.wait:
            return action

        def start(memory: Memory) -> None:
            memory.pending[step.dst] = action
            if not self._poison:
                action(memory)

        return start

    def loop(self, step: LoopStep) -> Action:
        """All devices run the loop's steps."""

        def hold(memory: Memory, name: str, tiles: Tiles) -> None:
            memory.hold(self.program.values[name].storage, tiles, self.layouts[name].tile_bytes)

        def backend(program: Program) -> VirtualMesh:
            return VirtualMesh(program, self._target, poison=self._poison)

        return LoopAction(step, self.program, backend, LoopTiles(list, list), hold)

    def wait(self, step: WaitStep) -> Action:
        """The collective has run when it was started. With poison it runs now: what used its result too early has found
        poison."""
        made, poison = step.collective.dst, self._poison

        def action(memory: Memory) -> None:
            collective = memory.pending.pop(made)
            if poison:
                collective(memory)

        return action

    def alloc(self, step: AllocStep) -> Action:
        """Every device gets a tile, unless the caller brought this storage."""
        storage, device, poison = step.storage, self.device, self._poison
        layout = self.layouts[self.program.stored[storage].name]

        def action(memory: Memory) -> None:
            if storage not in memory.held:
                memory.hold(storage, layout.allocate(device, poison), layout.tile_bytes)

        return action

    def free(self, step: FreeStep) -> Action:
        """The tiles are forgotten."""
        return lambda memory: memory.drop(step.storage)


@dataclass(frozen=True, slots=True)
class _OpKind:
    """What of an _OpAction is the same for steps that are alike; `calls` are those of each device."""

    calls: list[TileCall]
    sizes: tuple[int, ...]
    poisoned: tuple[Layout, ...] | None
    alike: bool
    apart: bool


@dataclass(slots=True, eq=False)
class _OpAction:
    """All devices call an operator, each its function of `by_rank`, on the storages `names`; what they make are
    `results`, of so many bytes each. `poisoned`: the layouts of these, if padding is poisoned; `totals`: what they are
    added to, where it is held; `alike`: devices with the same operands share results; `apart`: devices work at the same
    time, as there is enough to do. (One object: a plan has thousands, which the garbage collector looks at.)"""

    by_rank: Sequence[TileFunction]
    names: tuple[str, ...]
    results: tuple[str, ...]
    sizes: tuple[int, ...]
    poisoned: tuple[Layout, ...] | None
    totals: tuple[str, ...]
    alike: bool
    apart: bool

    def __call__(self, memory: Memory) -> None:
        by_rank, poisoned = self.by_rank, self.poisoned
        operands = list(zip(*(memory.held[name] for name in self.names), strict=True)) or [()] * len(by_rank)
        taken = operands
        totals: list[tuple[torch.Tensor | None, ...]] | None = None
        if any(name in memory.held for name in self.totals):
            nothing = [None] * len(by_rank)
            totals = list(zip(*(memory.held.pop(name, nothing) for name in self.totals), strict=True))
            taken = list(map(add, operands, totals))
        leaders = _leaders(taken) if self.alike else list(range(len(operands)))
        work = sorted(set(leaders))
        made: dict[int, list[torch.Tensor]] = {}

        def of_device(index: int) -> None:
            rank = work[index]
            function, given = by_rank[rank], operands[rank]
            made[rank] = function(*given) if totals is None else function.adding(given, totals[rank])
            if poisoned is not None:
                made[rank] = [layout.poisoned(t, rank) for layout, t in zip(poisoned, made[rank], strict=True)]

        _run_all(of_device, len(work), device_threads().run if self.apart else _one_by_one)
        for position, (name, size) in enumerate(zip(self.results, self.sizes, strict=True)):
            memory.hold(name, [made[leader][position] for leader in leaders], size)


def _parts(value: ProgramValue, tiles: Tiles) -> Tiles:
    """What a value is of the tiles of its storage."""
    return tiles if value.slab is None else [part_of(value, tile) for tile in tiles]


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


def _one_by_one(work: Callable[[int], None], count: int) -> None:
    for rank in range(count):
        work(rank)


def _check_storages(program: Program) -> None:
    for value in program.values.values():
        other = program.stored[value.storage]
        if value.slab is not None or other is value:
            continue
        if (other.tile_shape, other.dtype) != (value.tile_shape, value.dtype):
            raise AssertionError(
                f"program {program.name}: {other.name} and {value.name} can't share storage {value.storage!r}: "
                f"tiles {other.tile_shape} {other.dtype} and {value.tile_shape} {value.dtype}"
            )
