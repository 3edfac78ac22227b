"""A loop's step as an action: its programs run on a memory of their own, which begins anew each time with what is
handed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mesh_tensor.program.loop_step import LoopStep
from mesh_tensor.program.program import Program
from mesh_tensor.targets.tile_memory import memory_of

from .backend import Backend, Memory, cloned
from .elementwise import clone

# What a backend has of a value: one tile, or one of each of its devices.
Local = Any


@dataclass(frozen=True)
class LoopTiles:
    """What a backend does with what it has of values: all of it as tiles; of tiles what it has; and whether a value
    without dims is true."""

    tiles: Callable[[Local], Sequence[torch.Tensor]]
    local: Callable[[Sequence[torch.Tensor]], Local]


class LoopAction:
    """Runs the step of `program`; `backend` makes what runs its programs. `hold` takes what is there after the loop."""

    def __init__(
        self,
        step: LoopStep,
        program: Program,
        backend: Callable[[Program], Backend],
        tiles: LoopTiles,
        hold: Callable[[Memory, str, Local], None],
    ) -> None:
        self._step, self._tiles, self._hold = step, tiles, hold
        self._values = program.values
        self._body = _Part(step.body, backend)
        self._test = None if step.test is None else _Part(step.test, backend)

    def __call__(self, memory: Memory) -> None:
        """Run the loop."""
        step, held, values = self._step, memory.held, self._values
        state = {each.now: held[values[each.first].storage] for each in step.carried}
        inner = {each.now for each in step.carried}
        given = {name: held[values[name].storage] for name in step.reads if name not in inner}
        rows = [_Rows(step.count or 0) for _ in step.stacked]
        for name in step.writes:
            memory.expect(values[name].storage, values[name].tile_bytes)
        done = 0
        while self._goes_on(done, {**given, **state}, memory):
            made = self._body.run({**given, **state}, memory)
            state = {each.now: made[each.then] for each in step.carried}
            for column, (row, _) in zip(rows, step.stacked, strict=True):
                column.put(done, self._tiles.tiles(made[row]))
            del made
            done += 1
        taken = {memory_of(tile) for local in given.values() for tile in self._tiles.tiles(local)}
        for each in step.carried:
            self._hold(memory, each.last, self._apart(state[each.now], taken))
        for column, (_, name) in zip(rows, step.stacked, strict=True):
            self._hold(memory, name, self._tiles.local(column.tiles(values[name].tile_shape)))

    def _goes_on(self, done: int, given: dict[str, Local], memory: Memory) -> bool:
        if self._test is None:
            return done < (self._step.count or 0)
        return bool(self._tiles.tiles(self._test.run(given, memory)[self._step.goes_on])[0])

    def _apart(self, local: Local, taken: set[int]) -> Local:
        """The tiles in memory that nothing else has."""
        made = [clone(tile) if memory_of(tile) in taken else tile for tile in self._tiles.tiles(local)]
        taken.update(map(memory_of, made))
        return self._tiles.local(made)


class _Rows:
    """The rows of each device, one of every turn, in the memory that has them all; devices that share every row share
    that."""

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._made: Sequence[torch.Tensor | None] = ()

    def put(self, turn: int, tiles: Sequence[torch.Tensor]) -> None:
        """The rows of a turn."""
        known: dict[tuple[int, int], torch.Tensor] = {}
        used = set[int]()
        made = []
        for before, tile in zip(self._made or [None] * len(tiles), tiles, strict=True):
            key = id(before), id(tile)
            if key not in known:
                if before is None:
                    own = tile.new_empty((self._turns, *tile.shape))
                else:
                    own = before.clone() if id(before) in used else before
                used.add(id(before))
                own[turn] = tile
                known[key] = own
            made.append(known[key])
        self._made = made

    def tiles(self, shape: tuple[int, ...]) -> list[torch.Tensor]:
        """Those of the devices."""
        known = {id(rows): rows.reshape(shape) for rows in self._made if rows is not None}
        return [known[id(rows)] for rows in self._made]


class _Part:
    """A program of a loop. What it overwrites of what it takes is its own each time."""

    def __init__(self, program: Any, backend: Callable[[Program], Backend]) -> None:
        assert isinstance(program, Program)
        self._values, self._backend = program.values, backend(program)
        self._takes, self._overwritten = program.takes, program.inputs & program.last_writes.keys()
        self._gives = [parameter.output for parameter in program.parameters if parameter.output is not None]

    def run(self, given: dict[str, Local], memory: Memory) -> dict[str, Local]:
        """What it makes of these values."""
        inner = Memory(memory.scalars)
        for name in self._takes:
            storage = self._values[name].storage
            local = given[name]
            inner.held[storage] = cloned(local) if storage in self._overwritten else local
        self._backend.run(inner)
        memory.peak_bytes = max(memory.peak_bytes, memory.live_bytes + inner.peak_bytes)
        return {name: inner.held[self._values[name].storage] for name in self._gives}
