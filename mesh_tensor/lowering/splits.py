"""What splitting a factor means for one device: its tile, the tile's offset, how much of it is valid; and what that
makes of the kernel's sizes: loop extents, on-chip buffers and parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

from tvm import tirx

from mesh_tensor.base.blocks import whole_blocks
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.kernel.factors import Blocked, Factor, tile_extent, with_whole_tiles
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.tir.linear import Linear
from mesh_tensor.tir.nodes import is_const, nodes
from mesh_tensor.tir.prover import Prover
from mesh_tensor.tir.rewrite import reshaped


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
    `written_locally` already walks tiles, and means local coordinates. Tiles are whole blocks of `block`.

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
    block: int = 1

    @property
    def offset(self) -> tirx.PrimExpr:
        """The global coordinate of the first element of the tile, or of the slab."""
        total: tirx.PrimExpr = tirx.IntImm("int32", self.start or 0)
        if self.written_locally:
            return total
        for axis, size in self._parts():
            total = total + self.coordinates[axis] * size
        return total

    @property
    def valid(self) -> tirx.PrimExpr:
        """How many of the tile's elements lie inside the tensor: 0 .. tile. Every axis splits its parent's tile."""
        if self.even:
            return self.tile
        valid: tirx.PrimExpr = self.size
        for axis, size in self._parts():
            left = valid - self.coordinates[axis] * size
            valid = tirx.max(tirx.min(left, tirx.IntImm("int32", size) if isinstance(size, int) else size), 0)
        return valid

    @property
    def divides(self) -> bool:
        """Whether a call walks less than the whole dim."""
        return self.start is not None or any(self._parts())

    @property
    def is_first(self) -> tirx.PrimExpr:
        """Whether this device comes first on every axis of the split."""
        condition: tirx.PrimExpr | None = None
        for axis, _ in self._parts():
            here = self.coordinates[axis] == 0
            condition = here if condition is None else tirx.And(condition, here)
        return condition

    @property
    def place(self) -> tirx.PrimExpr:
        """Which of the devices along the split's axes this one is, the first being 0."""
        place: tirx.PrimExpr = tirx.IntImm("int32", 0)
        for axis, _ in self._parts():
            place = place * self.coordinates.mesh.size(axis) + self.coordinates[axis]
        return place

    def _parts(self) -> Iterator[tuple[str, Any]]:
        """The axes of more than one device, each with how much of the dim is each device's."""
        sizes = [self.coordinates.mesh.size(axis) for axis in self.axes]
        size: Any = self.size if self.block == 1 else whole_blocks(int(self.size), math.prod(sizes), self.block)
        for axis, count in zip(self.axes, sizes, strict=True):
            size = tile_extent(size, [count])
            if count > 1:
                yield axis, size


def make_split(
    factor: Factor,
    axes: tuple[str, ...],
    coordinates: DeviceCoordinates,
    analyzer: Prover,
    size: tirx.PrimExpr,
    written_locally: bool,
    block: int = 1,
) -> Split:
    """The split of `factor` over `axes` of the coordinates' mesh; `size` is that of the whole dim. Tiles are whole
    blocks of `block`."""
    sizes = [coordinates.mesh.size(a) for a in axes]
    tile = tile_extent(size if block == 1 else whole_blocks(int(size), math.prod(sizes), block), sizes)
    tile = tirx.IntImm("int32", tile) if isinstance(tile, int) else analyzer.simplify(tile)
    total: tirx.PrimExpr = tile
    for n in sizes:
        total = total * n
    even = analyzer.can_prove_equal(total, size)
    return Split(factor, axes, size, tile, written_locally, even, coordinates, block=block)


