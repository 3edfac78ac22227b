"""The virtual mesh: every device of a mesh in one process, on the cores of a CPU or on one GPU.

Devices run a kernel step at the same time, in threads, and an operator where that makes up for handing it on; a
collective copies between their tiles. Memory is a list of tiles, one per device, per storage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import partial
from typing import Any

from tvm import tirx

from mesh_tensor.lowering.verify import enabled
from mesh_tensor.program.loop_step import LoopStep
from mesh_tensor.program.program import Program, ProgramValue
from mesh_tensor.program.steps import AllocStep, CollectiveStep, FreeStep, KernelStep, OpStep, Step, WaitStep, only
from mesh_tensor.program.verify import verify_collective
from mesh_tensor.rules.operator.cost import pays_apart
from mesh_tensor.runtime.backend import Action, Memory, arguments_of, part_of
from mesh_tensor.runtime.elementwise import clone, device_threads
from mesh_tensor.runtime.loops import LoopAction, LoopTiles
from mesh_tensor.runtime.placement import Layout, layout_of
from mesh_tensor.runtime.reshard import Reshard, Tiles, reshard_of
from mesh_tensor.targets.dtypes import torch_dtype
from mesh_tensor.targets.kernels import Target
from mesh_tensor.targets.op_steps import Section, differs_by_rank, in_sections, is_section, recorded_pairs, tile_calls
from mesh_tensor.targets.straight_line import TileCall
from mesh_tensor.targets.totals import totals_of

from .mesh_tensor import check_count
from .one_tile import one_tiles
from .operators import OpAction, OpKind, compared, one_by_one, written


class VirtualMesh:
    """Runs `program` for all devices of its mesh: the Backend of one process."""

    def __init__(self, program: Program, target: Target, *, poison: bool = False, totals: Collection[str] = ()) -> None:
        """`totals`: results that are added to what is held for them."""
        check_count(program.mesh)
        self.program = program
        self.device = target.device()
        self._target, self._poison, self._totals = target, poison, totals
        self._layouts: dict[str, Layout] = {}
        self.calls: dict[int, TileCall] = {}
        self._sized: list[Any] = []
        self._makers: list[Callable[[VirtualMesh], Any]] = []
        self._numbers: dict[tuple, int] = {}
        _check_storages(program)
        self._compares = enabled() and program.mesh.num_devices > 1
        self._records = recorded_pairs(program)
        alone = program.mesh.num_devices == 1 and not poison
        self._is_shared = not totals and not program.kernels and not program.loops and not (alone and self._records)
        self.stored = {storage: value.name for storage, value in program.stored.items()}
        self._places = {id(step): number for number, step in enumerate(program.steps)}
        together = program.mesh.num_devices > 1 and target.device_type == "cpu"
        self._one_tiles = one_tiles(program) if together else []
        first, last = program.steps[: program.overwrites_from], program.steps[program.overwrites_from :]
        if target.prepare is not None:
            target.prepare([self._compiled(step) for step in program.kernels if not self._makes_nothing(step)])
        self._first, self._last = self._actions(first, alone), self._actions(last, alone)

    def resized(self, program: Program) -> VirtualMesh | None:
        """The same for a program that differs in sizes only, in which values are of one shape where they are in this
        one; None if that has to be made anew."""
        if not self._is_shared:
            return None
        made = copy(self)
        made.program, made._layouts, made.calls = program, {}, {}
        made._sized = [make(made) for make in self._makers]
        return made

    def layout(self, name: str) -> Layout:
        """How a value lies on the devices."""
        made = self._layouts.get(name)
        if made is None:
            value = self.program.values[name]
            made = self._layouts[name] = layout_of(value.shape, torch_dtype(value.dtype), value.sharding)
        return made

    def _by_size(self, key: tuple, make: Callable[[VirtualMesh], Any]) -> int:
        """The number in `Memory.sized` of what `make` makes for a mesh of some sizes, the same for all of one key."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._sized)
            self._makers.append(make)
            self._sized.append(make(self))
        return number

    def run(self, memory: Memory, before_overwriting: Callable[[], None] = lambda: None) -> None:
        """Run all steps, in order, on the storages that `memory` holds."""
        memory.sized = self._sized
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
        if not is_section(run) or self.program.mesh.num_devices > 1 or self._poison:
            made, number = run[0].mean(self), self._places[id(run[0])]
            if made is None or not self._compares:
                return made
            return compared(made, self._by_size(("compared", number), lambda mesh: written(mesh.program, number)))
        first = Section(run, self.program, 0, self._target, listed=True, records=self._records, totals=self._totals)
        numbers = [self._places[id(step)] for step in first.steps]
        at = self._by_size(("section", numbers[0]), partial(_section_of, first=first, of=self.program, numbers=numbers))

        def action(memory: Memory) -> None:
            section, changed = memory.sized[at]
            section(memory.held)
            memory.changed(*changed)

        return action

    def _makes_nothing(self, step: KernelStep) -> bool:
        return all(self.layout(name).tile_bytes == 0 for name in step.writes)

    def _compiled(self, step: KernelStep) -> tirx.PrimFunc:
        """What is compiled for a step."""
        joined = [one.kernel for one in self._one_tiles if one.written is step]
        return (joined[-1] if joined else step).func

    def kernel(self, step: KernelStep) -> Action | None:
        """All devices run the step's kernel on their tiles; nothing happens if what it writes has no elements."""
        if self._makes_nothing(step):
            return None
        joined = [one for one in self._one_tiles if one.written is step]
        kernel = self._target.compile(self._compiled(step), self._poison)
        order = arguments_of(step, self.program)
        mesh = self.program.mesh
        places = [[mesh.coordinate(rank)[axis] for axis in step.axes] for rank in range(mesh.num_devices)]

        def of_device(memory: Memory) -> Callable[[int], None]:
            for one in joined:
                one.join(memory)
            held = memory.held
            columns = [
                _parts(given, held[given.storage])
                if isinstance(given, ProgramValue)
                else [memory.scalars[given] if isinstance(given, str) else given] * len(places)
                for given in order
            ]
            return lambda rank: kernel(*[column[rank] for column in columns], *places[rank])

        if len(places) == 1 or not self._target.threaded:
            return lambda memory: one_by_one(of_device(memory), len(places))
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
        return OpAction(
            step,
            kind,
            tuple([stored[name].storage for name in step.args]),
            results,
            totals_of(step, results, self._totals) if self._totals else (),
            alike=last and not differs_by_rank(step) and not self._poison,
        )

    def _kind(self, step: OpStep) -> int:
        """The number of the OpKind of all steps of one call on values that lie alike, as those of a model's layers."""
        whole = tuple([name in step.whole for name in step.results])
        comes, gives = (tuple([self.layout(name) for name in group]) for group in (step.args, step.results))
        number = self._places[id(step)]
        key = "op", step.call, id(step.kernel), step.checked, whole, comes, gives
        return self._by_size(key, lambda mesh: mesh._op_kind(number))

    def _op_kind(self, number: int) -> OpKind:
        step, values = only((self.program.steps[number],), OpStep)[0], self.program.values
        poison = self._poison and not differs_by_rank(step)
        return OpKind(
            tile_calls(step, self.program, range(self.program.mesh.num_devices), self._target),
            tuple([values[name].tile_bytes for name in step.results]),
            tuple([self.layout(name) for name in step.results]) if poison else None,
            apart=pays_apart(step.call),
        )

    def collective(self, step: CollectiveStep) -> Action | None:
        """Tiles change from the layout of `src` to that of `dst`. Devices that end with the same tile share it where
        nothing writes to it later."""
        src, dst = self.program.values[step.src], self.program.values[step.dst]
        verify_collective(step, src, dst)
        source, target, number = src.storage, dst.storage, self._places[id(step)]
        share = self.program.last_writes[target].collective is step and dst.slab is None
        one = next((one for one in self._one_tiles if one.collective is step), None)
        if one is not None:
            return one.add_up
        borrow = share and not self._poison and self._only_kernels_read(source, target, step)
        lies = self.layout(step.src), self.layout(step.dst), src.slab, dst.slab
        at = self._by_size(("collective", *lies), lambda mesh: mesh._change(number))

        def action(memory: Memory) -> None:
            src, dst, reshard = memory.sized[at]
            tiles = _parts(src, memory.held[source])
            made = tiles if source == target else _parts(dst, memory.held[target])
            copies = source == target and not reshard.in_place
            reshard([clone(tile) for tile in tiles] if copies else tiles, made, share=share, borrow=borrow)

        if step.wait:
            return action

        def start(memory: Memory) -> None:
            memory.pending[step.dst] = action
            if not self._poison:
                action(memory)

        return start

    def _only_kernels_read(self, source: str, target: str, collective: CollectiveStep) -> bool:
        """Nothing ever writes what a collective takes, and what it makes goes nowhere but into kernels: that may be the
        same memory."""
        values, writes = self.program.values, self.program.last_writes
        users = [s for s in self.program.steps if any(values[name].storage == target for name in s.uses)]
        given = {values[name].storage for p in self.program.parameters for name in (p.input, p.output) if name}
        others = [s for s in users if s is not collective]
        return len(only(others, KernelStep)) == len(others) and target not in given and source not in writes

    def _change(self, number: int) -> tuple[ProgramValue, ProgramValue, Reshard]:
        (step,) = only((self.program.steps[number],), CollectiveStep)
        src, dst = self.program.values[step.src], self.program.values[step.dst]
        return src, dst, reshard_of(dst.shape, torch_dtype(dst.dtype), src.sharding, dst.sharding)

    def loop(self, step: LoopStep) -> Action:
        """All devices run the loop's steps."""

        def hold(memory: Memory, name: str, tiles: Tiles) -> None:
            memory.hold(self.program.values[name].storage, tiles, self.layout(name).tile_bytes)

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
        # Where devices are compared, what nothing writes is alike.
        storage, device, poison = step.storage, self.device, self._poison or self._compares
        name = self.stored[storage]
        one = next((one for one in self._one_tiles if one.storage == storage and one.total is not None), None)
        if one is not None:
            return lambda memory: one.allocate(memory, device, poison)
        at = self._by_size(("alloc", self.layout(name)), lambda mesh: mesh.layout(name))

        def action(memory: Memory) -> None:
            if storage not in memory.held:
                layout = memory.sized[at]
                memory.hold(storage, layout.allocate(device, poison), layout.tile_bytes)

        return action

    def free(self, step: FreeStep) -> Action:
        """The tiles are forgotten."""
        return lambda memory: memory.drop(step.storage)


def _section_of(
    mesh: VirtualMesh, first: Section, of: Program, numbers: Sequence[int]
) -> tuple[Section, tuple[dict[str, int], list[str], int]]:
    """The steps of these numbers as a section, and what it changes of memory; the `first` one is that of a program."""
    program, stored = mesh.program, mesh.stored
    section = first if program is of else first.resized(program, numbers, mesh.calls)
    return section, section.memory(lambda storage: program.values[stored[storage]].tile_bytes)


def _parts(value: ProgramValue, tiles: Tiles) -> Tiles:
    """What a value is of the tiles of its storage."""
    return tiles if value.slab is None else [part_of(value, tile) for tile in tiles]


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
