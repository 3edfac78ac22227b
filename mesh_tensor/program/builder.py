"""What the Programs of kernels (from_kernel) and of modules (from_graph) are built with: steps that change layouts, and
when memory comes to life and ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from mesh_tensor.redistribution.plan import Move

from .program import Parameter, ProgramValue, bytes_received
from .steps import AllocStep, CollectiveStep, FreeStep, Step


class Lasting(Protocol):
    """A step, or what becomes one: the values that it uses, and of these what comes in memory of its own."""

    @property
    def uses(self) -> tuple[str, ...]: ...

    @property
    def makes(self) -> tuple[str, ...]: ...


T = TypeVar("T", bound=Lasting)


class Stored(Protocol):
    """What lies in a storage: a value, or what becomes one."""

    @property
    def storage(self) -> str: ...


def collective_step(move: Move, src: ProgramValue, dst: ProgramValue, reason: str) -> CollectiveStep:
    """The step that moves `src` into `dst`, with the bytes that it takes."""
    size = bytes_received(move.kind, src, dst, move.axes)
    return CollectiveStep(move.kind, src.name, dst.name, move.axes, move.op, move.src_dim, move.dst_dim, size, reason)


def with_lifetimes(
    steps: Sequence[T], values: Mapping[str, Stored], parameters: Sequence[Parameter]
) -> tuple[T | AllocStep | FreeStep, ...]:
    """`steps`, and each storage is allocated before its first use, and workspaces are freed after their last."""
    kept = {values[p.input].storage for p in parameters if p.input is not None}
    outputs = {values[p.output].storage for p in parameters if p.output is not None}
    uses = [dict.fromkeys(values[name].storage for name in step.uses) for step in steps]
    last = {storage: index for index, storages in enumerate(uses) for storage in storages}
    lasting = kept | outputs
    alive = set(kept)
    result: list[T | AllocStep | FreeStep] = []
    for index, step in enumerate(steps):
        new = [storage for storage in uses[index] if storage not in alive]
        alive.update(new)
        made = {values[name].storage for name in step.makes}
        result += [AllocStep(storage) for storage in new if storage not in made]
        result.append(step)
        result += [FreeStep(storage) for storage in uses[index] if last[storage] == index and storage not in lasting]
    return tuple(result)


def with_ends(steps: Sequence[Step], values: Mapping[str, Stored], storages: Collection[str]) -> tuple[Step, ...]:
    """`steps`, and these storages, which callers brought, are freed after their last use."""
    last = {values[name].storage: index for index, step in enumerate(steps) for name in step.uses}
    ends: dict[int, list[Step]] = {}
    for storage in storages:
        if storage in last:
            ends.setdefault(last[storage], []).append(FreeStep(storage))
    return tuple(each for index, step in enumerate(steps) for each in (step, *ends.get(index, ())))
