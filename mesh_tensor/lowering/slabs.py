"""Slabs: a local kernel as several calls, each on a slab of its tiles, one after the other.

A slab is to a device what a tile is to the mesh: the sharding rule that says that a factor may be split over devices
also says that it may be split over calls, and the same rewrite makes the kernel. Slabs are whole blocks (but for the
rest at the end, which goes with the last), and lie in one piece in every tile that the factor indexes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import ir, tirx

from mesh_tensor.base.dtypes import ALIGNMENT, dtype_bits
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.rules.kernel.factors import Factor
from mesh_tensor.rules.kernel.padded_blocks import widen

from .local_view import LocalKernel
from .localize import localize
from .splits import DeviceCoordinates, Split

SlabBounds = tuple[int, int]
#: The kernel of a slab, and the axes whose coordinates it takes.
SlabKernel = tuple[tirx.PrimFunc, tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class Slabs:
    """How the calls of a local kernel on `mesh` can be split; `args` are known by their positions."""

    kernel: LocalKernel
    mesh: Mesh

    def factor(self, position: int, dim: int) -> Factor | None:
        """The factor that indexes a dim of an argument; None if it is needed whole."""
        return self.kernel.analysis.factor_of(self.param(position), dim)

    def param(self, position: int) -> str:
        """The name that the kernel has for an argument."""
        return list(self.kernel.analysis.kernel.params)[position]

    def dims(self, factor: Factor) -> dict[int, int]:
        """For every argument of the kernel that the factor indexes: which dim."""
        params = list(self.kernel.analysis.kernel.params)
        return {params.index(param): dim for param, dim in factor.dims if param in params}

    def why_not(self, factor: Factor) -> str | None:
        """Why the kernel's calls can't be split along the factor, None if they can."""
        analysis, assignment = self.kernel.analysis, self.kernel.assignment
        name = factor.name
        if factor.blocked is not None:
            return f"{name} can't be split: {factor.blocked}"
        if self.kernel.refined:
            return "dims of its parameters are walked in groups"
        if factor in analysis.lookups.values():
            return f"{name} is indexed by data"
        if any(other is factor for other, _ in analysis.windows.values()):
            return f"what is next to tiles of {name} is read"
        if analysis.reductions[factor].ops:
            return f"{name} is reduced ({', '.join(analysis.reductions[factor].ops)})"
        split = self._split(factor)
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
        for position, dim in self.dims(factor).items():
            if any(size != 1 for size in self._tile_shape(position)[:dim]):
                return f"{name} is dim {dim} of {self.param(position)}: its slabs don't lie in one piece"
        return None

    def bounds(self, factor: Factor, count: int) -> list[SlabBounds]:
        """Where at most `count` slabs of the tiles start and end along the factor: one if there is nothing to split."""
        size = self.size(factor)
        unit = factor.block
        for position, dim in self.dims(factor).items():
            unit = math.lcm(unit, self._aligned_rows(position, dim))
        units = size // unit
        count = max(1, min(count, units))
        cuts = [-(-units * index // count) * unit for index in range(count)]
        return list(zip(cuts, [*cuts[1:], size], strict=True))

    def size(self, factor: Factor) -> int:
        """How long the tiles of one device are along the factor."""
        split = self._split(factor)
        return int(factor.size if split is None else split.tile)

    def kernels(self, factor: Factor, bounds: Sequence[SlabBounds]) -> list[SlabKernel]:
        """Per slab, the kernel and the axes whose coordinates it takes. Slabs for which the same code serves have one.

        Raises `Blocked` (rules.factors) where the kernel can't be written so."""
        made: list[SlabKernel] = []
        name = f"{self.kernel.func.attrs['global_symbol']}_slab"
        layouts = {} if self.kernel.written_locally else self.kernel.assignment.needed
        for start, stop in bounds:
            splits = [*(s for s in self.kernel.splits if s.factor is not factor), self._slab(factor, start, stop)]
            local, axes = localize(self.kernel.analysis, splits, splits[-1].coordinates, name, layouts)
            new = widen(local, self.kernel.analysis.kernel.func), axes
            made.append(next((old for old in made if old[1] == new[1] and ir.structural_equal(old[0], new[0])), new))
        return made

    def _split(self, factor: Factor) -> Split | None:
        return next((split for split in self.kernel.splits if split.factor is factor), None)

    def _slab(self, factor: Factor, start: int, stop: int) -> Split:
        """The split of a factor that stands for one slab of the tile. It is called after the device's own split."""
        kernel, length, own = self.kernel, tirx.IntImm("int32", stop - start), self._split(factor)
        if own is not None:
            return replace(own, tile=length, start=start)
        coordinates = kernel.splits[0].coordinates if kernel.splits else DeviceCoordinates(self.mesh)
        return Split(factor, (), factor.size, length, kernel.written_locally, True, coordinates, start)

    def _aligned_rows(self, position: int, dim: int) -> int:
        """How many indices along `dim` a slab is a multiple of, so that it starts at an aligned address."""
        shape = self._tile_shape(position)
        buffer = list(self.kernel.analysis.kernel.params.values())[position]
        row = max(1, math.prod(shape[dim + 1 :]) * dtype_bits(buffer.dtype) // 8)
        return ALIGNMENT // math.gcd(ALIGNMENT, row)

    def _tile_shape(self, position: int) -> list[int]:
        """The shape of an argument's tile, as the local kernel has it."""
        func = self.kernel.func
        params = [param for param in func.params if param in func.buffer_map]
        return [int(size) for size in func.buffer_map[params[position]].shape]
