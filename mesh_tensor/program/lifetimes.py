"""Lifetimes: when the memory of a Program's values comes to life and ends, and how much there is at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .steps import AllocStep, FreeStep, Parameter, Program, Step, of_kinds


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


def peak_bytes(program: Program) -> int:
    """The most bytes of tiles and workspaces that one device holds at once."""
    sizes = {storage: value.tile_bytes for storage, value in program.stored.items()}
    now = peak = sum(sizes[storage] for storage in program.inputs)
    table = {AllocStep: lambda step: sizes[step.storage], FreeStep: lambda step: -sizes[step.storage]}
    for change in of_kinds(program.steps, table):
        now += change
        peak = max(peak, now)
    return peak
