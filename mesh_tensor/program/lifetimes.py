"""Lifetimes: when the memory of a Program's values comes to life and ends, and how much there is at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .program import Parameter, Program
from .steps import AllocStep, FreeStep, LoopStep, OpStep, Step


class Stored(Protocol):
    """What lies in a storage."""

    @property
    def storage(self) -> str: ...


def with_lifetimes(
    steps: Sequence[Step], values: Mapping[str, Stored], parameters: Sequence[Parameter]
) -> tuple[Step, ...]:
    """`steps`, and each storage is allocated before its first use, and workspaces are freed after their last."""
    kept = {values[p.input].storage for p in parameters if p.input is not None}
    outputs = {values[p.output].storage for p in parameters if p.output is not None}
    uses = [dict.fromkeys(values[name].storage for name in step.uses) for step in steps]
    last = {storage: index for index, storages in enumerate(uses) for storage in storages}
    lasting = kept | outputs
    alive = set(kept)
    result: list[Step] = []
    for index, step in enumerate(steps):
        new = [storage for storage in uses[index] if storage not in alive]
        alive.update(new)
        made = {values[name].storage for name in step.makes}
        result += [AllocStep(storage) for storage in new if storage not in made]
        result.append(step)
        result += [FreeStep(storage) for storage in uses[index] if last[storage] == index and storage not in lasting]
    return tuple(result)


def held_bytes(program: Program) -> list[int]:
    """The bytes of tiles, padding included, that one device holds during each step. Inputs and outputs are there from
    the beginning, but for outputs that operators make."""
    return program.mean(_Held(program))


def peak_bytes(program: Program) -> int:
    """The most bytes of tiles and workspaces that one device holds at once."""
    return max([_Held(program).now, *held_bytes(program)])


class _Held:
    """What there is; every step means the bytes that are there with it."""

    def __init__(self, program: Program) -> None:
        self._values = program.values
        self._sizes = {storage: value.tile_bytes for storage, value in program.stored.items()}
        made = {program.values[name].storage for step in program.steps for name in step.makes}
        self._there: set[str] = set()
        self.now = 0
        for storage in program.inputs | (program.outputs - made):
            self._add(storage)

    def kernel(self, step: Step) -> int:
        """It works on what is there, as collectives do."""
        return self.now

    collective = wait = kernel

    def loop(self, step: LoopStep) -> int:
        """What is there, its results, and what its steps make on the way."""
        for name in step.makes:
            self._add(self._values[name].storage)
        bodies = [body for body in (step.body, step.test) if isinstance(body, Program)]
        return self.now + max(peak_bytes(body) - sum(body.values[n].tile_bytes for n in body.takes) for body in bodies)

    def op(self, step: OpStep) -> int:
        """Its results come with their memory."""
        for name in step.makes:
            self._add(self._values[name].storage)
        return self.now

    def alloc(self, step: AllocStep) -> int:
        """Memory that nobody brought comes to life."""
        self._add(step.storage)
        return self.now

    def free(self, step: FreeStep) -> int:
        """The memory is gone."""
        self._there.remove(step.storage)
        self.now -= self._sizes[step.storage]
        return self.now

    def _add(self, storage: str) -> None:
        if storage not in self._there:
            self._there.add(storage)
            self.now += self._sizes[storage]
