"""Whether devices that are to hold the same do, bit for bit: on ranks each has its own, and who reads that of one
device would never see that another's is wrong. After every step, where checks are on (`mesh_tensor.lowering.verify`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mesh_tensor.lowering.verify import raise_on
from mesh_tensor.program.program import Program, ProgramValue
from mesh_tensor.program.steps import Step
from mesh_tensor.runtime.backend import Action, Memory, part_of
from mesh_tensor.runtime.placement import layout_of
from mesh_tensor.runtime.reshard import Tiles
from mesh_tensor.targets.dtypes import torch_dtype

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compared(step: Step, program: Program, action: Action | None) -> Action | None:
    """The action of a step, and then a look at what it wrote.

    Raises:
        VerificationError: when it is run, and devices that are to hold the same of a value don't. It names the value,
            the devices and the first element.
    """
    is_there = step.starts is None or step.starts.wait
    values = [value for name in step.writes if not (value := program.values[name]).inner] if is_there else []
    if action is None or not values:
        return action

    def run(memory: Memory) -> None:
        action(memory)
        problems = [fact for value in values for fact in _differing(value, memory.held[value.storage])]
        raise_on(problems, f"program {program.name}: what {step.words} leaves")

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
