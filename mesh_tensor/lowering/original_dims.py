"""A kernel that was lowered with dims taken apart (rules.granularity), seen with the dims that its author gave them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tvm import tirx

from mesh_tensor.base.blocks import whole_blocks
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.one_kernel import Assignment
from mesh_tensor.rules.kernel.factors import Blocked
from mesh_tensor.rules.kernel.granularity import Refined
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.tir.rewrite import reshaped, with_other_dims

from .splits import Split


def without_windows_of_groups(made: Refined, analysis: Analysis) -> Analysis:
    """The analysis of a kernel, or a part of it, in which dims that are taken apart are read whole: a window of groups,
    or of what is in each, is none of the dim."""
    apart = [(param, made.outer(param, dim) + at) for param, dim in made.groups for at in (0, 1)]
    windows = {dim: read for dim, read in analysis.windows.items() if dim not in apart}
    return analysis if len(windows) == len(analysis.windows) else replace(analysis, windows=windows)


def has_whole_groups(groups: int, parts: Sequence[int]) -> bool:
    """Whether tiles of that many groups, split into `parts` one after the other, start where tiles of whole groups do,
    of the dim that is taken apart."""
    walked, tile = whole_blocks(groups, math.prod(parts), 1), groups
    for devices in parts:
        walked, tile = walked // devices, -(-tile // devices)
        if walked != tile:
            return False
    return True


def uneven_groups(made: Refined, analysis: Analysis, split: Split) -> str | None:
    """Why a split's tiles are none of the parameters' own dims, None if they are: a part of the kernel may find more
    dims to be one factor than the whole did."""
    parts = [split.coordinates.mesh.size(axis) for axis in split.axes]
    for param, dim in made.groups:
        outer = made.outer(param, dim)
        if param in analysis.kernel.params and (param, outer) in split.factor.dims:
            groups = int(analysis.kernel.params[param].shape[outer])
            if not has_whole_groups(groups, parts):
                return f"{param} dim {dim} is walked in {groups} groups, which {', '.join(split.axes)} don't divide"
    return None


def asked_of_refined(made: Refined, asked: Mapping[str, Sharding]) -> dict[str, Sharding]:
    """What is asked, of the refined parameters: axes split groups."""
    return {name: _moved(made, name, sharding, refine=True) for name, sharding in asked.items()}


def with_original_dims(made: Refined, assignment: Assignment) -> Assignment:
    """What was decided, of the parameters as their author has them."""
    if not made.groups:
        return assignment
    layouts = [
        {name: _moved(made, name, layout, refine=False) for name, layout in given.items()}
        for given in (assignment.needed, assignment.produced)
    ]
    whole = {(name, made.original(name, dim)): reason for (name, dim), reason in assignment.whole.items()}
    return replace(assignment, needed=layouts[0], produced=layouts[1], whole=whole)


def _moved(made: Refined, name: str, layout: Sharding, *, refine: bool) -> Sharding:
    if not any(param == name for param, _ in made.groups):
        return layout
    extra = sum(param == name for param, _ in made.groups)
    move = made.outer if refine else made.original
    shards = {axis: move(name, dim) for axis in layout.mesh if (dim := layout.dim_of(axis)) is not None}
    ndim = layout.ndim + (extra if refine else -extra)
    moved = Sharding.make(layout.mesh, ndim, shards, partial=dict(layout.partial), name=name)
    windows = [(move(name, dim), window) for dim, window in layout.windows]
    blocks = dict(layout.blocks)
    if not refine:
        shape, uneven = made.shapes()[name], dict[int, int]()
        for param, dim in made.groups:
            at = made.outer(param, dim)
            if param == name and (at in blocks or int(shape[at]) % layout.num_shards(at)):
                uneven[at] = made.groups[(param, dim)]
        blocks = {at: blocks.get(at, 1) * uneven.get(at, 1) for at in (*blocks, *uneven)}
    return moved.with_windows(windows).with_blocks([(move(name, dim), n) for dim, n in blocks.items()])


def put_together(func: tirx.PrimFunc, made: Refined) -> tirx.PrimFunc:
    """A local kernel whose parameters have their own dims again.

    Raises `Blocked` (rules.factors) where some access has no form in them."""
    together = {
        buffer: reshaped(buffer, _shape(made, buffer))
        for buffer in func.buffer_map.values()
        if any(param == buffer.name for param, _ in made.groups)
    }
    if not together:
        return func

    def place(buffer: tirx.Buffer, mins: Sequence, extents: Sequence) -> tuple[list, list] | None:
        return _place(made, buffer, mins, extents)

    body = with_other_dims(func.body, together, place)
    if body is None:
        raise Blocked(f"a region of {', '.join(b.name for b in together)} has no form in the dims that are taken apart")
    buffers = {param: together.get(buffer, buffer) for param, buffer in func.buffer_map.items()}
    return tirx.PrimFunc(func.params, body, func.ret_type, buffers, func.attrs)


def _shape(made: Refined, buffer: tirx.Buffer) -> list:
    return [math.prod(sizes[1:], start=sizes[0]) for sizes in made.by_dim(buffer.name, list(buffer.shape))]


def _place(made: Refined, buffer: tirx.Buffer, mins: Sequence, extents: Sequence) -> tuple[list, list] | None:
    places, lengths = [], []
    shape = made.by_dim(buffer.name, list(buffer.shape))
    parts = zip(made.by_dim(buffer.name, mins), made.by_dim(buffer.name, extents), shape, strict=True)
    for lows, lens, sizes in parts:
        if len(lows) == 1:
            places.append(lows[0])
            lengths.append(lens[0])
            continue
        if int(lens[0]) != 1 and int(lens[1]) != int(sizes[1]):
            return None
        places.append(lows[0] * sizes[1] + lows[1])
        lengths.append(int(lens[0]) * int(lens[1]))
    return places, lengths
