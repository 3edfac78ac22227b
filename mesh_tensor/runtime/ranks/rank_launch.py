"""One rank's call of a program: the caller's local tensors become tiles, the steps run on this process's tile with
collectives over torch.distributed, and what comes out is valid parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from mesh_tensor.base.dtypes import ALIGNMENT, poison_value
from mesh_tensor.base.recent import KERNEL_SIZES, Recent
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.program.builder import with_ends
from mesh_tensor.program.program import Parameter, Program, Value
from mesh_tensor.program.steps import AllocStep, CollectiveStep, FreeStep, KernelStep, LoopStep, OpStep, Step, WaitStep
from mesh_tensor.program.verify import verify_collective
from mesh_tensor.runtime.ambient import mark_written
from mesh_tensor.runtime.backend import Action, Memory, arguments_of, part_of
from mesh_tensor.runtime.elementwise import clone, copy, fill
from mesh_tensor.runtime.loops import LoopAction, LoopTiles
from mesh_tensor.runtime.overwriting import copied
from mesh_tensor.runtime.reshard import reshard_of
from mesh_tensor.targets.dtypes import dtype_name, torch_dtype
from mesh_tensor.targets.kernels import Target
from mesh_tensor.targets.op_steps import Records, Section, in_sections, recorded_pairs
from mesh_tensor.targets.tile_memory import empty_tile

from .faults import Faults
from .plan import RankRedistribution, plan_exchange
from .ranks import Ranks


class Tiling:
    """How a value lies on this rank: the tile that kernels take, and its valid part, which is all that others see."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, sharding: Sharding, rank: int) -> None:
        self.shape, self.dtype, self.sharding = shape, dtype, sharding
        self.tile_shape = torch.Size(sharding.tile_shape(shape))
        self.valid_shape = torch.Size(sharding.valid_extent(shape, rank))
        self.tile_bytes = math.prod(self.tile_shape) * dtype.itemsize
        self._full = self.tile_shape == self.valid_shape
        self._valid = () if self._full else tuple(slice(0, size) for size in self.valid_shape)

    def tile(self, local: torch.Tensor, poison: bool = False) -> torch.Tensor:
        """A padded tile of a local tensor, which is the valid part or a whole tile: itself, where it serves."""
        if local.shape == self.tile_shape:
            return local if self.serves(local) else clone(local)
        new = fill(
            torch.empty(self.tile_shape, dtype=self.dtype, device=local.device),
            poison_value(dtype_name(self.dtype)) if poison else 0,
        )
        if local.numel():
            copy(self.valid(new), local)
        return new

    def serves(self, local: torch.Tensor) -> bool:
        """Whether a kernel can work on this very tensor."""
        return (
            local.shape == self.tile_shape
            and local.is_contiguous()
            and local.data_ptr() % ALIGNMENT == 0
            and not local.is_neg()
        )

    def valid(self, tile: torch.Tensor) -> torch.Tensor:
        """The valid part of a tile, as a view."""
        return tile if self._full else tile[self._valid]


@dataclass(slots=True)  # not frozen: that would take most of the time of a launch for a new size
class _RankPort:
    """A parameter of the program: how its input and its output lie, and where in memory.

    `fresh`: the input's memory is written, so the caller's can't be taken for it."""

    name: str
    input: Tiling | None
    input_storage: str
    output: Tiling | None
    output_storage: str
    fresh: bool

    @property
    def tiling(self) -> Tiling:
        """How an argument for it lies."""
        tiling = self.input or self.output
        assert tiling is not None
        return tiling


