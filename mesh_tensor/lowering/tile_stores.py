"""What the devices of a kernel over tiles store, where the tile helpers tell them apart.

A value that is made with `mesh_axis_index` or `get_tile_offset` differs from device to device. Devices that hold the
same part of a tensor must store the same into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tvm import tirx

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.kernel.live_ranges import LiveRange
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import Statement
from mesh_tensor.tir.tile_position import helpers_in

from .tile_sums import SplitFactors


def check_stores(name: str, analysis: Analysis, splits: SplitFactors, asked: Mapping[str, Sharding]) -> None:
    """Devices that hold the same part of a tensor store the same into it.

    Raises:
        MeshTensorError: lists the tensors, and the axes along which what is stored into them differs.
    """
    problems = list(_Stores(analysis, splits, asked).problems())
    if problems:
        refuse(
            problems,
            where=f"kernel {name!r}, written over tiles",
            why="the devices along the axis hold the same part of it",
            fix="let the axis split the buffer, or a dim that is summed into it, or store the same on all devices",
        )


class _Stores:
    def __init__(self, analysis: Analysis, splits: SplitFactors, asked: Mapping[str, Sharding]):
        self.analysis, self.kernel, self.splits, self.asked = analysis, analysis.kernel, splits, asked

    def problems(self) -> Iterator[str]:
        for live_range, axes in self._dependence().items():
            if not live_range.is_param:
                continue
            name = live_range.buffer.name
            for axis in sorted(axes - self._reduced(live_range)):
                if self.asked[name].dim_of(axis) is None:
                    yield f"buffer {name!r} is not split over axis {axis!r}, but what is stored into it depends on it"

    def _dependence(self) -> dict[LiveRange, set[str]]:
        """Per live range, the axes on whose coordinate a helper makes its content depend."""
        ranges = self.analysis.coordinates.ranges
        depends: dict[LiveRange, set[str]] = {live_range: set() for live_range in ranges.all}
        changed = True
        while changed:
            changed = False
            for statement in self.kernel.statements:
                if statement.write is None:
                    continue
                axes = self._axes_in(statement)
                for access in statement.reads:
                    read = ranges.of(access)
                    axes |= depends[read] - self._reduced(read)
                target = depends[ranges.of(statement.write)]
                changed |= not axes <= target
                target |= axes
        return depends

    def _axes_in(self, statement: Statement) -> set[str]:
        """The axes whose coordinate the statement uses itself."""
        indices = [index for access in statement.accesses for index in access.indices]
        exprs = [tirx.Evaluate(expr) for expr in (*statement.values, *statement.bounds, *indices)]
        return {
            helper.axis
            for expr in exprs
            for helper in helpers_in(expr)
            if helper.axis is not None and self._mesh.size(helper.axis) > 1
        }

    @property
    def _mesh(self) -> Mesh:
        return next(iter(self.asked.values())).mesh

    def _reduced(self, live_range: LiveRange) -> set[str]:
        """The axes over which a live range is partial: it is completed before anything else sees it."""
        partial = [factor for factor in self.splits if live_range in self.analysis.reductions[factor].partial]
        return {axis for factor in partial for axis in self.splits[factor]}
