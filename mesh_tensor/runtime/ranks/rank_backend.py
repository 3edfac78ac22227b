"""The steps of a program for one rank: kernels and operators on its tiles, collectives over torch.distributed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from mesh_tensor.base.dtypes import poison_value
from mesh_tensor.program.builder import handed_on_first, with_ends
from mesh_tensor.program.loop_step import LoopStep
from mesh_tensor.program.program import Program, ProgramValue
from mesh_tensor.program.steps import AllocStep, CollectiveStep, FreeStep, KernelStep, OpStep, Step, WaitStep
from mesh_tensor.program.verify import verify_collective
from mesh_tensor.runtime.backend import Action, Memory, arguments_of, part_of
from mesh_tensor.runtime.elementwise import clone, fill
from mesh_tensor.runtime.loops import LoopAction, LoopTiles
from mesh_tensor.runtime.reshard import reshard_of
from mesh_tensor.targets.dtypes import torch_dtype
from mesh_tensor.targets.kernels import Target
from mesh_tensor.targets.op_steps import Records, Section, in_sections, is_section, recorded_pairs
from mesh_tensor.targets.tile_memory import empty_tile

from .faults import Faults
from .plan import plan_exchange
from .ranks import Ranks


def _only_taken(program: Program, names: Collection[str]) -> list[str]:
    """The storages of these inputs, but for those that are outputs, too."""
    values, outputs = program.values, {program.values[p.output].storage for p in program.parameters if p.output}
    taken = [values[p.input].storage for p in program.parameters if p.name in names and p.input]
    return [storage for storage, count in Counter(taken).items() if count == 1 and storage not in outputs]


def _records(program: Program, carried: Records | None) -> Records:
    return {**recorded_pairs(program), **(carried or {})}


def in_parts(
    program: Program,
    *,
    carried: Records | None = None,
    ends: Collection[str] = (),
    totals: Collection[str] = (),
    handed_on: Collection[str] = (),
) -> tuple[Sequence[Step], Sequence[Step], Sequence[Step]]:
    """What a rank runs until results are handed on, which is nothing where that comes last; what it runs then; and what
    writes over what callers bring. All is as RankBackend takes it."""
    first, last = program.steps[: program.overwrites_from], program.steps[program.overwrites_from :]
    if last:
        return (), first, last
    ended = _only_taken(program, ends)
    if handed_on and program.mesh.num_devices == 1:
        kept = {first_result: record.name for first_result, record in _records(program, carried).items()}
        return *handed_on_first(program, handed_on, ended, totals, kept), ()
    return (), with_ends(first, program.values, ended) if ended else first, ()


FailedAt = Callable[[Exception], Step]


class RankBackend:
    """Runs `program` for one device of its mesh: the Backend of one rank. Memory is one tile per storage, and what is
    kept for another program, or by one, under its name."""

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
        totals: Collection[str] = (),
        handed_on: Collection[str] = (),
    ) -> None:
        """`carried`: what torch keeps in this program for another one, or in that for this one. `ends`: inputs that
        are forgotten after their last use. `totals`: results that are added to what is held for them. `handed_on`:
        results that are there as soon as may be, if there is one device and nothing that callers bring is written."""
        self.program, self.ranks, self.faults, self.poison = program, ranks, faults, poison
        self.device = target.device()
        self.carried = frozenset(record.name for record in (carried or {}).values())
        self._target, self._records = target, _records(program, carried)
        self._totals = totals
        before, first, last = in_parts(program, carried=carried, ends=ends, totals=totals, handed_on=handed_on)
        self._before, self._first, self._last = self._actions(before), self._actions(first), self._actions(last)
        self.hands_on = bool(before)

    def run(
        self,
        memory: Memory,
        before_overwriting: Callable[[], None] = lambda: None,
        hand_on: Callable[[], None] = lambda: None,
    ) -> None:
        """Run all steps, in order, on the storages that `memory` holds. `hand_on` is called as soon as what is to be
        handed on is there, if it `hands_on`."""
        self._act(self._before, memory)
        hand_on()
        self._act(self._first, memory)
        before_overwriting()
        self._act(self._last, memory)

    def _act(self, actions: Sequence[tuple[FailedAt, Action]], memory: Memory) -> None:
        for failed_at, action in actions:
            try:
                action(memory)
            except Exception as error:
                self.faults.explain(error, self.program, failed_at(error))

    def _actions(self, steps: Sequence[Step]) -> list[tuple[FailedAt, Action]]:
        return [(at, action) for run in in_sections(steps) for at, action in [self._run(run)] if action is not None]

    def _run(self, run: Sequence[Step]) -> tuple[FailedAt, Action | None]:
        """What steps that follow each other are here, and which of them raised an error."""
        first = run[0]
        if not is_section(run):
            return lambda _: first, first.mean(self)
        section = Section(run, self.program, self.ranks.rank, self._target, records=self._records, totals=self._totals)
        return section.failed_at, lambda memory: section(memory.held)

    def kernel(self, step: KernelStep) -> Action | None:
        """The step's kernel on this rank's tiles; nothing happens if what it writes has no elements."""
        if all(0 in self.program.values[name].tile_shape for name in step.writes):
            return None
        kernel = self._target.compile(step.func, self.poison)
        arguments = arguments_of(step, self.program)
        at = self.program.mesh.coordinate(self.ranks.rank) if step.axes else {}
        place = [at[axis] for axis in step.axes]
        if all(isinstance(given, ProgramValue) and given.slab is None for given in arguments):
            storages = [self.program.values[name].storage for name in step.args]
            return lambda memory: kernel(*[memory.held[storage] for storage in storages], *place)

        def of_memory(given: ProgramValue | str | int, memory: Memory) -> Any:
            if isinstance(given, ProgramValue):
                return part_of(given, memory.held[given.storage])
            return memory.scalars[given] if isinstance(given, str) else given

        return lambda memory: kernel(*[of_memory(given, memory) for given in arguments], *place)

    def op(self, step: OpStep) -> Action:
        """The operator on this rank's tiles."""
        section = Section(
            [step], self.program, self.ranks.rank, self._target, records=self._records, totals=self._totals
        )
        return lambda memory: section(memory.held)

    def collective(self, step: CollectiveStep) -> Action | None:
        """This rank's tile changes from the layout of `src` to that of `dst`."""
        src, dst = self.program.values[step.src], self.program.values[step.dst]
        verify_collective(step, src, dst)
        dtype = torch_dtype(dst.dtype)
        exchange = plan_exchange(dst.shape, dtype, src.sharding, dst.sharding, self.ranks)
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
            return RankBackend(program, self._target, self.ranks, self.faults, poison=self.poison)

        return LoopAction(step, self.program, backend, LoopTiles(lambda tile: [tile], lambda tiles: tiles[0]), hold)

    def wait(self, step: WaitStep) -> Action:
        """What this rank's tile needs has come in, and is put together."""
        made = step.collective.dst
        return lambda memory: memory.pending.pop(made).wait()

    def alloc(self, step: AllocStep) -> Action:
        """A tile, unless the caller brought this storage."""
        storage, value = step.storage, self.program.stored[step.storage]
        shape, dtype, device, poison = value.tile_shape, torch_dtype(value.dtype), self.device, self.poison

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
