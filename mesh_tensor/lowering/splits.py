"""What splitting a factor means for one device: its tile, the tile's offset, and how much of it is valid."""

from __future__ import annotations

import re
from dataclasses import dataclass
from keyword import iskeyword

from tvm import arith, tirx

from mesh_tensor.base.mesh import Mesh
from mesh_tensor.rules.kernel.factors import Factor, tile_extent
from mesh_tensor.tir.nodes import nodes


class DeviceCoordinates:
    """The int32 parameters of a local kernel that tell a device where it is: one per axis, made on first use."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._vars: dict[str, tirx.Var] = {}

    def __getitem__(self, axis: str) -> tirx.Var:
        if axis not in self._vars:
            self._vars[axis] = coordinate_var(axis)
        return self._vars[axis]

    def mentioned_in(self, body: tirx.Stmt) -> dict[str, tirx.Var]:
        """The axes whose coordinate the body uses, in mesh order."""
        used = set(nodes(body, tirx.Var))
        return {axis: self._vars[axis] for axis in self.mesh.axis_names if self._vars.get(axis) in used}


def coordinate_var(axis: str) -> tirx.Var:
    """The variable of a coordinate: it is called as the axis is, or nearly so where that is no name in C."""
    name = re.sub(r"\W", "_", axis, flags=re.ASCII)
    return tirx.Var(name if name.isidentifier() and not iskeyword(name) else f"axis_{name}", "int32")


@dataclass(frozen=True, eq=False)
class Split:
    """A factor split over axes, major first. `size` is the whole dim's, `tile` what each device walks; it starts at
    global coordinate `offset`, and `valid` of it exist (the whole tile where `even`). A kernel that is
    `written_locally` already walks tiles, and means local coordinates.

    `start`: a device walks its tile slab by slab, one call each, and this is where in the tile the slab starts whose
    length `tile` then is; None: it walks the tile as a whole."""

    factor: Factor
    axes: tuple[str, ...]
    size: tirx.PrimExpr
    tile: tirx.PrimExpr
    written_locally: bool
    even: bool
    coordinates: DeviceCoordinates
    start: int | None = None

    @property
    def offset(self) -> tirx.PrimExpr:
        """The global coordinate of the first element of the tile, or of the slab."""
        total: tirx.PrimExpr = tirx.IntImm("int32", self.start or 0)
        if self.written_locally:
            return total
        size: object = self.size
        for axis in self.axes:
            n = self.coordinates.mesh.size(axis)
            size = tile_extent(size, [n])
            if n > 1:
                total = total + self.coordinates[axis] * size
        return total

    @property
    def valid(self) -> tirx.PrimExpr:
        """How many of the tile's elements lie inside the tensor: 0 .. tile. Every axis splits its parent's tile."""
        if self.even:
            return self.tile
        valid: tirx.PrimExpr = self.size
        size: object = self.size
        for axis in self.axes:
            n = self.coordinates.mesh.size(axis)
            size = tile_extent(size, [n])
            if n > 1:
                left = valid - self.coordinates[axis] * size
                valid = tirx.max(tirx.min(left, tirx.IntImm("int32", size) if isinstance(size, int) else size), 0)
        return valid

    @property
    def divides(self) -> bool:
        """Whether a call walks less than the whole dim."""
        return self.start is not None or any(self.coordinates.mesh.size(axis) > 1 for axis in self.axes)

    @property
    def is_first(self) -> tirx.PrimExpr:
        """Whether this device comes first on every axis of the split."""
        condition: tirx.PrimExpr | None = None
        for axis in self.axes:
            if self.coordinates.mesh.size(axis) > 1:
                here = self.coordinates[axis] == 0
                condition = here if condition is None else tirx.And(condition, here)
        return condition


def make_split(
    factor: Factor,
    axes: tuple[str, ...],
    coordinates: DeviceCoordinates,
    analyzer: arith.Analyzer,
    size: tirx.PrimExpr,
    written_locally: bool,
) -> Split:
    """The split of `factor` over `axes` of the coordinates' mesh; `size` is that of the whole dim."""
    sizes = [coordinates.mesh.size(a) for a in axes]
    tile = tile_extent(size, sizes)
    tile = tirx.IntImm("int32", tile) if isinstance(tile, int) else analyzer.simplify(tile)
    total: tirx.PrimExpr = tile
    for n in sizes:
        total = total * n
    even = analyzer.can_prove_equal(total, size)
    return Split(factor, axes, size, tile, written_locally, even, coordinates)
