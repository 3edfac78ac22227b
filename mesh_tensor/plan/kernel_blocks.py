"""Which whole blocks the tiles of a kernel's dims are made of, where axes don't divide the dims into blocks that the
kernel depends on; and whether that moves less than to have the dims whole."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.base.blocks import Margins, whole_blocks
from mesh_tensor.base.dtypes import itemsize
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.kernel.factors import Factor, tile_extent
from mesh_tensor.rules.kernel.sharding_rule import Analysis

from .tir_rule import Sizes, known_size, typical_size

Axes = tuple[str, ...]


@dataclass(frozen=True)
class KernelBlocks:
    """What is known of a kernel that is over whole tensors: the layouts that are `asked`, the `sizes` of symbols as far
    as they are known, and which parameters it takes and leaves. `in_place`: tensors stay where they are asked to lie
    wherever that can be."""

    analysis: Analysis
    mesh: Mesh
    asked: Mapping[str, Sharding]
    sizes: Sizes
    inputs: Collection[str]
    outputs: Collection[str]
    in_place: bool

    def cut(self, factor: Factor, axes: Axes, block: int = 1) -> str | None:
        """Why tiles, made of whole blocks of `block`, are not whole blocks of the factor's where the axes split it, and
        have to be; or the first one, not even one of them."""
        sizes = [n for axis in axes if (n := self.mesh.size(axis)) > 1]
        whole = known_size(factor.size, self.sizes)
        whole = whole if block == 1 else whole_blocks(int(whole), math.prod(sizes), block)
        tiles = [tile_extent(whole, sizes[: level + 1]) for level in range(len(sizes))]
        prover = self.analysis.kernel.analyzer
        if tiles and factor.first and not prover.can_prove(tirx.convert(tiles[-1]) >= factor.block):
            return f"{factor.first}, and the first tile of {tiles[-1]} holds no block of {factor.block}"
        if factor.aligned is None:
            return None
        tile = next((t for t in tiles if not prover.can_prove_equal(tirx.floormod(t, factor.block), 0)), None)
        return None if tile is None else f"{factor.aligned}, and tiles of {tile} are not whole blocks of {factor.block}"

    def whole(self, factor: Factor, axes: Axes) -> int | None:
        """The block of which tiles can be whole ones where the axes cut some: what devices lack of such tiles, and of
        theirs of the results, is no more than all that they lack of what is read. None if it is more."""
        if self._parts(axes) == 1 or not isinstance(factor.size, tirx.IntImm):
            return None
        ways = [(self._moved(factor, axes, block), block) for block in {factor.block, self._group(factor)}]
        (moved, gathered), block = min(ways)
        return block if self.in_place or moved <= gathered else None

    def cheaper(self, factor: Factor, axes: Axes) -> int | None:
        """The block of which tiles are whole ones because less moves than if what is read of groups starts between two
        of them: key heads of queries. None: nothing is read so, or no less moves."""
        group = self._group(factor)
        if self._parts(axes) == 1 or group == factor.block or not isinstance(factor.size, tirx.IntImm):
            return None
        is_less = self._moved(factor, axes, group) < self._moved(factor, axes, 1)
        return group if is_less and self.cut(factor, axes, group) is None else None

    def _parts(self, axes: Axes) -> int:
        return math.prod(self.mesh.size(axis) for axis in axes)

    def _group(self, factor: Factor) -> int:
        """The least number of whole blocks after which all that is read of groups starts with one of them."""
        near = [read for other, read in self.analysis.windows.values() if other is factor]
        return math.lcm(factor.block, *(read.per // math.gcd(read.stride, read.per) for read in near))

    def _moved(self, factor: Factor, axes: Axes, block: int) -> tuple[float, float]:
        """How many bytes devices lack of tiles of whole blocks, and of theirs of the results; and how many of all that
        is read."""
        parts, moved, gathered = self._parts(axes), 0.0, 0.0
        margins = Margins.of(int(factor.size), parts, block)
        for param, dim in factor.dims:
            if self._is_split(param, dim, axes):
                is_read, is_written = param in self.inputs, param in self.outputs
                moved += self._bytes(param) * (is_read * margins.of_inputs + is_written * margins.of_results)
                gathered += self._bytes(param) * is_read * margins.gathered
        for (param, dim), (near, reaches) in self.analysis.windows.items():
            if near is factor and self._is_split(param, dim, axes):
                moved += self._bytes(param) * reaches.lacking(margins.walked, parts) / max(1, reaches.extent)
                gathered += self._bytes(param) * margins.gathered
        return moved, gathered

    def _is_split(self, param: str, dim: int, axes: Axes) -> bool:
        """Whether some of the axes are asked to split a dim."""
        return param in self.asked and bool(set(self.asked[param].dims[dim]) & set(axes))

    def _bytes(self, param: str) -> int:
        buffer = self.analysis.kernel.params[param]
        return math.prod(typical_size(size, self.sizes) for size in buffer.shape) * itemsize(buffer.dtype)
