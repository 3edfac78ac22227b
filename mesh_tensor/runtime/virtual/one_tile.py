"""Partial results of kernels of which each position is one device's, as rows of a table that lies on several devices.

On ranks every device has a tile with what it knows and zeros, and the tiles are summed. Here devices have one memory:
those that would be summed write into one tile, each its own positions, and that is the sum. Where the tiles of what the
sum becomes lie side by side, that tile is their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from tvm import tirx

from mesh_tensor.base.sharding import Sharding
from mesh_tensor.program.program import Program, ProgramValue
from mesh_tensor.program.steps import CollectiveStep, KernelStep, Step
from mesh_tensor.runtime.backend import Memory
from mesh_tensor.runtime.placement import Layout, layout_of
from mesh_tensor.runtime.reshard import Reshard, Tiles, reshard_of
from mesh_tensor.targets.dtypes import torch_dtype
from mesh_tensor.tir.one_writer import left_to_one

_MOST = 32  # devices that are summed: that only one of them writes is proved of each two


@dataclass(frozen=True, eq=False)
class OneTile:
    """A value that is summed over devices, which have one tile of it. `kernel`: the step that writes it so, in place of
    the program's `written`. `total`: what is left of `collective`, which fills the storage `target`; None if that is
    the value's own. `_firsts`: per device, the first one of those with which it is summed."""

    written: KernelStep
    kernel: KernelStep
    collective: CollectiveStep
    storage: str
    target: str
    total: Reshard | None
    _firsts: tuple[int, ...]
    _layout: Layout
    _whole: Reshard
    _like: torch.Tensor

    def allocate(self, memory: Memory, device: torch.device, poison: bool) -> None:
        """Give the devices tiles: in those of the target, if these are there and lie side by side."""
        target, made = memory.held.get(self.target), dict[int, torch.Tensor]()
        for first in dict.fromkeys(self._firsts):
            there = None if target is None else self._whole.side_by_side(target, first, self._like)
            made[first] = self._layout.new(device, poison) if there is None else there
        memory.hold(self.storage, [made[first] for first in self._firsts], self._layout.tile_bytes)

    def join(self, memory: Memory) -> None:
        """Of tiles that devices have in the target, let those that are summed have the first one's."""
        if self.total is None:
            tiles: Tiles = memory.held[self.storage]
            memory.held[self.storage] = [tiles[first] for first in self._firsts]

    def add_up(self, memory: Memory) -> None:
        """The collective."""
        if self.total is not None:
            self.total(memory.held[self.storage], memory.held[self.target], share=True, borrow=True)


def one_tiles(program: Program) -> list[OneTile]:
    """What of a program's values is such. Of several that a kernel writes, the last one's `kernel` writes all so."""
    found = []
    for written in program.kernels:
        kernel = written
        for name in written.writes:
            one = _one_tile(program, written, kernel, program.values[name])
            if one is not None:
                found.append(one)
                kernel = one.kernel
    return found


def _one_tile(program: Program, written: KernelStep, kernel: KernelStep, value: ProgramValue) -> OneTile | None:
    layout, users = value.sharding, _users(program, value.storage)
    axes = tuple(axis for axis, op in layout.partial if layout.mesh.size(axis) > 1 and op == "sum")
    is_plain = layout == layout.plain and layout.is_in_mesh_order
    if not axes or len(axes) < len(layout.partial) or not is_plain or value.storage in program.inputs:
        return None
    collective = users[1].starts if users[0] is written and len(users) > 1 else None
    if collective is None or collective.src != value.name or not collective.wait:
        return None
    whole, target = layout.with_replicate(*axes), program.values[collective.dst]
    if not _is_all(program, value, target, whole, users) or program.last_writes[target.storage] is not collective:
        return None
    func = _kernel(program, kernel, value, axes)
    if func is None:
        return None
    of = value.shape, torch_dtype(value.dtype)
    like = torch.empty(value.tile_shape, dtype=of[1], device="meta")
    total = None if target.storage == value.storage else reshard_of(*of, whole, target.sharding)
    lies, back = layout_of(*of, layout), reshard_of(*of, target.sharding, whole)
    firsts = tuple(layout.mesh.group_of(rank, axes)[0] for rank in range(layout.mesh.num_devices))
    step = replace(kernel, func=func)
    return OneTile(written, step, collective, value.storage, target.storage, total, firsts, lies, back, like)


def _is_all(
    program: Program, value: ProgramValue, target: ProgramValue, whole: Sharding, users: Sequence[Step]
) -> bool:
    """Whether nothing but the target is made of a value, and nobody has the memory of either for something else."""
    if target.storage == value.storage:
        return target.sharding == whole and _of_storage(program, value.storage) == {value.name, target.name}
    if target.slab is not None or target.sharding.partial or target.sharding != target.sharding.plain or len(users) > 2:
        return False
    alone = _of_storage(program, value.storage) == {value.name} and value.storage not in program.outputs
    is_free = target.storage not in program.inputs and _users(program, target.storage)[0] is users[1]
    return alone and is_free


def _of_storage(program: Program, storage: str) -> set[str]:
    return {name for name, value in program.values.items() if value.storage == storage}


def _users(program: Program, storage: str) -> list[Step]:
    """The steps that read or write a storage, in order."""
    return [step for step in program.steps if any(program.values[name].storage == storage for name in step.uses)]


def _kernel(program: Program, step: KernelStep, value: ProgramValue, axes: Sequence[str]) -> tirx.PrimFunc | None:
    """The step's kernel without what devices on the axes write to `value` in another's place; None if they may."""
    mesh = value.sharding.mesh
    if step.args.count(value.name) != 1 or not set(axes) <= set(step.axes):
        return None
    group = mesh.group_of(0, axes)
    if len(group) > _MOST:
        return None
    func = step.func
    tensors = [func.buffer_map[param] for param in func.params if param in func.buffer_map]
    layouts = [program.values[name].sharding for name in step.args]
    apart = [tensor for tensor, layout in zip(tensors, layouts, strict=True) if _differs(layout, axes)]
    own = dict(zip(step.axes, func.params[len(func.params) - len(step.axes) :], strict=True))
    devices = [{own[axis]: mesh.coordinate(rank)[axis] for axis in axes} for rank in group]
    return left_to_one(func, tensors[step.args.index(value.name)], devices, apart)


def _differs(layout: Sharding, axes: Sequence[str]) -> bool:
    """Whether devices that differ on the axes have other parts of a tensor, or other parts of its sum."""
    return any(layout.dim_of(axis) is not None or layout.partial_op(axis) is not None for axis in axes)
