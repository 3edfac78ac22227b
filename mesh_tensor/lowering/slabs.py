"""Slabs: a local kernel as several calls, each on a slab of its tiles, one after the other.

A slab is to a device what a tile is to the mesh: the sharding rule that says that a factor may be split over devices
also says that it may be split over calls, and the same rewrite makes the kernel. Slabs are whole blocks (but for the
rest at the end, which goes with the last), and lie in one piece in every tile that the factor indexes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tvm import ir, tirx

from mesh_tensor.base.dtypes import dtype_bits
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.rules.kernel.factors import Factor

from .layouts import LocalKernel
from .localize import localize
from .splits import DeviceCoordinates, Split

ALIGNMENT = 64  # bytes: kernels may load whole vectors from where a tile, or a slab, starts

Bounds = tuple[int, int]


def slab_dims(kernel: LocalKernel, factor: Factor) -> dict[int, int]:
    """For every argument of the kernel that the factor indexes, by its position: which dim."""
    params = list(kernel.analysis.kernel.params)
    return {params.index(param): dim for param, dim in factor.dims if param in params}


def why_no_slabs(kernel: LocalKernel, factor: Factor) -> str | None:
    """Why the kernel's calls can't be split along the factor, None if they can."""
    analysis, assignment = kernel.analysis, kernel.assignment
    name = factor.name
    if factor.blocked is not None:
        return f"{name} can't be split: {factor.blocked}"
    if kernel.refined:
        return "dims of its parameters are walked in groups"
    if analysis.reductions[factor].ops:
        return f"{name} is reduced ({', '.join(analysis.reductions[factor].ops)})"
    split = next((s for s in kernel.splits if s.factor is factor), None)
    if split is not None and not split.even:
        return f"{name} is split unevenly over {', '.join(split.axes)}"
    dims = [param for param, _ in factor.dims]
    for param in analysis.kernel.params:
        if dims.count(param) > 1:
            return f"{name} indexes several dims of {param}"
        if param in assignment.produced and param in assignment.needed:
            return f"{param} is read and written"
        if param in assignment.produced and param not in dims:
            return f"{name} doesn't index {param}, which every slab would write"
    for position, dim in slab_dims(kernel, factor).items():
        shape = _tile_shape(kernel, position)
        if any(size != 1 for size in shape[:dim]):
            param = list(analysis.kernel.params)[position]
            return f"{name} is dim {dim} of {param}: its slabs don't lie in one piece"
    return None


def slab_bounds(kernel: LocalKernel, factor: Factor, count: int) -> list[Bounds]:
    """Where at most `count` slabs of the tiles start and end along the factor: one if there is nothing to split."""
    size = local_size(kernel, factor)
    unit = factor.block
    for position, dim in slab_dims(kernel, factor).items():
        unit = math.lcm(unit, _aligned_rows(kernel, position, dim))
    units = size // unit
    count = max(1, min(count, units))
    cuts = [-(-units * index // count) * unit for index in range(count)]
    return list(zip(cuts, [*cuts[1:], size], strict=True))


def local_size(kernel: LocalKernel, factor: Factor) -> int:
    """How long the tiles of one device are along the factor."""
    split = next((s for s in kernel.splits if s.factor is factor), None)
    return int(factor.size if split is None else split.tile)


def slab_kernels(
    kernel: LocalKernel, factor: Factor, bounds: Sequence[Bounds], mesh: Mesh
) -> list[tuple[tirx.PrimFunc, tuple[str, ...]]]:
    """Per slab, the kernel and the axes whose coordinates it takes. Slabs for which the same code serves have one.

    Raises `Blocked` (rules.factors) where the kernel can't be written so."""
    made: list[tuple[tirx.PrimFunc, tuple[str, ...]]] = []
    name = f"{kernel.func.attrs['global_symbol']}_slab"
    for start, stop in bounds:
        splits = [*(s for s in kernel.splits if s.factor is not factor), _slab(kernel, factor, start, stop, mesh)]
        new = localize(kernel.analysis, splits, splits[-1].coordinates, name)
        made.append(next((old for old in made if old[1] == new[1] and ir.structural_equal(old[0], new[0])), new))
    return made


def _slab(kernel: LocalKernel, factor: Factor, start: int, stop: int, mesh: Mesh) -> Split:
    """The split of a factor that stands for one slab of the tile. It is called after the device's own split."""
    length = tirx.IntImm("int32", stop - start)
    own = next((s for s in kernel.splits if s.factor is factor), None)
    if own is not None:
        return replace(own, tile=length, start=start)
    coordinates = kernel.splits[0].coordinates if kernel.splits else DeviceCoordinates(mesh)
    return Split(factor, (), factor.size, length, kernel.written_locally, True, coordinates, start)


def _aligned_rows(kernel: LocalKernel, position: int, dim: int) -> int:
    """How many indices along `dim` a slab is a multiple of, so that it starts at an aligned address."""
    shape = _tile_shape(kernel, position)
    buffer = list(kernel.analysis.kernel.params.values())[position]
    row = max(1, math.prod(shape[dim + 1 :]) * dtype_bits(buffer.dtype) // 8)
    return ALIGNMENT // math.gcd(ALIGNMENT, row)


def _tile_shape(kernel: LocalKernel, position: int) -> list[int]:
    """The shape of an argument's tile, as the local kernel has it."""
    func = kernel.func
    params = [param for param in func.params if param in func.buffer_map]
    return [int(size) for size in func.buffer_map[params[position]].shape]