class RankLaunch:
    """A program, made ready for one rank."""

    def __init__(
        self,
        program: Program,
        target: Target,
        ranks: Ranks,
        faults: Faults,
        *,
        poison: bool = False,
        carried: Records | None = None,
        ends: Collection[str] = (),
    ) -> None:
        """`carried`: what torch keeps in this program for another one, or in that for this one. `ends`: inputs that
        `on_tiles` forgets after their last use."""
        self.program, self.ranks = program, ranks
        self._faults, self._poison = faults, poison
        self._backend = RankBackend(program, target, ranks, faults, poison=poison, carried=carried, ends=ends)
        self._carried = frozenset(record.name for record in (carried or {}).values())
        self._ports = [self._port(parameter) for parameter in program.parameters]
        self.ports = {port.name: port for port in self._ports}
        self.tilings = {port.name: port.tiling for port in self._ports}
        self.inputs = sum(port.input is not None for port in self._ports)
        self._changes: Recent[tuple, RankRedistribution] = Recent(KERNEL_SIZES)

    def __call__(
        self,
        locals_: Mapping[str, torch.Tensor | None],
        scalars: Mapping[str, int | float],
        entangled: bool = False,
        leave: Callable[[Memory], bool] | None = None,
    ) -> dict[str, torch.Tensor]:
        """The valid parts of the written parameters. `locals_` has this rank's part of every parameter, as a valid
        part or a whole tile, or None where there is nothing to come in. What is given for an output is written;
        `entangled`: only when all steps are done, because it may overlap with an input. `leave` says, before a step
        overwrites inputs, whether these may be those that were given, instead of copies."""
        memory = Memory(dict(scalars))
        for port in self._ports:
            given = locals_.get(port.name)
            if port.input is not None:
                own = not port.fresh or leave is not None
                ready = given is not None and own and port.input.serves(given)
                memory.held[port.input_storage] = given if ready else self._enter(port, given)
            elif given is not None and not entangled and port.output is not None and port.output.serves(given):
                memory.held[port.output_storage] = given

        def before_overwriting() -> None:
            if leave is not None and not leave(memory):
                memory.held |= copied([port.input_storage for port in self._ports if port.fresh], memory.held)

        self._backend.run(memory, before_overwriting)
        results, written = {}, []
        for port in self._ports:
            if port.output is not None:
                tile, given = memory.held[port.output_storage], locals_.get(port.name)
                results[port.name] = port.output.valid(tile)
                if given is not None and given is not tile:
                    self._write(port.output, tile, given)
                written += [] if given is None else [given]
        mark_written(written)
        return results

    def on_tiles(self, held: dict[str, torch.Tensor], kept: dict[str, Any] | None) -> dict[str, torch.Tensor]:
        """Run on tiles of the inputs, by storage, as `entered` gives them; what the storages hold afterwards. `kept`
        has what was carried to this program, and gets what is carried from it."""
        memory = Memory({})
        memory.held = held
        if kept:
            held.update((name, kept.pop(name)) for name in self._carried & kept.keys())
        self._backend.run(memory)
        if kept is not None:
            kept.update((name, held[name]) for name in self._carried & held.keys())
        return held

    def entered(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """This rank's part of an input as its tile: of memory of its own, where the steps write to it."""
        return self._enter(self.ports[name], local)

    def change(self, tiling: Tiling, to: Sharding, tile: torch.Tensor) -> torch.Tensor:
        """The tile in another layout. All ranks have to ask."""
        key = (tiling.shape, tiling.dtype, tiling.sharding, to)
        change = self._changes.made(key, lambda: RankRedistribution(*key, self.ranks))
        try:
            return change(tile)
        except RuntimeError as error:
            doing = f"a change of layout, '{tiling.sharding}' -> '{to}'"
            self._faults.blame(error, doing, range(self.ranks.mesh.num_devices))

    @staticmethod
    def _write(tiling: Tiling, tile: torch.Tensor, given: torch.Tensor) -> None:
        source = tiling.valid(tile)
        target = tiling.valid(given) if given.shape == tiling.tile_shape else given
        if target.numel():
            copy(target, source)

    def _enter(self, port: _RankPort, given: torch.Tensor | None) -> torch.Tensor:
        assert port.input is not None
        if given is not None and not port.fresh and port.input.serves(given):
            return given
        if given is None:
            return torch.zeros(port.input.tile_shape, dtype=port.input.dtype, device=self._backend.device)
        tile = port.input.tile(given, self._poison)
        return clone(tile) if tile is given and port.fresh else tile

    def _port(self, parameter: Parameter) -> _RankPort:
        values = self.program.values
        taken = values[parameter.input] if parameter.input else None
        given = values[parameter.output] if parameter.output else None
        return _RankPort(
            parameter.name,
            tiling_of(taken, self.ranks.rank) if taken else None,
            taken.storage if taken else "",
            tiling_of(given, self.ranks.rank) if given else None,
            given.storage if given else "",
            taken is not None and taken.storage in self.program.last_writes,
        )


def tilings_of(program: Program, rank: int) -> dict[str, Tiling]:
    """How arguments for a program's parameters lie on a rank."""
    values = program.values
    return {p.name: tiling_of(values[str(p.input or p.output)], rank) for p in program.parameters}


def tiling_of(value: Value, rank: int) -> Tiling:
    """How a value of a program lies on a rank."""
    return _tiling(value.shape, str(value.dtype), value.sharding, rank)


@lru_cache(maxsize=4096)
def _tiling(shape: tuple[int, ...], dtype: str, sharding: Sharding, rank: int) -> Tiling:
    return Tiling(shape, torch_dtype(dtype), sharding, rank)


def _only_taken(program: Program, names: Collection[str]) -> list[str]:
    """The storages of these inputs, but for those that are outputs, too."""
    values, outputs = program.values, {program.values[p.output].storage for p in program.parameters if p.output}
    taken = [values[p.input].storage for p in program.parameters if p.name in names and p.input]
    return [storage for storage, count in Counter(taken).items() if count == 1 and storage not in outputs]


FailedAt = Callable[[Exception], Step]


class RankBackend:
    """Runs `program` for one device of its mesh: the Backend of one rank. Memory is one tile per storage, and what is
    kept for another program, or by one (`carried`), under its name."""

    def __init__(
        self,
        program: Program,
        target: Target,
        ranks: Ranks,
        faults: Faults,
        *,
        poison: bool = False,
        carried: Records | None = None,
        ends: Collection[str] = (),
    ) -> None:
        self.program = program
        self.device = target.device()
        self._target, self._ranks, self._faults, self._poison = target, ranks, faults, poison
        self._records = {**recorded_pairs(program), **(carried or {})}
        first, last = program.steps[: program.overwrites_from], program.steps[program.overwrites_from :]
        if ends and not last:
            first = with_ends(first, program.values, _only_taken(program, ends))
        self._first, self._last = self._actions(first), self._actions(last)

    def run(self, memory: Memory, before_overwriting: Callable[[], None] = lambda: None) -> None:
        """Run all steps, in order, on the storages that `memory` holds."""
        self._act(self._first, memory)
        before_overwriting()
        self._act(self._last, memory)

    def _act(self, actions: Sequence[tuple[FailedAt, Action]], memory: Memory) -> None:
        for failed_at, action in actions:
            try:
                action(memory)
            except Exception as error:
                self._faults.explain(error, self.program, failed_at(error))

    def _actions(self, steps: Sequence[Step]) -> list[tuple[FailedAt, Action]]:
        return [(at, action) for run in in_sections(steps) for at, action in [self._run(run)] if action is not None]

    def _run(self, run: Sequence[Step]) -> tuple[FailedAt, Action | None]:
        """What steps that follow each other are here, and which of them raised an error."""
        first = run[0]
        if not isinstance(first, OpStep):
            return lambda _: first, first.mean(self)
        section = Section(run, self.program, self._ranks.rank, self._target, records=self._records)
        return section.failed_at, lambda memory: section(memory.held)

    def kernel(self, step: KernelStep) -> Action | None:
        """The step's kernel on this rank's tiles; nothing happens if what it writes has no elements."""
        if all(0 in self.program.values[name].tile_shape for name in step.writes):
            return None
        kernel = self._target.compile(step.func, self._poison)
        arguments = arguments_of(step, self.program)
        at = self.program.mesh.coordinate(self._ranks.rank) if step.axes else {}
        place = [at[axis] for axis in step.axes]
        if all(isinstance(given, Value) and given.slab is None for given in arguments):
            storages = [self.program.values[name].storage for name in step.args]
            return lambda memory: kernel(*[memory.held[storage] for storage in storages], *place)

        def of_memory(given: Value | str | int, memory: Memory) -> Any:
            if isinstance(given, Value):
                return part_of(given, memory.held[given.storage])
            return memory.scalars[given] if isinstance(given, str) else given

        return lambda memory: kernel(*[of_memory(given, memory) for given in arguments], *place)

    def op(self, step: OpStep) -> Action:
        """The operator on this rank's tiles."""
        section = Section([step], self.program, self._ranks.rank, self._target, records=self._records)
        return lambda memory: section(memory.held)

    def collective(self, step: CollectiveStep) -> Action | None:
        """This rank's tile changes from the layout of `src` to that of `dst`."""
        src, dst = self.program.values[step.src], self.program.values[step.dst]
        verify_collective(step, src, dst)
        dtype = torch_dtype(dst.dtype)
        exchange = plan_exchange(dst.shape, dtype, src.sharding, dst.sharding, self._ranks)
        source, target = src.storage, dst.storage
        copies = source == target and not reshard_of(dst.shape, dtype, src.sharding, dst.sharding).in_place

        def start(memory: Memory) -> Any:
            tile = part_of(src, memory.held[source])
            return exchange.start(clone(tile) if copies else tile, part_of(dst, memory.held[target]))

        def start_only(memory: Memory) -> None:
            before = list(memory.pending.values())
            memory.pending[step.dst] = start(memory)
            for pending in before:  # what they still have to send goes beside what comes next, not into their waits
                pending.advance()

        return start_only if not step.wait else lambda memory: start(memory).wait()

    def loop(self, step: LoopStep) -> Action:
        """This rank runs the loop's steps, as often as all others."""

        def hold(memory: Memory, name: str, tile: torch.Tensor) -> None:
            memory.held[self.program.values[name].storage] = tile

        def backend(program: Program) -> RankBackend:
            return RankBackend(program, self._target, self._ranks, self._faults, poison=self._poison)

        return LoopAction(step, self.program, backend, LoopTiles(lambda tile: [tile], lambda tiles: tiles[0]), hold)

    def wait(self, step: WaitStep) -> Action:
        """What this rank's tile needs has come in, and is put together."""
        made = step.collective.dst
        return lambda memory: memory.pending.pop(made).wait()

    def alloc(self, step: AllocStep) -> Action:
        """A tile, unless the caller brought this storage."""
        storage, value = step.storage, self.program.stored[step.storage]
        shape, dtype, device, poison = value.tile_shape, torch_dtype(value.dtype), self.device, self._poison

        def action(memory: Memory) -> None:
            if storage not in memory.held:
                tile = empty_tile(shape, dtype, device)
                if poison:
                    fill(tile, poison_value(value.dtype))
                memory.held[storage] = tile

        return action

    def free(self, step: FreeStep) -> Action:
        """The tile is forgotten."""
        return lambda memory: memory.held.pop(step.storage)