class Shrink:
    """`extents`: new extents of loop variables. `buffers`: parameters and on-chip buffers that change shape.
    `windows`: the parameters' dims of which the device has windows."""

    def __init__(self, analysis: Analysis, splits: Sequence[Split], layouts: Mapping[str, Sharding]):
        self.analysis, self.kernel = analysis, analysis.kernel
        self.windows = {(name, dim): window for name, layout in layouts.items() for dim, window in layout.windows}
        self.splits: dict[Factor, Split] = {s.factor: s for s in splits}
        self.extents: dict[tirx.Var, tirx.PrimExpr] = {}
        self._loop_extents = {loop.var: loop.extent for loop in self.kernel.loops.values()}
        for factor, split in self.splits.items():
            for form in analysis.coordinates.forms[factor]:
                self._shrink_loops(form, split)
        self.buffers: dict[tirx.Buffer, tirx.Buffer] = {}
        self._shrink_params(layouts)
        self._shrink_on_chip()

    def buffer(self, buffer: tirx.Buffer) -> tirx.Buffer:
        """The buffer as this device has it."""
        return self.buffers.get(buffer, buffer)

    def extent(self, var: tirx.Var) -> tirx.PrimExpr:
        """How far a loop goes on this device."""
        return self.extents.get(var, self._loop_extents[var])

    def coverage(self, form: Linear) -> tirx.PrimExpr:
        """How far the local loops of a form reach: at least the tile, more where blocks reach past it."""
        var, coefficient = form.ordered[0]
        return self.extent(var) * coefficient

    def overruns(self, split: Split) -> bool:
        """Whether any block of the local kernel may reach past the tile's end."""
        return any(not self.fits(form, split) for form in self.analysis.coordinates.forms[split.factor])

    def is_uniform(self, split: Split) -> bool:
        """Whether all that walks the factor goes equally far in the local kernel: what is read was written there."""
        first, *others = [self.coverage(form) for form in self.analysis.coordinates.forms[split.factor]]
        return all(self.kernel.analyzer.can_prove_equal(first, other) for other in others)

    def fits(self, form: Linear, split: Split) -> bool:
        return self.kernel.analyzer.can_prove(self.coverage(form) <= split.tile)

    def _shrink_loops(self, form: Linear, split: Split) -> None:
        """The outermost loop walks the tile in blocks; where one block is enough, the next loop in shrinks as well."""
        terms = form.ordered
        for position, (var, coefficient) in enumerate(terms):
            old = self._loop_extents[var]
            if len(terms) == 1 and not self.kernel.analyzer.can_prove_equal(with_whole_tiles(old), split.factor.size):
                return
            new = ceildiv(split.tile, coefficient)
            if position:
                are_ints = isinstance(old, tirx.IntImm) and isinstance(new, tirx.IntImm)
                new = tirx.IntImm("int32", min(int(old), int(new))) if are_ints else tirx.min(old, new)
            self.extents[var] = new
            last_loop = position >= len(terms) - 2
            if last_loop or not is_const(new, 1):
                return

    def _shrink_params(self, layouts: Mapping[str, Sharding]) -> None:
        for name, buffer in self.kernel.params.items():
            if not self.kernel.uses(buffer):
                if name in layouts:
                    self.buffers[buffer] = reshaped(buffer, layouts[name].tile_shape(buffer.shape))
                continue
            shape = list(buffer.shape)
            for factor, split in self.splits.items():
                for param, dim in factor.dims:
                    if param == name:
                        shape[dim] = split.tile
            for (param, dim), window in self.windows.items():
                if param == name:
                    shape[dim] = tirx.IntImm("int32", window.length)
            if any(not new.same_as(old) for new, old in zip(shape, buffer.shape, strict=True)):
                self.buffers[buffer] = reshaped(buffer, shape)

    def _shrink_on_chip(self) -> None:
        """A buffer that holds all of a split factor holds the tile."""
        reaches: dict[tirx.Buffer, dict[int, list[tirx.PrimExpr]]] = {}
        for live_range in self.analysis.coordinates.ranges.all:
            if live_range.is_param:
                continue
            for dim in range(len(live_range.buffer.shape)):
                entry = self.analysis.coordinates.of_node((live_range, dim))
                if entry is None or entry[0] not in self.splits or entry[1].terms:
                    continue
                forms = [access.forms[dim] for _, access in (*live_range.reads, *live_range.writes)]
                reach = [self.coverage(form) for form in forms if form is not None]
                reaches.setdefault(live_range.buffer, {}).setdefault(dim, []).extend(reach)
        for buffer, dims in reaches.items():
            shape = [_largest(dims[d], buffer) if d in dims else size for d, size in enumerate(buffer.shape)]
            self.buffers[buffer] = reshaped(buffer, shape)


def ceildiv(size: tirx.PrimExpr, block: int) -> tirx.PrimExpr:
    """`T.ceildiv`, folded for constants."""
    if block == 1:
        return size
    if isinstance(size, tirx.IntImm):
        return tirx.IntImm("int32", -(-int(size) // block))
    return tirx.floordiv(size + (block - 1), block)


def _largest(sizes: list[tirx.PrimExpr], buffer: tirx.Buffer) -> tirx.PrimExpr:
    simplified = [tirx.IntImm("int32", int(s)) if isinstance(s, tirx.IntImm) else s for s in sizes]
    if all(isinstance(s, tirx.IntImm) for s in simplified):
        return max(simplified, key=int)
    raise Blocked(f"{buffer.name} holds the whole dim on chip, and its tile has no constant size")
